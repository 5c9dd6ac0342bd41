package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"lazaret.dev/lazaret/escalation/rules"
)

// remember adds a rule that the developer has seen and accepted to the end of the profile's file, and puts it in force.
func (d *desk) remember(_ string, r rules.Rule) error {
	d.remembering.Lock()
	defer d.remembering.Unlock()
	d.c.mu.Lock()
	esc := d.c.plan.Profile.Escalation
	d.c.mu.Unlock()
	added, err := rememberIn(d.c.plan.Dirs, d.c.plan.Profile.Name, r)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(esc.Rules, func(have EscalationRule) bool { return sameJSON(have, added) }) {
		return nil
	}
	esc.Rules = append(slices.Clone(esc.Rules), added)
	set, _, err := esc.compile(d.res)
	if err != nil {
		return err
	}
	d.server.SetRules(set)
	d.c.mu.Lock()
	d.c.plan.Profile.Escalation = esc // later sessions are compared with it
	d.c.mu.Unlock()
	return nil
}

// rememberIn writes r into the file of a profile, which is replaced as a whole, and returns it as the file has it.
func rememberIn(dirs Dirs, profile string, r rules.Rule) (EscalationRule, error) {
	file := filepath.Join(dirs.Config, "profiles", profile+".toml")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return EscalationRule{}, err
	}
	if real, err := filepath.EvalSymlinks(file); err == nil { // a link to a file that is kept elsewhere stays one
		file = real
	}
	old, err := readConfig(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return EscalationRule{}, err
	}
	text := bytes.Clone(old)
	if len(text) > 0 {
		text = append(bytes.TrimRight(text, "\n"), "\n\n"...)
	}
	text = append(text, "# Added when its prompt was approved for good.\n"+r.String()...)
	base, err := parseProfile(defaultProfile, "built-in default", Profile{})
	if err != nil {
		return EscalationRule{}, err
	}
	before, after := base, base
	if before, err = parseProfile(old, file, base); err == nil {
		after, err = parseProfile(text, file, base)
	}
	if err != nil {
		return EscalationRule{}, fmt.Errorf("add a rule to %s: %w", file, err)
	}
	if n := len(before.Escalation.Rules); len(after.Escalation.Rules) == n+1 {
		added := after.Escalation.Rules[n]
		if slices.ContainsFunc(before.Escalation.Rules, func(have EscalationRule) bool { return sameJSON(have, added) }) {
			return added, nil
		}
		return added, replaceConfig(file, text)
	}
	return EscalationRule{}, fmt.Errorf("add a rule to %s: its rules are written in a form that nothing can be added to", file)
}

// replaceConfig puts a new file in the place of an old one, with its mode.
func replaceConfig(file string, text []byte) error {
	mode := fs.FileMode(0o600)
	if st, err := os.Lstat(file); err == nil {
		mode = st.Mode().Perm()
	}
	if err := writeAtomic(file, text); err != nil {
		return err
	}
	return os.Chmod(file, mode)
}
