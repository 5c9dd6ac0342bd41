package gitconfig

import "slices"

// Inside makes the system configuration of the sandbox's git: the developer's identity and safe
// directories as facts, and what Git needs there. excludes is the path inside of the copy of the
// developer's excludes, "" if there is none. No other setting of the developer goes inside.
//
// e should be made with Env.GitDir set, so that an identity chosen by includeIf is the right one.
func Inside(e *Effective, excludes string) *File {
	f := &File{}
	set := func(section, key, value string) {
		f.Entries = append(f.Entries, Entry{Section: section, Key: key, Value: value})
	}
	// Inode numbers and owners differ between inside and the host: without this each side would read
	// every file again after the other has written the index.
	set("core", "checkstat", "minimal")
	if excludes != "" {
		set("core", "excludesfile", excludes)
	}
	// Slow file layers: wait longer for a lock that the host holds.
	set("core", "filesreflocktimeout", "2000")
	set("core", "packedrefstimeout", "2000")
	set("reftable", "locktimeout", "2000")
	// What only the sandbox's worktrees and reflogs reach must stay in the shared object store: collecting is the
	// developer's. A repository in a path needs no network, and submodules of such a one are usual.
	set("gc", "auto", "0")
	set("maintenance", "auto", "false")
	f.Entries = append(f.Entries, Entry{Section: "protocol", Sub: "file", HasSub: true, Key: "allow", Value: "always"})
	for _, name := range [][2]string{
		{"user", "name"}, {"user", "email"}, {"author", "name"}, {"author", "email"}, {"committer", "name"}, {"committer", "email"}, {"init", "defaultbranch"},
	} {
		if o, ok := e.Last(name[0] + "." + name[1]); ok && !o.NoValue {
			set(name[0], name[1], o.Value)
		}
	}
	for _, dir := range e.safeDirectories() {
		set("safe", "directory", dir)
	}
	return f
}

// safeDirectories is the value of safe.directory as Git understands it: an empty value forgets those
// before it.
func (e *Effective) safeDirectories() []string {
	var list []string
	for _, o := range e.Settings {
		switch {
		case !o.Is("safe", "directory") || o.HasSub || o.NoValue:
		case o.Value == "":
			list = nil
		case !slices.Contains(list, o.Value):
			list = append(list, o.Value)
		}
	}
	return list
}
