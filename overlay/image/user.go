package image

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// User is an account of an image.
type User struct {
	UID, GID uint32
	Name     string   // empty when the image has no account of that uid
	Home     string   // as the image says; may be empty
	Groups   []uint32 // supplementary
}

// ErrNoUser means that an image's User is not in its own passwd or group file.
var ErrNoUser = errors.New("no such user in the image")

const maxAccounts = 1 << 20 // bytes of passwd or group

// ResolveUser finds what an image's User string ("", "uid", "name", "user:group") means in the
// file system at root, an open directory. Links are followed as inside the image.
func ResolveUser(root *os.File, spec string) (User, error) {
	who, group, hasGroup := strings.Cut(spec, ":")
	if who == "" {
		who = "0"
	}
	passwd, err := ReadInRoot(root, "etc/passwd", maxAccounts)
	if err != nil && !os.IsNotExist(err) {
		return User{}, fmt.Errorf("resolve user %q: %w", spec, err)
	}
	groups, err := ReadInRoot(root, "etc/group", maxAccounts)
	if err != nil && !os.IsNotExist(err) {
		return User{}, fmt.Errorf("resolve user %q: %w", spec, err)
	}
	u, err := resolveUser(passwd, groups, who, group, hasGroup)
	if err != nil {
		return User{}, fmt.Errorf("resolve user %q: %w", spec, err)
	}
	return u, nil
}

func resolveUser(passwd, groups []byte, who, group string, hasGroup bool) (User, error) {
	var u User
	number, numeric := parseID(who)
	found := false
	for _, f := range fields(passwd, 7) {
		uid, ok := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if ok && ok2 && (f[0] == who || numeric && uid == number) {
			u, found = User{UID: uid, GID: gid, Name: f[0], Home: f[5]}, true
			break
		}
	}
	switch {
	case !found && !numeric:
		return u, fmt.Errorf("%w: %q", ErrNoUser, who)
	case !found:
		u.UID = number
	}
	if hasGroup {
		gid, ok := parseID(group)
		for _, f := range fields(groups, 4) {
			if id, valid := parseID(f[2]); valid && f[0] == group {
				gid, ok = id, true
				break
			}
		}
		if !ok {
			return u, fmt.Errorf("%w: group %q", ErrNoUser, group)
		}
		u.GID = gid
		return u, nil // an explicit group replaces the supplementary ones
	}
	for _, f := range fields(groups, 4) {
		id, ok := parseID(f[2])
		if !ok || u.Name == "" || id == u.GID || len(u.Groups) >= 256 {
			continue
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == u.Name {
				u.Groups = append(u.Groups, id)
				break
			}
		}
	}
	return u, nil
}

func fields(file []byte, n int) [][]string {
	var out [][]string
	sc := bufio.NewScanner(bytes.NewReader(file))
	sc.Buffer(nil, maxAccounts)
	for sc.Scan() {
		if f := strings.Split(sc.Text(), ":"); len(f) >= n {
			out = append(out, f)
		}
	}
	return out
}

// parseID accepts ids that the Domain's id map has.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n <= 65535
}

// ReadInRoot reads the regular file at path below root, following links as a process with that
// root would. More than limit bytes is an error.
func ReadInRoot(root *os.File, path string, limit int64) ([]byte, error) {
	f, err := OpenInRoot(root, path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%q in the image is larger than %d bytes", path, limit)
	}
	return data, err
}

// OpenInRoot opens the regular file at path below root for reading.
func OpenInRoot(root *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open in image", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		f.Close()
		return nil, &os.PathError{Op: "open in image", Path: path, Err: errors.Join(err, errors.New("not a regular file"))}
	}
	return f, nil
}

// AgentEnv is the part of an image's Env that makes sense for an agent: well-formed, bounded, and
// without what the session defines itself.
func AgentEnv(env []string) []string {
	var out []string
	size := 0
	for _, kv := range env {
		name, _, ok := strings.Cut(kv, "=")
		if !ok || name == "" || strings.ContainsRune(kv, 0) {
			continue
		}
		switch name {
		case "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "OLDPWD", "HOSTNAME", "container":
			continue
		}
		if size += len(kv) + 1; size > 64<<10 || len(out) == 1000 {
			break
		}
		out = append(out, kv)
	}
	return out
}
