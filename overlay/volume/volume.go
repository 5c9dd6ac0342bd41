// Package volume decides which host paths may be mounted in a sandbox besides the workspace.
//
// What is kept true, for supervisor: an accepted volume neither contains nor lies within anything
// of Lazaret's own ([Rules.Protected]: configuration, Storage Root, runtime directory; SR-5), is a
// directory or regular file under its canonical name, and is read-only unless configuration says
// otherwise. [Check] and [CheckAll] are pure; [Open] is the one look at the file system.
package volume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Volume is one extra mount of a profile.
type Volume struct {
	Host     string // canonical host path
	Target   string // path in the sandbox
	Writable bool   // the zero value is read-only
}

// Rules are what volumes are checked against. All paths are canonical and absolute.
type Rules struct {
	Protected []string // Lazaret's own directories on the host
	Taken     []string // targets of the sandbox's other mounts: workspace, anchors
}

// ErrRefused is in the chain of every refusal.
var ErrRefused = errors.New("volume refused")

// reserved are targets that belong to gVisor or to Lazaret, with all below them.
var reserved = []string{"/proc", "/sys", "/dev", "/run/lazaret"}

// never are host trees that give away more than files: kernel interfaces and sockets of services.
var never = []string{"/proc", "/sys", "/dev", "/run", "/var/run"}

// Within tells whether path is dir or lies below it. Both are clean and absolute.
func Within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

func clean(path string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path && !strings.ContainsFunc(path, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// Check decides on one volume.
func Check(v Volume, r Rules) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %q -> %q: %s", ErrRefused, v.Host, v.Target, fmt.Sprintf(format, args...))
	}
	switch {
	case !clean(v.Host):
		return refuse("the host path is not absolute and clean")
	case !clean(v.Target):
		return refuse("the target is not absolute and clean")
	case v.Host == "/":
		return refuse("the host's whole file system")
	case v.Target == "/":
		return refuse("the target is the sandbox's root")
	}
	for _, p := range r.Protected {
		if Within(v.Host, p) || Within(p, v.Host) {
			return refuse("%q is Lazaret's own and must stay out of the sandbox", p)
		}
	}
	for _, p := range never {
		if Within(v.Host, p) {
			return refuse("%s holds no plain files", p)
		}
	}
	for _, p := range reserved {
		if Within(v.Target, p) || Within(p, v.Target) {
			return refuse("the target %s is reserved", p)
		}
	}
	for _, p := range r.Taken {
		if Within(p, v.Target) {
			return refuse("it would hide %q", p)
		}
	}
	return nil
}

// CheckAll decides on all volumes of a profile together: no target twice or hidden by another, and
// no host tree both read-only and writable.
func CheckAll(vs []Volume, r Rules) error {
	var errs []error
	for i, v := range vs {
		errs = append(errs, Check(v, r))
		for _, w := range vs[:i] {
			if Within(v.Target, w.Target) || Within(w.Target, v.Target) {
				errs = append(errs, fmt.Errorf("%w: targets %q and %q overlap", ErrRefused, w.Target, v.Target))
			}
			if v.Writable != w.Writable && (Within(v.Host, w.Host) || Within(w.Host, v.Host)) {
				errs = append(errs, fmt.Errorf("%w: %q and %q overlap on the host, and only one is writable", ErrRefused, w.Host, v.Host))
			}
		}
	}
	return errors.Join(errs...)
}

// Sorted returns the volumes by target, parents first.
func Sorted(vs []Volume) []Volume {
	return slices.SortedFunc(slices.Values(vs), func(a, b Volume) int { return strings.Compare(a.Target, b.Target) })
}

// Open pins a host path, which may have been written with symbolic links, and returns its
// canonical name with the descriptor that was looked at (O_PATH, the caller's). Use the name with
// Check, and /proc/self/fd of the descriptor as mount source, so that no later rename matters.
func Open(path string) (*os.File, string, error) {
	if !filepath.IsAbs(path) {
		return nil, "", fmt.Errorf("%w: %q is not absolute", ErrRefused, path)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, "", &os.PathError{Op: "open volume", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	st, err := f.Stat()
	if err == nil && !st.IsDir() && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: %q is neither a directory nor a regular file", ErrRefused, path)
	}
	var name string
	if err == nil {
		name, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	}
	if err == nil {
		// A deleted file's name ends in " (deleted)": it must still lead to the same file.
		var named, held unix.Stat_t
		if unix.Lstat(name, &named) != nil || unix.Fstat(fd, &held) != nil || named.Ino != held.Ino || named.Dev != held.Dev {
			err = fmt.Errorf("%w: %q has no canonical name", ErrRefused, path)
		}
	}
	if err != nil {
		f.Close()
		return nil, "", err
	}
	return f, name, nil
}
