package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay"
	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/compose"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/tree"
	"lazaret.dev/lazaret/overlay/volume"
)

// base is what a root file system is composed over: the host base, or an image under a layer of Lazaret's own.
type base struct {
	id     anchor.Base
	dir    string   // where Lazaret's own files are: the root of the host base, or its layer over an image
	root   string   // of the host base; "" for an image
	layers []string // of an image, topmost first, with Lazaret's own
	shell  string   // the agent's, "" if there is none
	env    []string // of an image

	store *image.Store // of an image
	pin   *image.Pin   // of an image in use
}

// baseReport is what the coordinator has to know of the base.
type baseReport struct {
	Shell, User string
	Env         []string
	Notes       []string // for the developer
}

// lockPatience is how long a start waits for a short hold of another command.
const lockPatience = 5 * time.Second

// pinVolumes mounts the volumes in the staging directory, read-only where they are so, by the objects that were checked.
func (d *domain) pinVolumes() error {
	for i, v := range d.plan.Volumes {
		if err := v.pin(d.volume(i)); err != nil {
			return err
		}
	}
	return nil
}

func (d *domain) volume(i int) string { return d.path("volumes", strconv.Itoa(i)) }

func (d *domain) openBase() (err error) {
	in := d.input()
	points, err := compose.Points(in)
	if err != nil {
		return err
	}
	d.base, err = openBase(d.plan, d.path("base"), d.usr, points)
	if err != nil {
		return err
	}
	if d.base.store != nil {
		if err := d.base.hold(d.plan); err != nil {
			return err
		}
	}
	for from, to := range map[string]string{gitConfigFile: "/etc/gitconfig", excludesFile: excludesInside} {
		if err := copyInto(filepath.Join(d.plan.Dirs.Runtime, d.plan.DomainID, from), filepath.Join(d.base.dir, to)); err != nil {
			return err
		}
	}
	return nil
}

// composeFiles puts the root file system together, after all that Lazaret adds to the base is there.
func (d *domain) composeFiles() error {
	in := d.input()
	in.Base, in.HostRoot, in.Layers, in.Agent.Shell = d.base.id, d.base.root, d.base.layers, d.base.shell
	for deadline := time.Now().Add(lockPatience); ; time.Sleep(20 * time.Millisecond) {
		var err error
		d.files, err = compose.Compose(in)
		if err == nil {
			break
		}
		if !errors.Is(err, anchor.ErrBusy) || time.Now().After(deadline) {
			return explainStorage(err)
		}
	}
	if d.base.store != nil {
		if err := d.base.findUser(d.files.Root, d.plan.IDs.Agent); err != nil {
			return err
		}
	}
	return nil
}

// input is what the plan says about the file system.
func (d *domain) input() compose.Input {
	p := d.plan
	owner := agentOwner(p)
	in := compose.Input{
		Agent:      compose.Agent{UID: int(p.IDs.Agent), GID: int(p.IDs.Agent), Name: agentName, Home: agentHome},
		Points:     []compose.Point{{Path: insideDir}},
		DomainRoot: domainRoot(p), Work: d.path("compose"), Scratch: int64(p.Profile.EphemeralSize), ScratchDir: transientDir(p), Now: time.Now(),
	}
	if p.Profile.Image != hostImage {
		for _, dir := range []string{"/proc", "/sys", "/dev", "/run"} {
			in.Points = append(in.Points, compose.Point{Path: dir})
		}
		in.Points = append(in.Points, compose.Point{Path: "/tmp", Owner: &anchor.Owner{Mode: 0o1777}})
	}
	for _, s := range p.Served {
		if !inTmpfs(s.Path) {
			in.Points = append(in.Points, compose.Point{Path: s.Path})
		}
	}
	for _, path := range p.Profile.Persist {
		in.Anchor = append(in.Anchor, compose.Anchor{Path: path, Owner: owner, OnChange: choiceFor(p, path)})
	}
	for i, v := range p.Volumes {
		in.Volume = append(in.Volume, volume.Volume{Host: d.volume(i), Target: v.Target, Writable: v.Writable})
	}
	return in
}

// agentOwner is the owner of a persistent path: what only root could write would keep nothing of the agent's.
func agentOwner(p Plan) *anchor.Owner {
	return &anchor.Owner{UID: int(p.IDs.Agent), GID: int(p.IDs.Agent), Mode: 0o755}
}

