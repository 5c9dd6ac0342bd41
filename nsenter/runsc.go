package nsenter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// ErrForeignRuntime is returned when lazaret-runsc is not the one that was built with this lazaret (SR-2).
var ErrForeignRuntime = errors.New("not the lazaret-runsc of this lazaret")

// stampEnv names the descriptor on which lazaret-runsc says who it is before it does anything else.
const stampEnv = "LAZARET_STAMP_FD"

// Version names the build; the Makefile sets it in both programs, so that one from another build is refused.
var Version = "devel"

// AnswerStamp is called first by lazaret-runsc: when asked, it writes its stamp and waits for the caller to accept it.
// It returns an error when the caller goes away instead.
func AnswerStamp() error {
	fd, err := strconv.Atoi(os.Getenv(stampEnv))
	if err != nil {
		return nil // started by runsc itself, or by hand
	}
	os.Unsetenv(stampEnv)
	f := os.NewFile(uintptr(fd), "stamp")
	defer f.Close()
	if _, err := io.WriteString(f, Version); err != nil {
		return fmt.Errorf("send stamp: %w", err)
	}
	if _, err := io.ReadFull(f, make([]byte, 1)); err != nil {
		return fmt.Errorf("the caller refused the stamp %q", Version)
	}
	return nil
}

// FindProgram returns the path of one of Lazaret's other programs: beside this executable, or below PREFIX/libexec.
func FindProgram(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", name, err)
	}
	dir := filepath.Dir(self)
	for _, p := range []string{filepath.Join(dir, name), filepath.Join(dir, "../libexec/lazaret", name)} {
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("find %s: it is neither beside %s nor in ../libexec/lazaret", name, self)
}

// Runtime runs lazaret-runsc for one Agent Sandbox, from a process that is uid 0 of the Domain's user namespace.
type Runtime struct {
	Path   string // lazaret-runsc
	State  string // fresh directory for --root
	Logs   string // directory for runsc's logs
	Reaper *Reaper
	Flags  []string // further global flags
	Env    []string // further variables of Create, and so of the gofer
}

// containerID is constant: each Runtime has a State of its own.
const containerID = "agent"

// Create prepares the sandbox of a bundle directory; nothing of the agent runs before [Runtime.StartInit].
func (r *Runtime) Create(bundle string) error {
	return r.run(r.Env, "create", "--bundle", bundle, "--pid-file", r.pidFile(), containerID)
}

func (r *Runtime) pidFile() string { return filepath.Join(r.State, "sandbox.pid") }

// SandboxPID is the pid of the sandbox process, in our pid namespace; valid after Create.
func (r *Runtime) SandboxPID() (int, error) { return readPID(r.pidFile()) }

// GoferPID is the pid of the process that serves the sandbox's files, in our pid namespace; valid after Create.
func (r *Runtime) GoferPID() (int, error) {
	files, _ := filepath.Glob(filepath.Join(r.State, containerID+"_*.state"))
	if len(files) != 1 {
		return 0, fmt.Errorf("find the gofer: %d state files in %s", len(files), r.State)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		return 0, err
	}
	var state struct{ GoferPid int }
	if err := json.Unmarshal(b, &state); err != nil || state.GoferPid <= 1 {
		return 0, fmt.Errorf("find the gofer: no pid in %s: %w", files[0], err)
	}
	return state.GoferPid, nil
}

func readPID(file string) (int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(b)))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", file, err)
	}
	return pid, nil
}

// StartInit starts the sandbox's first process.
func (r *Runtime) StartInit() error { return r.run(nil, "start", containerID) }

// Kill signals one process of the sandbox, by its pid inside.
func (r *Runtime) Kill(pid int, sig unix.Signal) error {
	return r.run(nil, "kill", "--pid", strconv.Itoa(pid), containerID, strconv.Itoa(int(sig)))
}

// Exec is one process to start in the sandbox.
type Exec struct {
	Process specs.Process
	Stdio   [3]*os.File // the caller keeps its copies
	TTY     bool        // Stdio is a pseudo-terminal
	Dir     string      // private directory for this one's files; the caller removes it
}

// Running is a process of the sandbox, and the runsc that waits for it.
type Running struct {
	rt      *Runtime
	exec    *Started
	errs    *os.File // runsc's own messages
	pidFile string
}

