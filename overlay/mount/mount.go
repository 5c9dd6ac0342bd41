// Package mount makes the overlay mounts of a Domain: unprivileged, with the options that keep a
// lower tree replaceable, and with the kernel's own words when one fails.
//
// What is kept true, for anchor and compose: an overlay never follows redirects, never stores
// metadata-only copies and never depends on the identity of a lower inode (redirect_dir=nofollow,
// metacopy=off, index=off, xino=off), so a State Anchor's upper directory may be mounted over
// another image later. Nothing mounted here honours devices or set-id bits on the host side.
//
// Callers must hold CAP_SYS_ADMIN in the user namespace that owns their mount namespace, with
// /proc mounted for their pid namespace. Paths are trusted: they come from the Storage Root.
package mount

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxLowers bounds the layers of one overlay; the kernel refuses more than 500.
const MaxLowers = 480

// Overlay describes one overlay mount.
type Overlay struct {
	Lower []string // absolute directories, topmost first; at least one, two when read-only
	Upper string   // empty for a read-only overlay
	Work  string   // empty directory on Upper's file system; set exactly when Upper is
}

// options are the same for every overlay; xino and index cannot be enabled in a user namespace,
// saying so keeps a distribution's module parameters from mattering.
var options = []struct{ key, value string }{
	{"redirect_dir", "nofollow"},
	{"metacopy", "off"},
	{"index", "off"},
	{"xino", "off"},
}

func (o Overlay) validate() error {
	switch {
	case (o.Upper == "") != (o.Work == ""):
		return errors.New("upper and work directory belong together")
	case len(o.Lower) == 0:
		return errors.New("no lower directory")
	case o.Upper == "" && len(o.Lower) < 2:
		return errors.New("a read-only overlay needs two lower directories")
	case len(o.Lower) > MaxLowers:
		return fmt.Errorf("%d lower directories are over the limit of %d", len(o.Lower), MaxLowers)
	}
	return nil
}