// openBase makes the base in dir, an empty directory of a file system of the caller's own. points are what the root must
// have for mounts; an image gets them when it is composed.
func openBase(p Plan, dir string, usr *os.File, points []compose.Point) (*base, error) {
	if p.Profile.Image != hostImage {
		return openImageBase(p, dir)
	}
	b := overlay.HostBase{
		Dir:      dir,
		Agent:    overlay.Identity{UID: p.IDs.Agent, GID: p.IDs.Agent, Name: agentName, Home: agentHome, Shell: p.Shell},
		Hostname: p.Profile.Name,
		Usr:      usr,
	}
	for _, point := range points {
		if point.File {
			b.Files = append(b.Files, point.Path)
		} else {
			b.Dirs = append(b.Dirs, point.Path)
		}
	}
	if err := b.Compose(); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if err := copySkel(root, filepath.Join(dir, agentHome), int(p.IDs.Agent)); err != nil {
		return nil, err
	}
	return &base{id: hostBaseID(), dir: dir, root: dir, shell: p.Shell}, nil
}

// imageConfig says where the image store is.
func imageConfig(p Plan) image.Config {
	return image.Config{Root: filepath.Join(p.Dirs.Storage, "images"), Run: filepath.Join(p.Dirs.Runtime, imageRunDir),
		HostUID: int(p.UID), HostGID: int(p.GID)}
}

// imageRunDir is the image store's transient state in the runtime directory; the dot keeps it apart from Domain IDs.
const imageRunDir = ".img"

// openImageBase looks an image up and writes Lazaret's own layer to dir.
func openImageBase(p Plan, dir string) (_ *base, err error) {
	store, err := image.Open(imageConfig(p))
	if err != nil {
		return nil, explainStorage(err)
	}
	b := &base{store: store, dir: dir}
	rec, err := store.Resolve(p.Profile.Image)
	if errors.Is(err, image.ErrNotPulled) {
		return nil, hint(err, "lazaret image pull %s", p.Profile.Image)
	}
	if err != nil {
		return nil, err
	}
	img, err := store.Image(rec.ImageID)
	if err != nil {
		return nil, explainStorage(err)
	}
	b.id = imageBaseID(rec)
	b.layers = append([]string{dir}, img.Layers...)
	b.env = image.AgentEnv(img.Config.Config.Env)
	if err := b.writeLayer(p, img.Layers); err != nil {
		return nil, fmt.Errorf("image %s: %w", rec.Reference, err)
	}
	return b, nil
}

func imageBaseID(rec image.Record) anchor.Base {
	id := anchor.Base{Key: rec.BaseKey(), Image: rec.Reference, ImageID: rec.ImageID}
	for _, d := range rec.DiffIDs {
		id.DiffIDs = append(id.DiffIDs, d.String())
	}
	return id
}

// hold pins the image for as long as the Domain lives.
func (b *base) hold(p Plan) error {
	ctx, cancel := context.WithTimeout(context.Background(), lockPatience)
	defer cancel()
	g, err := b.store.Share(ctx)
	if err != nil {
		return explainStorage(err)
	}
	defer g.Release()
	// It may have been removed since it was looked up; the pin finds out.
	if b.pin, err = b.store.Pin(b.id.ImageID, p.DomainID); err != nil {
		return explainStorage(err)
	}
	return nil
}

// release gives the image up. It is safe on a base that is not there.
func (b *base) release() {
	if b != nil && b.pin != nil {
		_ = b.pin.Release() // if it fails, gc finds a pin without a holder
		b.pin = nil
	}
}

