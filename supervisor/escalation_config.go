package supervisor

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2/unstable"

	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
)

// Escalation is the section [escalation] of an Agent Profile: what the sandbox may ask to have run on the host.
type Escalation struct {
	// Default is what happens to commands that no rule names: "ask" or "deny".
	Default string `toml:"default"`
	// Env names variables of the developer that commands get, besides those that every command gets ([rules.BaseEnv]).
	Env []string `toml:"env"`
	// Wait is how long a request waits for the developer at most.
	Wait Duration `toml:"wait"`
	// Rules are tried in their order, after those that deny.
	Rules []EscalationRule `toml:"rule"`

	// Places tells where the entries stand, for errors; it is no setting.
	Places Places `toml:"-" json:"-"`
}

// EscalationRule is one [[escalation.rule]].
type EscalationRule struct {
	Name     string     `toml:"name"`     // for people
	Argv     []string   `toml:"argv"`     // the program and its exact arguments
	Trailing string     `toml:"trailing"` // "none" or "any" further arguments
	Auto     bool       `toml:"auto"`     // run it without asking
	Deny     bool       `toml:"deny"`     // refuse it without asking; such rules win
	Cwd      string     `toml:"cwd"`      // host directory to run it in; "": the agent's, which must be in the workspace
	Env      []string   `toml:"env"`      // variables of the developer for it, in place of the section's
	Timeout  Duration   `toml:"timeout"`  // limit of the run
	Output   Size       `toml:"output"`   // limit of what it writes
	Stdin    bool       `toml:"stdin"`    // pass the agent's standard input
	ByPath   bool       `toml:"by_path"`  // run a script of the workspace by its path, not as a sealed copy
	Match    [][]string `toml:"match"`    // commands that the rule must match, checked when the profile is read
	NotMatch [][]string `toml:"not_match"`
}

// String is for people.
func (e Escalation) String() string {
	out := []string{"default " + e.Default, fmt.Sprintf("env %q", e.Env), "wait " + e.Wait.String()}
	for _, r := range e.Rules {
		out = append(out, fmt.Sprintf("rule %q", r.Argv))
	}
	return "{" + strings.Join(out, ", ") + "}"
}

// rule is r as package rules has it. Every command gets the base variables; none of them makes a program run another.
func (r EscalationRule) rule() rules.Rule {
	action := rules.Ask
	switch {
	case r.Deny:
		action = rules.Deny
	case r.Auto:
		action = rules.Auto
	}
	out := rules.Rule{Name: r.Name, Argv: r.Argv, Trailing: rules.Trailing(r.Trailing), Action: action, Dir: r.Cwd, Time: time.Duration(r.Timeout),
		Output: int64(min(r.Output, 1<<62)), Stdin: r.Stdin, ByPath: r.ByPath, Match: r.Match, NotMatch: r.NotMatch}
	if r.Env != nil {
		out.Env = withBase(r.Env)
	}
	return out
}

// withBase returns the base variables and names, without repeating one.
func withBase(names []string) []string {
	out := slices.Clone(rules.BaseEnv)
	for _, n := range names {
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// compile makes the rules that decide, with what is worth a warning.
func (e Escalation) compile(r rules.Resolver) (*rules.Set, []string, error) {
	var list []rules.Rule
	for _, rule := range e.Rules {
		list = append(list, rule.rule())
	}
	set, warnings, err := rules.Compile(list, rules.Options{Default: rules.Action(e.Default), Env: withBase(e.Env), Resolver: r})
	var notes []string
	for _, w := range warnings {
		notes = append(notes, e.Places.fault(w.Index, w.Field, w.Err))
	}
	return set, notes, e.explain(err)
}

// explain names the place of each fault.
func (e Escalation) explain(err error) error {
	if err == nil {
		return nil
	}
	faults := []error{err}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		faults = many.Unwrap()
	}
	var lines []string
	for _, f := range faults {
		var fault *rules.Fault
		if errors.As(f, &fault) {
			lines = append(lines, e.Places.fault(fault.Index, fault.Field, fault.Err))
		} else {
			lines = append(lines, f.Error())
		}
	}
	return refusal(strings.Join(lines, "\n"), "correct the rule; docs/escalation.md explains them")
}

// keys of a rule by the names that package rules has for them.
var ruleKeys = map[string]string{"time": "timeout", "dir": "cwd", "action": "auto"}

// fault says what is wrong and where, as file and line if they are known.
func (p Places) fault(index int, field string, err error) string {
	if key, ok := ruleKeys[field]; ok && index >= 0 {
		field = key
	}
	key := "escalation." + field
	if index >= 0 {
		key = fmt.Sprintf("escalation.rule[%d].%s", index, field)
	}
	for at := key; at != ""; at = at[:max(0, strings.LastIndexAny(at, ".["))] {
		if line, ok := p.Lines[at]; ok {
			return fmt.Sprintf("%s:%d: %s: %v", p.File, line, key, err)
		}
	}
	if index >= 0 && p.File != "" {
		return fmt.Sprintf("%s: %s: %v", p.File, key, err)
	}
	return fmt.Sprintf("%s: %v", key, err)
}

// check finds every fault of the section that is one on every machine.
func (e Escalation) check() error {
	for i, r := range e.Rules {
		if r.Auto && r.Deny {
			return e.explain(&rules.Fault{Index: i, Field: "deny", Err: errors.New("contradicts auto = true")})
		}
	}
	if e.Wait <= 0 || time.Duration(e.Wait) > 24*time.Hour {
		return e.explain(&rules.Fault{Index: -1, Field: "wait", Err: errors.New("give more than 0 and at most 24h")})
	}
	_, _, err := e.compile(rules.Resolver{Path: rules.SearchPath(os.Getenv("PATH"))})
	return err
}

// names are the variables that any rule passes.
func (e Escalation) names() []string {
	out := withBase(e.Env)
	for _, r := range e.Rules {
		for _, n := range r.Env {
			if !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	return out
}

// environ are the developer's variables that commands may get.
func (e Escalation) environ() []string { return runner.Env(os.Environ(), e.names()) }

// findRulePlaces reads the lines of [escalation] from a file that has been decoded without error.
func findRulePlaces(file string, b []byte) Places {
	places := Places{File: file, Lines: map[string]int{}}
	var p unstable.Parser
	p.Reset(b)
	var table []string
	rule := -1
	for p.NextExpression() {
		e := p.Expression()
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			var first *unstable.Node
			table, first = keyOf(e)
			if slices.Equal(table, []string{"escalation", "rule"}) {
				rule++
				table = []string{"escalation", fmt.Sprintf("rule[%d]", rule)}
				places.Lines[strings.Join(table, ".")] = lineOf(&p, first)
			}
		case unstable.KeyValue:
			key, first := keyOf(e)
			path := append(slices.Clone(table), key...)
			if len(path) < 2 || path[0] != "escalation" {
				continue
			}
			places.Lines[strings.Join(path, ".")] = lineOf(&p, first)
		}
	}
	return places
}