// Attach mounts o on the existing directory target.
func (o Overlay) Attach(target string) error {
	if err := o.validate(); err != nil {
		return fmt.Errorf("mount overlay on %q: %w", target, err)
	}
	f, err := o.detached()
	if errors.Is(err, errors.ErrUnsupported) {
		if err := o.legacy(target); err != nil {
			return fmt.Errorf("mount overlay on %q: %w", target, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("mount overlay on %q: %w", target, err)
	}
	defer f.Close()
	if err := unix.MoveMount(int(f.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach overlay to %q: %w", target, err)
	}
	return nil
}

// Open mounts o nowhere and returns its root directory, which lives as long as the descriptor.
// On kernels without detached overlay mounts it passes through scratch, an existing empty
// directory, and leaves nothing mounted there.
func (o Overlay) Open(scratch string) (*os.File, error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open overlay: %w", err)
	}
	f, err := o.detached()
	if !errors.Is(err, errors.ErrUnsupported) {
		if err != nil {
			return nil, fmt.Errorf("open overlay: %w", err)
		}
		defer f.Close()
		// The mount descriptor is O_PATH; readers need an ordinary one, and it keeps the mount too.
		fd, err := unix.Openat(int(f.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open overlay root: %w", err)
		}
		return os.NewFile(uintptr(fd), "overlay"), nil
	}
	return o.openLegacy(scratch)
}

func (o Overlay) openLegacy(scratch string) (*os.File, error) {
	if err := o.legacy(scratch); err != nil {
		return nil, fmt.Errorf("open overlay on %q: %w", scratch, err)
	}
	defer unix.Unmount(scratch, unix.MNT_DETACH)
	return os.OpenFile(scratch, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// detached makes the mount with the new API. ErrUnsupported: this kernel lacks it, or lacks
// lowerdir+ (added in 6.7).
func (o Overlay) detached() (*os.File, error) {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		if err == unix.ENOSYS {
			return nil, fmt.Errorf("fsopen: %w", errors.ErrUnsupported)
		}
		return nil, fmt.Errorf("fsopen overlay: %w", err)
	}
	fs := os.NewFile(uintptr(fd), "fsopen:overlay")
	defer fs.Close()
	set := func(key, value string) error {
		if err := unix.FsconfigSetString(fd, key, value); err != nil {
			return fmt.Errorf("overlay option %s=%q: %w", key, value, explain(fs, err))
		}
		return nil
	}
	for i, dir := range o.Lower {
		err := unix.FsconfigSetString(fd, "lowerdir+", dir)
		if err == unix.EINVAL && i == 0 && !existsDir(dir) {
			return nil, fmt.Errorf("overlay option lowerdir+=%q: %w", dir, explain(fs, err))
		}
		if err == unix.EINVAL && i == 0 {
			return nil, fmt.Errorf("overlay option lowerdir+: %w", errors.ErrUnsupported)
		}
		if err != nil {
			return nil, fmt.Errorf("overlay option lowerdir+=%q: %w", dir, explain(fs, err))
		}
	}
	if o.Upper != "" {
		if err := set("upperdir", o.Upper); err != nil {
			return nil, err
		}
		if err := set("workdir", o.Work); err != nil {
			return nil, err
		}
	}
	for _, opt := range options {
		if err := set(opt.key, opt.value); err != nil {
			return nil, err
		}
	}
	if err := unix.FsconfigSetFlag(fd, "userxattr"); err != nil {
		return nil, fmt.Errorf("overlay option userxattr: %w", explain(fs, err))
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, fmt.Errorf("create overlay: %w", explain(fs, err))
	}
	attrs := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	if o.Upper == "" {
		attrs |= unix.MOUNT_ATTR_RDONLY
	}
	m, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return nil, fmt.Errorf("fsmount overlay: %w", explain(fs, err))
	}
	return os.NewFile(uintptr(m), "overlay"), nil
}

// legacy uses mount(2). Its option page of 4 KiB and its ':' and ',' separators are met by naming
// every directory through a descriptor.
func (o Overlay) legacy(target string) error {
	var held []*os.File
	defer func() {
		for _, f := range held {
			f.Close()
		}
	}()
	short := func(dir string) (string, error) {
		f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		held = append(held, f)
		return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())), nil
	}
	var lowers []string
	for _, dir := range o.Lower {
		s, err := short(dir)
		if err != nil {
			return err
		}
		lowers = append(lowers, s)
	}
	data := "userxattr,lowerdir=" + strings.Join(lowers, ":")
	if o.Upper != "" {
		upper, err := short(o.Upper)
		if err != nil {
			return err
		}
		work, err := short(o.Work)
		if err != nil {
			return err
		}
		data += ",upperdir=" + upper + ",workdir=" + work
	}
	for _, opt := range options {
		data += "," + opt.key + "=" + opt.value
	}
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("%d layers do not fit in this kernel's mount options", len(o.Lower))
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if o.Upper == "" {
		flags |= unix.MS_RDONLY
	}
	if err := unix.Mount("overlay", target, "overlay", flags, data); err != nil {
		return fmt.Errorf("mount(2): %w (%w)", err, hint(err))
	}
	return nil
}

// ErrOverlay is in the chain of every refusal by the kernel; its usual causes are in the text.
var ErrOverlay = errors.New("overlay refused by the kernel")

func hint(err error) error {
	if err == unix.EINVAL || err == unix.EPERM {
		return fmt.Errorf("%w: the Storage Root may lie on overlayfs, NFS or another file system without user.* attributes", ErrOverlay)
	}
	return ErrOverlay
}

// explain adds the messages that the kernel queued on the file system context.
func explain(fs *os.File, err error) error {
	var texts []string
	buf := make([]byte, 1024)
	for range 16 {
		n, rerr := unix.Read(int(fs.Fd()), buf)
		if rerr != nil || n <= 0 {
			break
		}
		texts = append(texts, strings.TrimSpace(string(buf[:n])))
	}
	if len(texts) == 0 {
		return fmt.Errorf("%w (%w)", err, hint(err))
	}
	return fmt.Errorf("%w (%w; kernel: %q)", err, ErrOverlay, strings.Join(texts, "; "))
}

func existsDir(dir string) bool {
	st, err := os.Stat(dir)
	return err == nil && st.IsDir()
}

// Detach unmounts target; a target that is not mounted is not an error.
func Detach(target string) error {
	err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err == unix.EINVAL || err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return fmt.Errorf("unmount %q: %w", target, err)
	}
	return nil
}
