// Command lazaret-escalate is the Escalation Client: inside a sandbox, it asks the developer to have one command run on
// the host. See package client for the files that it reads.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/escalation/wire"
)

const usage = `Usage:
    lazaret-escalate [--reason TEXT] [--timeout DURATION] [--stdin] -- COMMAND [ARGUMENT...]
    lazaret-escalate mcp
    lazaret-escalate --help

Ask the developer to have one command run on the host, outside of this sandbox, in
the current directory (which must be in the workspace). They see exactly this
command and approve, edit or deny it. Output and exit status are the command's.
There is no shell, and nothing of this environment is passed.

    --reason TEXT        why, in one honest sentence; shown as the agent's words
    --timeout DURATION   how long to wait for an answer, such as 90s or 5m
    --stdin              pass standard input; only where a rule allows it

Example:

    lazaret-escalate --reason "publish the release branch" -- git push origin v1.2

"mcp" serves the same as the tool run_on_host of the Model Context Protocol, over
standard input and output.

Exit status: the command's own, or 128 plus the number of the signal that ended it.
Otherwise:

    201  denied by the developer or by a rule
    202  nobody answered in time, or the command ran too long
    203  cancelled
    204  failed: the command could not be started, or broke a limit
    205  no connection to Lazaret, or the session has ended
    206  usage error

The command's own status is passed as it is, so one of 201 to 206 may be its own
too; a line on standard error that begins with "lazaret-escalate:" tells them apart.
`

// Exit statuses; stable, documented in usage and in ESCALATE.md.
const (
	exitDenied = 201 + iota
	exitTimedOut
	exitCancelled
	exitFailed
	exitNoConnection
	exitUsage
)

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	o, err := parse(args)
	if err != nil {
		fmt.Fprintf(stderr, "lazaret-escalate: error: %v\nlazaret-escalate: hint: see lazaret-escalate --help\n", err)
		return exitUsage
	}
	if o.help {
		fmt.Fprint(stdout, usage)
		return 0
	}
	// The first signal cancels the request and awaits its result; a second one ends this process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop)
	if o.mcp {
		if err := serveMCP(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintf(stderr, "lazaret-escalate: error: %v\n", err)
			return exitFailed
		}
		return 0
	}
	q := client.Request{Argv: o.argv, Reason: o.reason, Wait: o.timeout, Stdout: stdout, Stderr: stderr}
	if o.stdin {
		q.Stdin = stdin
	}
	res, err := ask(ctx, q)
	return report(res, err, stderr)
}

// ask runs one request from the current directory.
func ask(ctx context.Context, q client.Request) (wire.Result, error) {
	e, err := client.Default()
	if err != nil {
		return wire.Result{}, err
	}
	if q.Dir, err = syscall.Getwd(); err != nil { // not os.Getwd, which believes $PWD
		return wire.Result{}, fmt.Errorf("find the working directory: %w", err)
	}
	return e.Run(ctx, q)
}

func report(r wire.Result, err error, stderr io.Writer) int {
	switch {
	case errors.Is(err, wire.ErrMalformed):
		fmt.Fprintf(stderr, "lazaret-escalate: error: the request cannot be sent: %v\n", err)
		return exitUsage
	case errors.Is(err, client.ErrRefused):
		fmt.Fprintf(stderr, "lazaret-escalate: error: %v\n", err)
		return exitFailed
	case err != nil:
		fmt.Fprintf(stderr, "lazaret-escalate: error: %v\n", err)
		return exitNoConnection
	}
	status, line := verdict(r)
	if line != "" {
		fmt.Fprintf(stderr, "lazaret-escalate: %s\n", line)
	}
	return status
}

// verdict returns the exit status of a result, and what to say about it.
func verdict(r wire.Result) (status int, line string) {
	word := map[wire.Outcome]string{wire.Denied: "denied", wire.TimedOut: "timed out", wire.Cancelled: "cancelled", wire.Failed: "failed"}[r.Outcome]
	if r.Detail != "" {
		word += ": " + r.Detail
	}
	switch r.Outcome {
	case wire.Denied:
		return exitDenied, word
	case wire.TimedOut:
		return exitTimedOut, word
	case wire.Cancelled:
		return exitCancelled, word
	case wire.Failed:
		return exitFailed, word
	}
	if r.Signal != 0 {
		return 128 + int(r.Signal), ""
	}
	return int(r.Status), ""
}

type options struct {
	help, mcp, stdin bool
	reason           string
	timeout          time.Duration
	argv             []string
}

// parse reads the command line. "--" is required before the command, so that no option of it can be taken for ours.
func parse(args []string) (o options, err error) {
	if len(args) == 1 && args[0] == "mcp" {
		return options{mcp: true}, nil
	}
	for len(args) > 0 {
		name, value, joined := strings.Cut(args[0], "=")
		args = args[1:]
		next := func() (string, error) {
			if joined {
				return value, nil
			}
			if len(args) == 0 || args[0] == "--" {
				return "", fmt.Errorf("%s needs a value", name)
			}
			v := args[0]
			args = args[1:]
			return v, nil
		}
		switch name {
		case "-h", "--help", "help":
			return options{help: true}, nil
		case "--stdin":
			o.stdin = true
		case "--reason":
			if o.reason, err = next(); err != nil {
				return o, err
			}
		case "--timeout":
			v, err := next()
			if err != nil {
				return o, err
			}
			if o.timeout, err = time.ParseDuration(v); err != nil || o.timeout < time.Millisecond {
				return o, fmt.Errorf("--timeout %q is not a duration such as 90s or 5m", v)
			}
		case "--":
			if len(args) == 0 || args[0] == "" {
				return o, errors.New("there is no command after --")
			}
			o.argv = args
			return o, nil
		default:
			return o, fmt.Errorf("%q is not an option; the command comes after --", name)
		}
	}
	return o, errors.New("there is no command; it comes after --")
}
