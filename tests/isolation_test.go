package tests

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const canary = "lazaret-canary-7f3a"

// leaky makes cmd one whose caller has secrets in its environment and open descriptors.
func (b *box) leaky(cmd *exec.Cmd) {
	b.t.Helper()
	cmd.Env = append(cmd.Env, "CANARY="+canary, "AWS_SECRET_ACCESS_KEY="+canary, "SSH_AUTH_SOCK=/tmp/"+canary, "LD_PRELOAD_CANARY="+canary)
	path := filepath.Join(b.dir, canary)
	b.write(path, canary)
	f, err := os.Open(path)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { f.Close() })
	r, w, err := os.Pipe()
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { r.Close(); w.Close() })
	for range 10 { // at several numbers: a role's own descriptors are low
		cmd.ExtraFiles = append(cmd.ExtraFiles, f, r)
	}
}

// TestSR3NothingLeaksInside lists environment and descriptors in the sandbox.
func TestSR3NothingLeaksInside(t *testing.T) {
	b := newBox(t)
	cmd := b.shell(`env; echo --; cd /proc/self/fd; ls -1 | tr '\n' ' '; echo --; cat /proc/*/environ | tr '\0' '\n'; echo --; ls -l /proc/[0-9]*/fd; true`)
	b.leaky(cmd)
	out := b.ok(cmd)
	if strings.Contains(out, canary) {
		t.Errorf("SR-3: a secret of the caller is inside:\n%s", out)
	}
	parts := strings.Split(out, "--\n")
	allowed := []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "TERM", "LANG", "LAZARET_PROFILE", "LAZARET_DOMAIN", "LAZARET_SESSION"}
	for line := range strings.Lines(parts[0]) {
		if name, _, _ := strings.Cut(line, "="); !slices.Contains(allowed, name) && !strings.HasPrefix(name, "LAZARET_") {
			t.Errorf("SR-3: variable %q is inside", name)
		}
	}
	if fds, _, _ := strings.Cut(parts[1], "--"); !strings.HasPrefix("0 1 2 3", strings.TrimSpace(fds)) { // 3 is the directory being listed
		t.Errorf("SR-3: descriptors inside: %q", fds)
	}
}

// view is what /proc shows of one process.
type view struct {
	process
	environ string
	fds     []string          // "NUMBER -> TARGET"
	ns      map[string]string // by kind
}

// inspect looks at the processes as the owner of their user namespace, uid 0 in it: runsc's are not dumpable.
func (b *box) inspect(ps []process) (out []view) {
	b.t.Helper()
	var prefix []string
	if os.Getuid() != 0 {
		prefix = []string{needsProgram(b.t, "nsenter"), "-U", "-t", strconv.Itoa(b.theOne(domain).pid), "--"}
	}
	const script = `for p; do echo "pid $p"; ls -l /proc/$p/ns /proc/$p/fd; echo env; tr '\0' '\n' </proc/$p/environ; done`
	host, within := []string{"sh", "-c", script, "sh"}, append(prefix, "sh", "-c", script, "sh")
	byPID := map[int]process{}
	for _, p := range ps {
		byPID[p.pid] = p
		switch {
		case strings.HasPrefix(p.title, uplink) && os.Getuid() != 0:
			// It hides itself, even from its own user; root's run of this test looks at it.
			if _, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid)); err == nil {
				b.t.Errorf("%v shows its environment to its user", p)
			}
		case strings.HasPrefix(p.title, coordinator), strings.HasPrefix(p.title, uplink), strings.HasPrefix(p.title, runner):
			host = append(host, strconv.Itoa(p.pid)) // of the host's user namespace
		default:
			within = append(within, strconv.Itoa(p.pid))
		}
	}
	for part := range strings.SplitSeq("\n"+b.host(host...)+b.host(within...), "\npid ") {
		id, text, found := strings.Cut(part, "\n")
		if !found {
			continue
		}
		pid, _ := strconv.Atoi(id)
		v := view{process: byPID[pid], ns: map[string]string{}}
		links, env, _ := strings.Cut(text, "\nenv\n")
		v.environ = env
		for line := range strings.Lines(links) {
			before, target, ok := strings.Cut(strings.TrimSpace(line), " -> ")
			if !ok {
				continue
			}
			name := before[strings.LastIndexByte(before, ' ')+1:]
			if _, err := strconv.Atoi(name); err == nil {
				v.fds = append(v.fds, name+" -> "+target)
			} else if slices.Contains([]string{"user", "mnt", "pid", "ipc", "uts", "cgroup", "net"}, name) {
				v.ns[name] = target
			}
		}
		if len(v.ns) != 7 || len(v.fds) == 0 {
			b.t.Fatalf("cannot look at %v: %q", v.process, text)
		}
		out = append(out, v)
	}
	return out
}

// helpers are Lazaret's own processes of a running Domain, without the clients and the sandbox's system call stubs.
func helpers() (out []process) {
	for _, p := range slices.Concat(find("lazaret ["), find("runsc-"), find("lazaret-runsc")) {
		if !slices.ContainsFunc(out, func(o process) bool { return o.pid == p.pid }) {
			out = append(out, p)
		}
	}
	return out
}