// Exec starts a process. Its end is reported by [Running.Wait].
func (r *Runtime) Exec(e Exec) (*Running, error) {
	spec, err := json.Marshal(e.Process)
	if err != nil {
		return nil, fmt.Errorf("encode process: %w", err)
	}
	file, pidFile := filepath.Join(e.Dir, "process.json"), filepath.Join(e.Dir, "pid")
	if err := os.WriteFile(file, spec, 0o600); err != nil {
		return nil, fmt.Errorf("write process: %w", err)
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer errW.Close()
	// The agent's descriptor 2 is passed as 3, so that runsc's own messages do not mix with the agent's.
	args := append(r.args(), "exec", "--process", file, "--internal-pid-file", pidFile, "--pass-fd", "3:2", containerID)
	p, err := r.Reaper.Start(Command{Path: r.Path, Args: args, Env: runtimeEnv(), TTY: e.TTY,
		Files: []*os.File{e.Stdio[0], e.Stdio[1], errW, e.Stdio[2]}})
	if err != nil {
		errR.Close()
		return nil, err
	}
	return &Running{rt: r, exec: p, errs: errR, pidFile: pidFile}, nil
}

// ErrLost is returned when the sandbox went away before a process of it had ended.
var ErrLost = errors.New("the sandbox does not tell how it ended")

// Wait returns the exit status of the process as a shell would give it. The error tells that it never started, or is
// [ErrLost].
func (x *Running) Wait() (int, error) {
	said, _ := io.ReadAll(io.LimitReader(x.errs, 64<<10))
	x.errs.Close()
	ws := x.exec.Wait()
	if _, err := os.Stat(x.pidFile); err != nil {
		return 0, fmt.Errorf("start it in the sandbox: %s", lastLine(said))
	}
	if last := lastLine(said); strings.HasPrefix(last, "waiting on pid") {
		return 0, fmt.Errorf("%w: %s", ErrLost, last)
	}
	return ExitStatus(ws), nil
}

// Signal sends a signal to the process in the sandbox.
func (x *Running) Signal(sig unix.Signal) error {
	pid, err := readPID(x.pidFile)
	if err != nil {
		return fmt.Errorf("signal a process that has not started: %w", err)
	}
	return x.rt.Kill(pid, sig)
}

func (r *Runtime) args() []string {
	return append([]string{"lazaret-runsc", "--root", r.State, "--debug-log", r.Logs + "/"}, r.Flags...)
}

// runtimeEnv is the whole environment of runsc, of the gofer and so of every helper that it starts (SR-3).
func runtimeEnv() []string { return []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"} }

// run runs one runsc command to its end, after checking who it is. The command's standard streams are /dev/null, as the
// sandbox inherits them; what it has to say is in its log.
func (r *Runtime) run(env []string, command string, args ...string) error {
	stamp, theirs, err := streamPair()
	if err != nil {
		return err
	}
	defer stamp.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		theirs.Close()
		return err
	}
	defer null.Close()
	p, err := r.Reaper.Start(Command{Path: r.Path, Args: append(append(r.args(), command), args...),
		Env: append(append(runtimeEnv(), stampEnv+"=3"), env...), Files: []*os.File{null, null, null, theirs}})
	theirs.Close()
	if err != nil {
		return err
	}
	refused := checkStamp(stamp, r.Path)
	if refused != nil {
		stamp.Close()
		_ = p.Signal(unix.SIGKILL)
	}
	status := ExitStatus(p.Wait())
	switch {
	case refused != nil:
		return refused
	case status != 0:
		return fmt.Errorf("lazaret-runsc %s: %s", command, r.Cause(r.said(command, fmt.Sprintf("exit status %d", status))))
	}
	return nil
}

// said returns the last fatal line in the logs of one command, or otherwise.
func (r *Runtime) said(command, otherwise string) string {
	files, _ := filepath.Glob(filepath.Join(r.Logs, "*."+command+".txt"))
	sort.Strings(files)
	for _, f := range slices.Backward(files) {
		if b, err := os.ReadFile(f); err == nil {
			if line := fatalLine(b); line != "" {
				return line
			}
		}
	}
	return otherwise
}

// CheckStamp asks the lazaret-runsc at path who it is, and returns ErrForeignRuntime if it is not ours.
func CheckStamp(path string) error {
	stamp, theirs, err := streamPair()
	if err != nil {
		return err
	}
	defer stamp.Close()
	cmd := exec.Command(path, "--version")
	cmd.Env, cmd.ExtraFiles = append(runtimeEnv(), stampEnv+"=3"), []*os.File{theirs}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return fmt.Errorf("run %s: %w", path, err)
	}
	refused := checkStamp(stamp, path)
	stamp.Close()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return refused
}

func checkStamp(stamp *os.File, path string) error {
	buf := make([]byte, 256)
	n, err := stamp.Read(buf)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("ask %s for its stamp: %w", path, err)
	}
	switch got := string(buf[:n]); got {
	case Version:
		_, err := stamp.Write([]byte{1})
		return err
	case "":
		return fmt.Errorf("%s: %w: it does not answer with a stamp", path, ErrForeignRuntime)
	default:
		return fmt.Errorf("%s: %w: it is %q, this is %q", path, ErrForeignRuntime, got, Version)
	}
}

func streamPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "stamp"), os.NewFile(uintptr(fds[1]), "stamp"), nil
}

// logPrefix is what gVisor writes before the text of a log line: level, date, time, pid and place.
var logPrefix = regexp.MustCompile(`^([IWED])\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] `)

// Cause finds the reason of a failure, of which runsc said own: often only "EOF", when the gofer or the sandbox could
// not start.
func (r *Runtime) Cause(own string) string {
	// The gofer is the first to fail: the sandbox then misses it.
	found := r.said("gofer", "")
	if found == "" {
		found = r.said("boot", "")
	}
	switch {
	case found == "" || strings.Contains(own, found):
		return own
	case own == "" || strings.Contains(own, "EOF"):
		return found
	}
	return own + ": " + found
}

// fatalLine returns the text of the last line of a runsc log that tells a fatal error or a panic.
func fatalLine(log []byte) (found string) {
	for line := range strings.Lines(string(log)) {
		line = strings.TrimSpace(line)
		text := logPrefix.ReplaceAllString(line, "")
		if rest, ok := strings.CutPrefix(text, "FATAL ERROR: "); ok {
			found = rest
		} else if strings.HasPrefix(text, "panic: ") || strings.HasPrefix(text, "fatal error: ") {
			found = text
		}
	}
	return found
}

// lastLine returns the last line that is not empty, without gVisor's prefix.
func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return logPrefix.ReplaceAllString(strings.TrimSpace(lines[len(lines)-1]), "")
}
