package overlay

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// etcNames is the whole list of what the host base takes from the host's /etc: what tools need to run, and nothing that
// tells about this machine's users, keys or services. Directories are taken with what is below them.
var etcNames = []string{
	// certificates of public authorities
	"ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf",
	"pki/ca-trust/extracted", "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "crypto-policies",
	// dynamic linker and alternatives, to which /usr points
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives",
	// time, language, terminals, types
	"localtime", "timezone", "locale.alias", "locale.conf", "locale.gen", "default/locale", "terminfo", "inputrc", "mime.types",
	"magic", "magic.mime", "protocols", "services", "rpc", "ethertypes", "fonts", "papersize",
	// which system this is
	"os-release", "debian_version", "lsb-release", "redhat-release", "fedora-release", "arch-release", "system-release",
	// shells and editors
	"bash.bashrc", "bashrc", "bash_completion", "bash_completion.d", "profile", "profile.d", "zsh", "skel", "vim", "vimrc", "nanorc",
	// language run-times
	"java", "java-8-openjdk", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "python3", "python3.9", "python3.10",
	"python3.11", "python3.12", "python3.13", "python3.14", "perl", "ruby", "lighttpd/mime.conf", "ImageMagick-6", "ImageMagick-7", "clang",
}

const (
	maxEtcFile  = 4 << 20  // bytes; the largest in use is a certificate bundle
	maxEtcTotal = 32 << 20 // bytes
)

// writeEtc copies the list and writes the files that are the sandbox's own.
func (b HostBase) writeEtc() error {
	src, err := os.Open("/etc")
	if err != nil {
		return err
	}
	defer src.Close()
	c := etcCopy{from: src, to: filepath.Join(b.Dir, "etc"), left: maxEtcTotal}
	for _, name := range etcNames {
		if err := c.copyNamed(name); err != nil {
			return err
		}
	}
	a := b.Agent
	for name, text := range map[string]string{
		"passwd": fmt.Sprintf("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n%s:x:%d:%d::%s:%s\n",
			a.Name, a.UID, a.GID, a.Home, a.Shell),
		"group":         fmt.Sprintf("root:x:0:\nnogroup:x:65534:\n%s:x:%d:\n", a.Name, a.GID),
		"hostname":      b.Hostname + "\n",
		"hosts":         fmt.Sprintf("127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 %s\n", b.Hostname),
		"nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"resolv.conf":   "",
		"shells":        "/bin/sh\n/bin/bash\n/usr/bin/bash\n/usr/bin/zsh\n/usr/bin/fish\n",
	} {
		if a.UID == 0 && (name == "passwd" || name == "group") {
			// The single-id map: the agent is uid 0 of its namespace, and has one name.
			text = strings.ReplaceAll(strings.Replace(text, "root:x:0:0:root:/root:/bin/sh\n", "", 1), "root:x:0:\n", "")
		}
		path := filepath.Join(c.to, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// etcCopy copies from the host's /etc what every user may read.
type etcCopy struct {
	from *os.File
	to   string
	left int64 // bytes
}

// copyNamed takes a name of the list, whose parents are made if they are not there yet.
func (c *etcCopy) copyNamed(name string) error {
	if dir := filepath.Dir(name); dir != "." {
		if err := unix.Faccessat(int(c.from.Fd()), name, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil
		}
		if err := os.MkdirAll(filepath.Join(c.to, dir), 0o755); err != nil {
			return err
		}
	}
	return c.copy(name)
}

// copy takes name and what is below it; its parent is there. A name that is not there, or not for everybody, is passed over.
func (c *etcCopy) copy(name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(c.from.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "stat", Path: "/etc/" + name, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		return c.copyLink(name)
	case unix.S_IFREG:
		if st.Mode&0o004 == 0 || st.Size > maxEtcFile {
			return nil
		}
		return c.copyFile(name, os.FileMode(st.Mode&0o755))
	case unix.S_IFDIR:
		if st.Mode&0o005 != 0o005 {
			return nil
		}
		return c.copyDir(name)
	}
	return nil // a device, FIFO or socket is no configuration
}

func (c *etcCopy) copyLink(name string) error {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(c.from.Fd()), name, buf)
	if err != nil || n == len(buf) {
		return nil // it changed under us
	}
	target := string(buf[:n])
	if err := os.Symlink(target, filepath.Join(c.to, name)); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (c *etcCopy) copyDir(name string) error {
	if err := os.Mkdir(filepath.Join(c.to, name), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	fd, err := unix.Openat2(int(c.from.Fd()), name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return nil // not for us, so not for everybody
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if err := c.copy(filepath.Join(name, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// copyFile copies a regular file; what it is is asked again of the descriptor, since the name may have changed since.
func (c *etcCopy) copyFile(name string, mode os.FileMode) error {
	fd, err := unix.Openat2(int(c.from.Fd()), name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return nil
	}
	in := os.NewFile(uintptr(fd), "/etc/"+name)
	defer in.Close()
	st, err := in.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Mode()&0o004 == 0 {
		return err
	}
	out, err := os.OpenFile(filepath.Join(c.to, name), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	n, err := io.Copy(out, io.LimitReader(in, min(maxEtcFile, c.left)+1))
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if c.left -= n; err == nil && c.left < 0 {
		err = fmt.Errorf("copy /etc/%s: the curated /etc is over its limit of %d bytes", name, maxEtcTotal)
	}
	return err
}
