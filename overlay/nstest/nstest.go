// Package nstest runs a package's tests where the product runs its code: as uid 0 of a fresh user
// namespace with the agent-owned id map, in fresh mount and pid namespaces, started by an ordinary
// user. It is test support; the product's own re-exec is in package nsenter.
package nstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const stageEnv = "LAZARET_NSTEST_STAGE"

// Main is called first in TestMain, after reexec.Init. In the test process it re-executes the
// binary inside the namespaces and exits with its status; inside it returns.
func Main() {
	switch os.Getenv(stageEnv) {
	case "done":
		return // a child made by Child: it is inside already
	case "":
		os.Exit(outside())
	case "mapped":
		become()
	}
	os.Setenv(stageEnv, "done")
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		fatal("make mounts private", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		fatal("mount proc", err)
	}
	if err := unix.Mount("nstest", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=16m"); err != nil {
		fatal("mount a private /dev/shm", err) // Podman's locks
	}
}

// outside is the parent: it makes the namespaces, writes the id maps and waits.
func outside() int {
	if os.Getuid() == 0 {
		fmt.Fprintln(os.Stderr, "nstest: run these tests as an ordinary user with subordinate ids")
		return 1
	}
	me, err := user.Current()
	if err != nil {
		return fail("look up user", err)
	}
	maps := map[string][]string{}
	for tool, file := range map[string]string{"newuidmap": "/etc/subuid", "newgidmap": "/etc/subgid"} {
		first, err := subID(file, me)
		if err != nil {
			return missing(err)
		}
		own := me.Uid
		if tool == "newgidmap" {
			own = me.Gid
		}
		f := func(n int) string { return strconv.Itoa(n) }
		maps[tool] = []string{"0", f(first), "1000", "1000", own, "1", "1001", f(first + 1000), f(65536 - 1001)}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fail("pipe", err)
	}
	runtime.LockOSThread() // Pdeathsig follows the creating thread
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{r}
	cmd.Env = append(os.Environ(), stageEnv+"=mapped")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		AmbientCaps: []uintptr{unix.CAP_SETGID, unix.CAP_SETUID},
		Pdeathsig:   unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return missing(err)
	}
	r.Close()
	for tool, m := range maps {
		out, err := exec.Command(tool, append([]string{strconv.Itoa(cmd.Process.Pid)}, m...)...).CombinedOutput()
		if err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return missing(fmt.Errorf("%s: %w: %s", tool, err, out))
		}
	}
	_, _ = w.Write([]byte{1})
	w.Close()
	signal.Ignore(os.Interrupt)
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode()
	}
	if err != nil {
		return fail("tests inside the namespace", err)
	}
	return 0
}

// become waits for the id maps, takes uid 0 and executes the binary once more, so that every
// thread has the full capability set.
func become() {
	if n, err := os.NewFile(3, "mapped").Read(make([]byte, 1)); n != 1 {
		fatal("wait for id maps", err)
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(0, 0, 0), syscall.Setresuid(0, 0, 0)); err != nil {
		fatal("become uid 0", err)
	}
	os.Setenv(stageEnv, "inside")
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		fatal("exec", err)
	}
}

func subID(file string, me *user.User) (int, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) != 3 || (f[0] != me.Username && f[0] != me.Uid) {
			continue
		}
		first, err1 := strconv.Atoi(f[1])
		count, err2 := strconv.Atoi(f[2])
		if err1 == nil && err2 == nil && count >= 65536 {
			return first, nil
		}
	}
	return 0, fmt.Errorf("%s: no range of 65536 ids for %s", file, me.Username)
}

func missing(err error) int {
	fmt.Fprintln(os.Stderr, "nstest: no user namespace with subordinate ids:", err)
	if os.Getenv("LAZARET_TEST_REQUIRE") != "" {
		return 1
	}
	fmt.Fprintln(os.Stderr, "nstest: SKIPPED")
	return 0
}

func fail(op string, err error) int {
	fmt.Fprintf(os.Stderr, "nstest: %s: %v\n", op, err)
	return 1
}

func fatal(op string, err error) { os.Exit(fail(op, err)) }

// Needs fails the test where LAZARET_TEST_REQUIRE is set and skips it otherwise.
func Needs(t testing.TB, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("%s is required here: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}

const roleEnv = "LAZARET_NSTEST_ROLE"

// Role is what Child was asked to run, empty in the test process. TestMain dispatches on it.
func Role() string { return os.Getenv(roleEnv) }

// Child prepares the test binary, in the same namespaces, to run role with the given arguments
// (os.Args[1:] there).
func Child(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// KillSelf ends this process as kill -9 does.
func KillSelf() {
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	for {
		time.Sleep(time.Hour)
	}
}

// Killed tells whether err is that end.
func Killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	st, ok := exit.Sys().(syscall.WaitStatus)
	return ok && st.Signaled() && st.Signal() == unix.SIGKILL
}
