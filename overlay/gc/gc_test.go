package gc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/nstest"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	nstest.Main()
	if role := nstest.Role(); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(m.Run())
}

var bg = context.Background()

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func paths(dir string) (Config, image.Config) {
	return Config{Run: dir + "/run", Scratch: []string{dir + "/scratch"}, Domains: dir + "/domains",
			Workspace: func(root string) string { b, _ := os.ReadFile(root + "/workspace"); return string(b) }},
		image.Config{Root: dir + "/s", Run: dir + "/sr"}
}

func opened(t testing.TB, dir string) Config {
	t.Helper()
	c, ic := paths(dir)
	s, err := image.Open(ic)
	must(t, err)
	c.Store = s
	t.Cleanup(func() { must(t, s.Close()) })
	return c
}

// held keeps the locks of the "live" role from the garbage collector.
var held struct {
	domain *DomainLock
	pin    *image.Pin
	anchor *anchor.Anchor
}

var roles = map[string]func() int{
	// gc DIR N: collects everything and is killed at the n-th step
	"gc": func() int {
		c, ic := paths(os.Args[1])
		n, _ := strconv.Atoi(os.Args[2])
		s, err := image.Open(ic)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		c.Store = s
		steps := 0
		c.Hook = func(string) {
			if steps++; steps > n {
				nstest.KillSelf()
			}
		}
		f, err := Gather(c)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		for _, o := range Run(bg, c, all, Plan(f, all)) {
			if o.Err != nil {
				fmt.Println(o.Err)
				return 1
			}
		}
		fmt.Println(steps)
		return 0
	},
	// live DIR IMAGE: is a running Domain until killed
	"live": func() int {
		c, ic := paths(os.Args[1])
		s, err := image.Open(ic)
		if err == nil {
			held.domain, err = LockDomain(c.Run, "alive")
		}
		if err == nil {
			held.pin, err = s.Pin(os.Args[2], "alive")
		}
		if err == nil {
			held.anchor, err = anchor.Lock(c.Domains+"/alive", "/home/agent")
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("up")
		time.Sleep(time.Hour)
		return 0
	},
	// die DIR IMAGE: leaves a dead pin
	"die": func() int {
		_, ic := paths(os.Args[1])
		s, err := image.Open(ic)
		if err == nil {
			_, err = s.Pin(os.Args[2], "dead")
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		nstest.KillSelf()
		return 0
	},
}

var all = Options{State: []string{"orphan"}, InUse: []string{}, References: false}

type world struct {
	dir      string
	live     func() // ends the running Domain
	old, now nstest.Image
	keepRef  string
}

// build makes everything that gc can meet, around one running Domain.
func build(t testing.TB) world {
	t.Helper()
	dir, err := os.MkdirTemp("", "lz")
	must(t, err)
	w := world{dir: dir}
	t.Cleanup(func() {
		// A killed child's mount of the store; in the product it goes with the namespace.
		must(t, mount.Detach(dir+"/s/graph/overlay"), os.RemoveAll(dir))
	})
	ws := dir + "/workspace"
	outside := dir + "/outside"
	must(t, os.Mkdir(ws, 0o755), os.Mkdir(outside, 0o755), os.WriteFile(outside+"/keep", nil, 0o600))
	for id, workspace := range map[string]string{"alive": ws, "dead": ws, "orphan": dir + "/gone", "orphan2": dir + "/gone"} {
		root := dir + "/domains/" + id
		must(t, os.MkdirAll(root, 0o700), os.WriteFile(root+"/workspace", []byte(workspace), 0o600))
		a, err := anchor.Lock(root, "/home/agent")
		must(t, err)
		target := t.TempDir()
		must(t, a.Mount(anchor.Base{Key: "k"}, []string{ws}, nil, target, time.Unix(0, 0)))
		must(t, os.WriteFile(target+"/file", []byte(id), 0o600), os.Chown(target+"/file", 1000, 1000), os.Symlink(outside, target+"/link"), mount.Detach(target), a.Close())
		must(t, os.MkdirAll(dir+"/run/"+id+"/work/anchors", 0o700), os.WriteFile(dir+"/run/"+id+"/coordinator.sock", nil, 0o600),
			os.Symlink(outside, dir+"/run/"+id+"/link"), os.MkdirAll(dir+"/scratch/"+id, 0o700), os.WriteFile(dir+"/scratch/"+id+"/filestore", make([]byte, 8192), 0o600))
	}
	must(t, os.Mkdir(dir+"/domains/dead/anchors/home%2Fagent/.tmp-x", 0), os.MkdirAll(dir+"/domains/.removing-half/anchors/x/upper", 0o700),
		os.MkdirAll(dir+"/scratch/lonely/x", 0o700), os.Symlink(outside, dir+"/run/looks-like-a-domain"), os.Symlink(outside, dir+"/domains/looks-too"))

	_, ic := paths(dir)
	s, err := image.Open(ic)
	must(t, err)
	defer func() { must(t, s.Close()) }()
	bottom := nstest.Layer(t, nstest.File{Name: "base", Body: "base"})
	w.old = nstest.Image{Layers: [][]byte{bottom, nstest.Layer(t, nstest.File{Name: "v1"})}}
	w.now = nstest.Image{Layers: [][]byte{bottom, nstest.Layer(t, nstest.File{Name: "v2"})}}
	w.keepRef = "oci:" + dir + "/oci"
	pull := func(im nstest.Image) {
		must(t, os.RemoveAll(dir+"/oci"))
		im.WriteOCI(t, dir+"/oci", "")
		_, _, err := s.Pull(bg, w.keepRef, image.PullOptions{Own: true})
		must(t, err)
	}
	pull(w.old)
	out, err := nstest.Child("die", dir, w.old.ID()).CombinedOutput()
	if !nstest.Killed(err) {
		t.Fatalf("%v %s", err, out)
	}
	pull(w.now)
	// A pull that failed at its second layer.
	broken := nstest.Image{Layers: [][]byte{nstest.Layer(t, nstest.File{Name: "half"}), nstest.Layer(t, nstest.File{Name: "other"})}}
	broken.WriteOCI(t, dir+"/broken", "")
	second, err := filepath.Glob(dir + "/broken/blobs/sha256/*")
	must(t, err)
	for _, f := range second {
		if b, _ := os.ReadFile(f); string(b) == string(broken.Layers[1]) {
			must(t, os.Truncate(f, 600))
		}
	}
	if _, _, err := s.Pull(bg, "oci:"+dir+"/broken", image.PullOptions{Own: true}); err == nil {
		t.Fatal("pulled a broken image")
	}
	must(t, os.WriteFile(dir+"/s/pins/stray", nil, 0o600))

	child := nstest.Child("live", dir, w.now.ID())
	stdout, err := child.StdoutPipe()
	must(t, err, child.Start())
	said := make([]byte, 256)
	if n, _ := stdout.Read(said); string(said[:n]) != "up\n" {
		t.Fatalf("%s", said[:n])
	}
	w.live = func() { _ = child.Process.Kill(); _ = child.Wait() }
	t.Cleanup(w.live)
	return w
}

// tree lists what is left on disk, the store's own bookkeeping apart.
func left(t testing.TB, dir string) string {
	t.Helper()
	var out []string
	for _, top := range []string{"run", "scratch", "domains", "s/pins", "outside"} {
		must(t, filepath.WalkDir(filepath.Join(dir, top), func(p string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			rel := strings.TrimPrefix(p, dir+"/")
			if top == "s/pins" && len(filepath.Base(p)) == 64 {
				rel = "s/pins/<pin>"
			}
			out = append(out, rel)
			return err
		}))
	}
	c := opened(t, dir)
	f, err := Gather(c)
	must(t, err)
	out = append(out, f.Images...)
	out = append(out, fmt.Sprint(len(f.Pins), " pins ", len(f.Layers), " layers ", len(f.Strays), " strays"))
	return strings.Join(out, "\n")
}

func TestGCCollects(t *testing.T) {
	w := build(t)
	c := opened(t, w.dir)
	f, err := Gather(c)
	must(t, err)
	plan := Plan(f, all)
	var lines []string
	for _, a := range plan {
		ask := ""
		if a.Ask {
			ask = "?"
		}
		id := a.ID
		if len(id) > 60 || strings.Contains(id, "/") {
			id = "…"
		}
		lines = append(lines, ask+string(a.Kind)+" "+id)
	}
	want := "transient dead,transient lonely,transient orphan,transient orphan2,leftover dead,leftover half,pin …,pin-lock stray,?reference …,image …,layer …,state orphan,?state orphan2"
	if got := strings.Join(lines, ","); got != want {
		t.Fatalf("plan\n%s\nwant\n%s", got, want)
	}
	if _, err := json.Marshal(plan); err != nil {
		t.Fatal(err)
	}
	before := left(t, w.dir) // planning changes nothing
	f2, err := Gather(c)
	must(t, err)
	if fmt.Sprint(Plan(f2, all)) != fmt.Sprint(plan) || left(t, w.dir) != before {
		t.Fatal("gathering changed something")
	}
	for _, o := range Run(bg, c, all, plan) {
		must(t, o.Err)
	}
	got := left(t, w.dir)
	for _, gone := range []string{"run/dead", "run/orphan", "scratch/lonely", "scratch/dead", "domains/orphan\n", "domains/.removing", ".tmp-", "stray\n", w.old.ID()} {
		if strings.Contains(got, gone) {
			t.Errorf("%q is left", gone)
		}
	}
	for _, kept := range []string{"run/alive/coordinator.sock", "scratch/alive/filestore", "domains/alive/anchors", "domains/dead/anchors/home%2Fagent/current/upper/file",
		"domains/orphan2/anchors", "outside/keep", "run/looks-like-a-domain", w.now.ID(), "1 pins 0 layers 0 strays"} {
		if !strings.Contains(got, kept) {
			t.Errorf("%q is gone", kept)
		}
	}
	f, err = Gather(c)
	must(t, err)
	for _, a := range Plan(f, all) {
		if !a.Ask {
			t.Errorf("a second gc would still remove %+v", a)
		}
	}
	// The Domain ends by kill -9; gc then takes its transient part and, asked to, its state.
	w.live()
	o := Options{State: []string{"alive"}, Force: true, References: true}
	f, err = Gather(c)
	must(t, err)
	for _, out := range Run(bg, c, o, Plan(f, o)) {
		must(t, out.Err)
	}
	got = left(t, w.dir)
	if strings.Contains(got, "alive") || strings.Contains(got, w.now.ID()) || !strings.Contains(got, "0 pins") {
		t.Errorf("left\n%s", got)
	}
}

// TestGCLeavesWhatCameAlive runs a plan that is out of date.
func TestGCLeavesWhatCameAlive(t *testing.T) {
	w := build(t)
	c := opened(t, w.dir)
	f, err := Gather(c)
	must(t, err)
	plan := Plan(f, all)
	dead, err := LockDomain(c.Run, "dead")
	must(t, err)
	defer dead.Release()
	a, err := anchor.Lock(c.Domains+"/orphan", "/home/agent")
	must(t, err)
	defer a.Close()
	pin, err := c.Store.Pin(w.old.ID(), "dead")
	must(t, err)
	var leftover []string
	for _, o := range Run(bg, c, all, plan) {
		if o.Left() {
			leftover = append(leftover, string(o.Kind)+" "+o.ID[:min(6, len(o.ID))])
		} else {
			must(t, o.Err)
		}
	}
	if s := strings.Join(leftover, ","); s != "transient dead,leftover dead,image "+w.old.ID()[:6]+",state orphan" {
		t.Fatalf("left: %s", s)
	}
	if _, err := c.Store.Image(w.old.ID()); err != nil {
		t.Fatal(err)
	}
	must(t, pin.Release())
	// A pull in progress keeps the store.
	g, err := c.Store.Share(bg)
	must(t, err)
	defer g.Release()
	for _, o := range Run(bg, c, all, slices.DeleteFunc(plan, func(a Action) bool { return a.Kind != Unused })) {
		if !o.Left() {
			t.Fatalf("%+v", o)
		}
	}
}

// TestFR7GCKilledAtEveryStep: killed at step n and run again, gc ends where an undisturbed one does.
func TestFR7GCKilledAtEveryStep(t *testing.T) {
	normal := func(w world) string {
		s := left(t, w.dir)
		return strings.ReplaceAll(s, w.dir, "")
	}
	w := build(t)
	out, err := nstest.Child("gc", w.dir, "100000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	want := normal(w)
	w.live()
	steps, err := strconv.Atoi(strings.TrimSpace(string(out)))
	must(t, err)
	if steps < 20 {
		t.Fatalf("only %d steps", steps)
	}
	for step := range steps {
		t.Run(strconv.Itoa(step), func(t *testing.T) {
			t.Parallel()
			w := build(t)
			if out, err := nstest.Child("gc", w.dir, strconv.Itoa(step)).CombinedOutput(); !nstest.Killed(err) {
				t.Fatalf("%v %s", err, out)
			}
			if out, err := nstest.Child("gc", w.dir, "100000").CombinedOutput(); err != nil {
				t.Fatalf("gc after a kill: %v %s", err, out)
			}
			if got := normal(w); got != want {
				t.Fatalf("left\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestLockDomainAgainstGC races starts against removals: a holder's lock file is always the named one.
func TestLockDomainAgainstGC(t *testing.T) {
	dir := t.TempDir()
	c := Config{Run: dir}
	done := make(chan error, 1)
	go func() {
		var err error
		for range 300 {
			if e := c.underLock("d", func() error { return nil }); e != nil && !errors.Is(e, ErrLive) {
				err = errors.Join(err, e)
			}
		}
		done <- err
	}()
	for range 300 {
		l, err := LockDomain(dir, "d")
		if errors.Is(err, ErrLive) {
			continue
		}
		must(t, err)
		var held, named unix.Stat_t
		must(t, unix.Fstat(int(l.f.Fd()), &held), unix.Lstat(dir+"/d/lock", &named))
		if held.Ino != named.Ino {
			t.Fatal("two holders are possible")
		}
		l.Release()
	}
	must(t, <-done)
	if _, err := LockDomain(dir, "../x"); err == nil {
		t.Fatal("an ID left its directory")
	}
}

func TestPlanTable(t *testing.T) {
	rec := image.Record{Reference: "r", ImageID: "i"}
	for name, c := range map[string]struct {
		f    Facts
		o    Options
		want string
	}{
		"nothing":                  {Facts{}, Options{}, ""},
		"live":                     {Facts{Domains: []Domain{{ID: "d", Live: true, HasRun: true, HasRoot: true, Gone: true, Leftover: true}}}, Options{State: []string{"d"}, Force: true}, ""},
		"workspace unknown":        {Facts{Domains: []Domain{{ID: "d", HasRoot: true}}}, Options{State: []string{"d"}}, ""},
		"workspace there, forced":  {Facts{Domains: []Domain{{ID: "d", HasRoot: true}}}, Options{State: []string{"d"}, Force: true}, "state d"},
		"gone, not named":          {Facts{Domains: []Domain{{ID: "d", HasRoot: true, Gone: true}}}, Options{State: []string{"e"}, Force: true}, "?state d"},
		"recorded, profile":        {Facts{Records: []image.Record{rec}, Images: []string{"i"}}, Options{InUse: []string{"r"}, References: true}, ""},
		"recorded, no profile":     {Facts{Records: []image.Record{rec}, Images: []string{"i"}}, Options{}, "?reference r"},
		"recorded, asked":          {Facts{Records: []image.Record{rec}, Images: []string{"i"}}, Options{References: true}, "reference r,image i"},
		"recorded, asked, running": {Facts{Records: []image.Record{rec}, Images: []string{"i"}, Pins: []image.PinInfo{{ImageID: "i", Live: true}}}, Options{References: true}, "?reference r"},
		"old, running":             {Facts{Images: []string{"i"}, Pins: []image.PinInfo{{ImageID: "i", Live: true}}}, Options{}, ""},
		"old, dead pin":            {Facts{Images: []string{"i"}, Pins: []image.PinInfo{{ID: "p", ImageID: "i"}}}, Options{}, "pin p,image i"},
		"layers keep their order":  {Facts{Layers: []string{"z", "a"}}, Options{}, "layer z,layer a"},
	} {
		var got []string
		for _, a := range Plan(c.f, c.o) {
			s := string(a.Kind) + " " + a.ID
			if a.Ask {
				s = "?" + s
			}
			got = append(got, s)
			if a.Reason == "" {
				t.Errorf("%s: no reason for %s", name, s)
			}
		}
		if s := strings.Join(got, ","); s != c.want {
			t.Errorf("%s: %q, want %q", name, s, c.want)
		}
	}
}