// TestSR3NothingLeaksIntoHelpers lists environment and descriptors of every process that Lazaret starts.
func TestSR3NothingLeaksIntoHelpers(t *testing.T) {
	b := newBox(t)
	cmd := b.shell("touch running; exec sleep 1000")
	b.leaky(cmd)
	in, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, w, new(bytes.Buffer)
	p := b.start(cmd)
	b.waitFile("running")
	secret := []string{canary}
	for i, f := range cmd.ExtraFiles[:2] {
		if i == 1 {
			link, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
			secret = append(secret, link)
		}
	}
	own, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", in.Fd()))
	secret = append(secret, own) // the caller's standard streams are the client's alone
	vs := b.inspect(helpers())
	if len(vs) < 5 {
		t.Errorf("want at least coordinator, domain, sandbox, gofer and the waiting exec: %v", vs)
	}
	for _, v := range vs {
		for line := range strings.Lines(v.environ) {
			if name, _, _ := strings.Cut(line, "="); !slices.Contains([]string{"PATH", "GOMAXPROCS", "GOTRACEBACK"}, name) && !strings.HasPrefix(name, "LAZARET_") && strings.TrimSpace(name) != "" {
				t.Errorf("SR-3: %v has the variable %q", v.process, strings.TrimSpace(line))
			}
		}
		for _, s := range secret {
			if strings.Contains(v.environ, s) {
				t.Errorf("SR-3: %v has %q in its environment", v.process, s)
			}
			for _, fd := range v.fds {
				if strings.HasSuffix(fd, s) {
					t.Errorf("SR-3: %v has the descriptor %s", v.process, fd)
				}
			}
		}
	}
	_ = p.Process.Signal(os.Interrupt)
	p.wait(patience)
}

// TestSR12NoNamespaceOfTheHost compares the namespaces of every process of the Domain with ours.
func TestSR12NoNamespaceOfTheHost(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	for _, v := range b.inspect(helpers()) {
		if strings.HasPrefix(v.title, coordinator) || strings.HasPrefix(v.title, uplink) || strings.HasPrefix(v.title, runner) {
			continue // the host side
		}
		for kind, have := range v.ns {
			if host, _ := os.Readlink("/proc/self/ns/" + kind); have == host {
				t.Errorf("SR-12: %v is in the host's %s namespace", v.process, kind)
			}
		}
	}
	// What the sandbox itself shows: no process of the host, not its name, and one user database.
	out := b.ok(b.shell("ls -d /proc/[0-9]* | wc -l; hostname; id -un; id -u; cat /proc/1/cmdline | tr '\\0' ' '"))
	if f := strings.Fields(out); len(f) != 5 || f[1] != "default" || f[2] != "agent" || f[3] != "1000" || f[4] != "/run/lazaret/init" {
		t.Errorf("inside: %q", out)
	} else if n, _ := strconv.Atoi(f[0]); n > 12 {
		t.Errorf("SR-12: %d processes are seen inside", n)
	}
	release()
}

// TestSR7NoPrivilege looks at the agent's capabilities and tries what needs some.
func TestSR7NoPrivilege(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	status := b.ok(b.shell("cat /proc/self/status"))
	for line := range strings.Lines(status) {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "Cap") && strings.Trim(f[1], "0") != "" {
			t.Errorf("SR-7: the agent has capabilities: %s", line)
		}
		if f[0] == "NoNewPrivs:" && f[1] != "1" {
			t.Errorf("SR-7: %s", line)
		}
	}
	for _, script := range []string{
		"mount -t tmpfs none /mnt", "mkdir /made", "touch /usr/made", "touch /etc/made", "chown 0 .", "mknod dev c 1 3", "hostname other",
		"python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
		"python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)'",
		"kill -9 1", "ls /dev/mem", "ls /dev/kvm", "cat /etc/shadow", "cat /run/lazaret/../../etc/shadow",
	} {
		if r := b.run(b.shell(script)); r.status == 0 || r.status == 125 {
			t.Errorf("SR-7: %q must fail inside: %v", script, r)
		}
	}
	// Init may be the agent's own file, as the developer built it; what is written over it must stay in the sandbox.
	before := b.host("sha256sum", filepath.Join(b.bin, "lazaret-init"))
	b.run(b.shell("echo x >/run/lazaret/init"))
	if after := b.host("sha256sum", filepath.Join(b.bin, "lazaret-init")); after != before {
		t.Errorf("the agent changed the host's lazaret-init: %s, was %s", after, before)
	}
	// Set-id programs gain nothing.
	if out := b.ok(b.shell("for p in /usr/bin/su /usr/bin/passwd /usr/bin/newuidmap; do [ -x $p ] && stat -c %A $p; done; python3 -c 'import os; print(os.geteuid())'")); !strings.HasSuffix(out, "1000\n") {
		t.Errorf("SR-7: %q", out)
	}
	release()
}

