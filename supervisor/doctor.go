package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay"
)

// Verdict of a [Check].
type Verdict string

const (
	OK   Verdict = "ok"
	Weak Verdict = "weak" // Lazaret works, with less
	Bad  Verdict = "bad"  // lazaret enter fails
)

// Check is one prerequisite, as it was found, and what to type if it is not met (DX-5).
type Check struct {
	Name    string
	Verdict Verdict
	Found   string
	Fix     string `json:",omitempty"`
}

// Doctor checks what a start needs, by trying it. It changes nothing that outlives the call.
func Doctor() []Check {
	checks := []Check{checkPrograms()}
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		checks = append(checks, failed("directories", err))
	} else {
		checks = append(checks, checkDirs(dirs)...)
	}
	ids := nsenter.PlanIDs(uint32(os.Getuid()), uint32(os.Getgid()), userName(), nsenter.ReadSubordinate())
	checks = append(checks, checkIDs(ids))
	checks = append(checks, probeNamespaces(ids)...)
	return append(checks, checkSecurityModule(), checkCgroup(), checkTun())
}

// failed makes a Check of an error.
func failed(name string, err error) Check {
	return Check{Name: name, Verdict: Bad, Found: err.Error(), Fix: HintOf(err)}
}

func checkPrograms() Check {
	const name = "programs"
	for _, p := range []string{"lazaret-runsc", "lazaret-init"} {
		if _, err := nsenter.FindProgram(p); err != nil {
			return failed(name, hint(err, "build it with: make; or install all with: make install"))
		}
	}
	path, err := nsenter.FindProgram("lazaret-runsc")
	if err == nil {
		err = nsenter.CheckStamp(path)
	}
	if err != nil {
		return failed(name, hint(err, "build all programs together: make"))
	}
	return Check{Name: name, Verdict: OK, Found: "lazaret-runsc and lazaret-init of build " + nsenter.Version}
}

// minFree is the free space, in bytes, below which a start is likely to fail half-way.
const minFree = 1 << 30

func checkDirs(dirs Dirs) []Check {
	out := []Check{}
	for _, d := range []struct{ name, path string }{{"runtime directory", dirs.Runtime}, {"Storage Root", dirs.Storage}} {
		f, err := PrivateDir(d.path)
		if err != nil {
			out = append(out, failed(d.name, err))
			continue
		}
		f.Close()
		c := Check{Name: d.name, Verdict: OK, Found: d.path + " is yours alone"}
		var fs unix.Statfs_t
		if err := unix.Statfs(d.path, &fs); err == nil && d.path == dirs.Storage {
			free := fs.Bavail * uint64(fs.Bsize)
			c.Found += fmt.Sprintf(", %d GiB free", free>>30)
			if free < minFree {
				c.Verdict, c.Fix = Weak, "free some space on the disk of "+d.path
			}
		}
		out = append(out, c)
	}
	return out
}

func checkIDs(ids nsenter.IDMap) Check {
	const name = "subordinate ids"
	switch ids.Kind {
	case nsenter.MapRoot:
		return Check{Name: name, Verdict: Weak, Found: "you are root; none are needed", Fix: "run Lazaret as an ordinary user if you can"}
	case nsenter.MapSingle:
		fix := fmt.Sprintf("sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %s   (another range if it is taken)", userName())
		if strings.Contains(ids.Why, "newuidmap") {
			fix = "sudo apt install uidmap   (Fedora: shadow-utils, Arch: shadow)"
		}
		return Check{Name: name, Verdict: Weak, Found: ids.Why, Fix: fix}
	}
	return Check{Name: name, Verdict: OK, Found: "granted, and newuidmap is there"}
}

// probeNamespaces makes the namespaces of a Domain and tries in them what a start does.
func probeNamespaces(ids nsenter.IDMap) []Check {
	const name = "user namespaces"
	p, err := nsenter.Child{Role: "probe", Namespaces: nsenter.DomainNamespaces, IDs: &ids}.Start()
	if err != nil {
		if errors.Is(err, nsenter.ErrUserNS) {
			err = hint(err, "%s", nsenter.UserNSHint(nsenter.Sysctl))
		}
		return []Check{failed(name, err)}
	}
	defer p.End()
	checks := []Check{{Name: name, Verdict: OK, Found: "can be made, and their ids mapped"}}
	var found []Check
	if _, err := p.Control.Recv(&found); err != nil {
		return append(checks, failed("kernel features", hint(fmt.Errorf("the probe ended early: %w", err), "%s", nsenter.UserNSHint(nsenter.Sysctl))))
	}
	return append(checks, found...)
}