// writeLayer fills the layer that lies over the image: the names of the sandbox, and a home for the agent where the image
// has none. Directories that the image has too keep its owner and mode.
func (b *base) writeLayer(p Plan, layers []string) error {
	l := ownLayer{b.dir, layers}
	if err := l.like("/"); err != nil {
		return err
	}
	for _, d := range []string{"/etc", "/etc/git"} {
		if err := l.like(d); err != nil {
			return err
		}
	}
	name := p.Profile.Name
	for file, text := range map[string]string{
		"/etc/hostname":    name + "\n",
		"/etc/hosts":       fmt.Sprintf("127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 %s\n", name),
		"/etc/resolv.conf": "",
	} {
		if err := os.WriteFile(b.dir+file, []byte(text), 0o644); err != nil {
			return err
		}
	}
	empty := b.dir + ".empty"
	if err := os.Mkdir(empty, 0o755); err != nil {
		return err
	}
	scratch := b.dir + ".scratch"
	if err := os.Mkdir(scratch, 0o755); err != nil {
		return err
	}
	view, err := mount.Overlay{Lower: append([]string{empty}, layers...)}.Open(scratch)
	if err != nil {
		return err
	}
	defer view.Close()
	for _, shell := range []string{"/bin/bash", "/bin/sh"} {
		if f, err := image.OpenInRoot(view, shell[1:]); err == nil {
			f.Close()
			b.shell = shell
			break
		}
	}
	have, err := anchor.SubLowers(layers, agentHome)
	if err != nil || len(have) > 0 {
		return err
	}
	if err := l.like(filepath.Dir(agentHome)); err != nil {
		return err
	}
	home := b.dir + agentHome
	if err := os.Mkdir(home, 0o755); err != nil {
		return err
	}
	if err := os.Chown(home, int(p.IDs.Agent), int(p.IDs.Agent)); err != nil {
		return err
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", view.Fd()))
	if err != nil {
		return err
	}
	defer root.Close()
	return copySkel(root, home, int(p.IDs.Agent))
}

// ownLayer is the layer over an image.
type ownLayer struct {
	dir    string
	layers []string
}

// like makes a directory as the image has it, else root's.
func (l ownLayer) like(path string) error {
	from := l.layers[:1]
	if path != "/" {
		var err error
		if from, err = anchor.SubLowers(l.layers, path); err != nil {
			return err
		}
		if err := os.Mkdir(l.dir+path, 0o755); err != nil {
			return err
		}
	}
	st := unix.Stat_t{Mode: 0o755}
	if len(from) > 0 {
		if err := unix.Lstat(from[0], &st); err != nil {
			return &os.PathError{Op: "stat", Path: from[0], Err: err}
		}
	}
	if err := unix.Lchown(l.dir+path, int(st.Uid), int(st.Gid)); err != nil {
		return &os.PathError{Op: "chown", Path: l.dir + path, Err: err}
	}
	return unix.Chmod(l.dir+path, st.Mode&0o7777)
}

// findUser learns the name that the agent has in the composed root.
func (b *base) findUser(root string, uid uint32) error {
	f, err := os.Open(root)
	if err != nil {
		return err
	}
	defer f.Close()
	u, err := image.ResolveUser(f, strconv.Itoa(int(uid)))
	if err == nil && u.Name != "" {
		b.env = append(b.env, "USER="+u.Name)
	}
	return nil // without a name it is called as always
}

// report tells the coordinator what the sessions of a composed base start with.
func (b *base) report(files *compose.Result) *baseReport {
	r := &baseReport{Shell: b.shell, User: agentName}
	for _, kv := range b.env {
		if name, ok := strings.CutPrefix(kv, "USER="); ok {
			r.User = name
		} else {
			r.Env = append(r.Env, kv)
		}
	}
	for _, f := range files.Findings {
		if f.Code == "no-shell" && b.shell != "" {
			continue
		}
		note := f.Text
		if f.Hint != "" {
			note += " (" + f.Hint + ")"
		}
		r.Notes = append(r.Notes, note)
	}
	return r
}

const (
	maxSkel     = 256     // entries
	maxSkelFile = 1 << 20 // bytes
)

// copySkel copies /etc/skel of root into a home, as login(1) programs do for a new user. Special files and what lies
// behind links is left out.
func copySkel(root *os.Root, home string, owner int) error {
	skel, err := root.OpenRoot("etc/skel")
	if err != nil {
		return nil // there is none
	}
	defer skel.Close()
	n := 0
	return fs.WalkDir(skel.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		if n++; err != nil || name == "." || n > maxSkel {
			return nil
		}
		to := filepath.Join(home, name)
		switch e.Type() {
		case fs.ModeDir:
			err = os.Mkdir(to, 0o755)
		case 0:
			err = copySkelFile(skel, name, to)
		default:
			return nil
		}
		if err == nil {
			err = os.Lchown(to, owner, owner)
		}
		return err
	})
}

func copySkelFile(skel *os.Root, name, to string) error {
	in, err := skel.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil // not for everybody
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Size() > maxSkelFile {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, st.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, io.LimitReader(in, maxSkelFile))
	return errors.Join(err, out.Close())
}

// usageInterval is the time between two measurements of what a running Domain keeps.
const usageInterval = time.Minute

// watchUsage tells the developer when a watched limit is near or full, once for each rise.
func (d *domain) watchUsage() {
	l := d.plan.Profile.limits()
	if l == (tree.Limits{}) {
		return
	}
	told := map[string]tree.Level{}
	for {
		s, err := measure(domainRoot(d.plan))
		if err == nil {
			now := map[string]tree.Level{}
			for _, f := range l.Check(s) {
				if now[f.What] = f.Level; f.Level > told[f.What] {
					_ = d.control.Send(domainEvent{Notice: limitNotice(f)})
				}
			}
			told = now
		}
		time.Sleep(usageInterval)
	}
}