// TestSR3HostSockets offers the sandbox a listening socket in the workspace; it must not be able to connect.
func TestSR3HostSockets(t *testing.T) {
	needsProgram(t, "python3")
	b := newBox(t)
	p := b.start(b.command("python3", "-c", "import socket,time; s=socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(); open('listening','w'); time.sleep(1000)"))
	b.waitFile("listening")
	r := b.run(b.enter("/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_UNIX).connect('sock'); print('connected')"))
	if r.status == 0 || strings.Contains(r.out, "connected") {
		t.Errorf("SR-3: the sandbox reached a socket of the host: %v", r)
	}
	_ = p.Process.Kill()
	p.wait(patience)
}

// documentedEtc are the top-level names that docs/threat-model.md lists for the host base, and our own files.
var documentedEtc = strings.Fields(`ssl ca-certificates ca-certificates.conf pki crypto-policies ld.so.cache ld.so.conf ld.so.conf.d alternatives
	localtime timezone locale.alias locale.conf locale.gen default terminfo inputrc mime.types magic magic.mime protocols services rpc ethertypes
	fonts papersize os-release debian_version lsb-release redhat-release fedora-release arch-release system-release bash.bashrc bashrc
	bash_completion bash_completion.d profile profile.d zsh skel vim vimrc nanorc java java-8-openjdk java-11-openjdk java-17-openjdk
	java-21-openjdk python3 python3.9 python3.10 python3.11 python3.12 python3.13 python3.14 perl ruby lighttpd ImageMagick-6 ImageMagick-7 clang
	git gitconfig passwd group hostname hosts nsswitch.conf resolv.conf shells`)

// TestHostBaseShowsNothingPrivate compares /etc with its list, and looks for files in /usr that not everybody may read.
func TestHostBaseShowsNothingPrivate(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	for _, name := range strings.Fields(b.ok(b.shell("ls -A /etc"))) {
		if !slices.Contains(documentedEtc, name) {
			t.Errorf("/etc/%s is in the sandbox", name)
		}
	}
	if out := b.ok(b.shell("cat /etc/passwd")); strings.Count(out, "\n") != 3 || !strings.Contains(out, "agent:x:1000:1000:") {
		t.Errorf("/etc/passwd inside: %q", out)
	}
	// Only what is not readable for others on the host is of interest; what the agent may read of it is a leak.
	private := b.run(b.command("find", "/usr", "-xdev", "(", "-type", "f", "-o", "-type", "d", ")", "!", "-perm", "-004", "-print"))
	for _, path := range strings.Fields(private.out) {
		if r := b.run(b.enter("sh", "-c", `if [ -d "$1" ]; then ls -A "$1"; else head -c 1 "$1"; fi`, "sh", path)); r.status == 0 && r.out != "" {
			t.Errorf("the agent can read %s, which not everybody may on the host: %v", path, r)
		}
	}
	t.Logf("private in /usr: %q", strings.Fields(private.out))
	for _, path := range []string{"/root", "/home", "/var/log", "/var/lib", "/srv", "/mnt", "/opt"} {
		if out := b.ok(b.enter("ls", "-A", path)); strings.TrimSpace(strings.ReplaceAll(out, "agent", "")) != "" {
			t.Errorf("%s inside: %q", path, out)
		}
	}
	release()
}

// TestEphemeralSizeLimits fills the throw-away layer and /tmp: the agent gets ENOSPC, the host keeps its disk.
func TestEphemeralSizeLimits(t *testing.T) {
	b := newBox(t)
	b.profile("default", "ephemeral_size = \"32m\"\ntmp_size = \"8m\"\n")
	for dir, limit := range map[string]int{"/var/tmp": 32, "/tmp": 8, "/dev/shm": 8} {
		r := b.run(b.shell("head -c 100000000 /dev/zero >" + dir + "/big; stat -c %s " + dir + "/big; rm " + dir + "/big; echo x >" + dir + "/small"))
		size, _ := strconv.Atoi(strings.TrimSpace(r.out))
		if !strings.Contains(r.err, "No space left on device") || size > limit<<20 || size < limit<<19 {
			t.Errorf("%s: want ENOSPC at %d MiB, and room again after rm: %v", dir, limit, r)
		}
	}
}

func TestProcessLimit(t *testing.T) {
	b := newBox(t)
	b.profile("default", "processes = 64\nopen_files = 128\n")
	r := b.run(b.enter("bash", "-c", `ulimit -u; ulimit -n; exec /usr/bin/python3 -c '
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
except BlockingIOError:
    pass
print(n)'`))
	var procs, files, forked int
	if _, err := fmt.Sscan(r.out, &procs, &files, &forked); err != nil || procs != 64 || files != 128 || forked > 64 || forked < 32 {
		t.Errorf("SR-8: want the limits 64 and 128, and fork to fail: %v", r)
	}
}

// TestOrphansAreReaped leaves orphans to the sandbox's pid 1.
func TestOrphansAreReaped(t *testing.T) {
	b := newBox(t)
	out := b.ok(b.shell(`for i in $(seq 50); do (sleep 0.2 & ) ; done; sleep 2; cat /proc/[0-9]*/stat`))
	for line := range strings.Lines(out) {
		if strings.Contains(line, ") Z ") {
			t.Errorf("a zombie inside: %s", line)
		}
	}
}