// ProbeMain is the role "probe": it tries kernel features in namespaces that go with it.
func ProbeMain(self nsenter.Self) int {
	dir := "/tmp"
	var checks []Check
	for _, t := range []struct {
		name, found, fix string
		verdict          Verdict // if it fails
		try              func() error
	}{
		{"private mounts", "tmpfs and proc can be mounted", "run outside of a container; /proc must not be covered by other mounts", Bad, func() error {
			return errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("probe", dir, "tmpfs", 0, "mode=0700"),
				os.Mkdir(dir+"/proc", 0o700), unix.Mount("proc", dir+"/proc", "proc", 0, ""))
		}},
		{"read-only mounts", "mount_setattr works", "use Linux 5.12 or newer", Bad, func() error {
			return errors.Join(os.Mkdir(dir+"/usr", 0o700), overlay.BindReadOnly("/usr", dir+"/usr"))
		}},
		{"safe path lookup", "openat2 works", "use Linux 5.6 or newer", Bad, func() error {
			fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH, Resolve: unix.RESOLVE_NO_SYMLINKS})
			if err == nil {
				unix.Close(fd)
			}
			return err
		}},
		{"overlay", "can be mounted without privilege", "use Linux 5.11 or newer; persistent paths need it", Weak, func() error {
			for _, d := range []string{"lower", "upper", "work", "merged"} {
				if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
					return err
				}
			}
			return unix.Mount("overlay", dir+"/merged", "overlay", 0, fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work,userxattr", dir))
		}},
		{"network interfaces", "veth pairs can be made", "load the module: sudo modprobe veth", Weak, func() error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}, PeerName: "probe1"})
		}},
	} {
		c := Check{Name: t.name, Verdict: OK, Found: t.found}
		if err := t.try(); err != nil {
			c = Check{Name: t.name, Verdict: t.verdict, Found: strings.ReplaceAll(err.Error(), "\n", "; "), Fix: t.fix}
		}
		checks = append(checks, c)
	}
	if self.Control.Send(checks) != nil {
		return 1
	}
	return 0
}

// checkSecurityModule names the module that may deny what the probe was allowed.
func checkSecurityModule() Check {
	c := Check{Name: "security module", Verdict: OK, Found: "none that restricts user namespaces"}
	enforcing, _ := os.ReadFile("/sys/fs/selinux/enforce")
	switch {
	case nsenter.Sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
		c.Verdict, c.Found, c.Fix = Weak, "AppArmor restricts user namespaces", nsenter.UserNSHint(nsenter.Sysctl)
	case string(bytes.TrimSpace(enforcing)) == "1":
		c.Found = "SELinux is enforcing; its denials: ausearch -m avc -ts recent"
	}
	return c
}

// checkCgroup tells whether limits of memory and processes can be set for a Domain (cgroups(7), delegation).
func checkCgroup() Check {
	const name = "cgroup delegation"
	weak := func(found string) Check {
		return Check{Name: name, Verdict: Weak, Found: found,
			Fix: "log in through systemd (loginctl enable-linger " + userName() + "); without it, process and file limits of the profile still hold"}
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return weak(err.Error())
	}
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		dir := filepath.Join("/sys/fs/cgroup", path)
		if unix.Access(dir, unix.W_OK) != nil {
			return weak(dir + " is not yours to divide")
		}
		controllers, _ := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if !bytes.Contains(controllers, []byte("memory")) || !bytes.Contains(controllers, []byte("pids")) {
			return weak(fmt.Sprintf("%s has the controllers %q", dir, bytes.TrimSpace(controllers)))
		}
		return Check{Name: name, Verdict: OK, Found: dir}
	}
	return weak("this system has no cgroup v2 of ours")
}

// checkTun looks at the one device that other tools of this kind need.
func checkTun() Check {
	c := Check{Name: "/dev/net/tun", Verdict: OK, Found: "not needed by Lazaret"}
	if fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		unix.Close(fd)
		c.Found = "usable, but " + c.Found
	}
	return c
}
