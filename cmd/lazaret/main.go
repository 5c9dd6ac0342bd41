// Command lazaret runs coding agents in a rootless gVisor sandbox on the current workspace.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"go.podman.io/storage/pkg/reexec"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/supervisor"
)

// exitFailed is the exit status when Lazaret itself failed; those of the session's process are passed through.
const exitFailed = 125

func main() {
	if reexec.Init() {
		return // this process was the storage library's, to unpack a layer
	}
	nsenter.Main(map[string]func(nsenter.Self) int{
		"coordinator": supervisor.CoordinatorMain,
		"domain":      supervisor.DomainMain,
		"probe":       supervisor.ProbeMain,
		"storage":     supervisor.StorageMain,
	}, map[string]func() int{
		"runner":  escalation.RunnerMain,
		"sidecar": routes.SidecarMain,
		"uplink":  routes.UplinkMain,
	})
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, in, out, errOut *os.File) int {
	status := 0
	root := &cobra.Command{
		Use:           "lazaret",
		Short:         "Run coding agents in a rootless gVisor sandbox on the current workspace",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       nsenter.Version,
	}
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errOut)
	root.AddCommand(enterCommand(&status, in, out, errOut), doctorCommand(&status, out), networkCommand(&status, out),
		workspaceCommand(in, out, errOut), imageCommand(out, errOut), anchorCommand(in, out, errOut), gcCommand(&status, out),
		requestsCommand(in, out), rulesCommand(&status, out))
	if err := root.Execute(); err != nil {
		printError(errOut, err)
		if status == 0 {
			status = exitFailed
		}
	}
	return status
}

func enterCommand(status *int, in, out, errOut *os.File) *cobra.Command {
	var opt supervisor.EnterOptions
	cmd := &cobra.Command{
		Use:   "enter [PROFILE] [--workspace DIR] [-- COMMAND [ARG…]]",
		Short: "Start or join the sandbox of a profile for the current workspace",
		Long: `Start the sandbox of a profile for the current workspace, or join it when it runs, and run the profile's command in it,
or COMMAND. The workspace is the Git work tree around the current directory, else that directory.

The exit status is that of the command, 128+n if signal n ended it, or 125 if Lazaret failed.`,
		Example: `  lazaret enter                      a shell in the built-in default profile
  lazaret enter -- git status        one command
  lazaret enter --workspace ~/src/x -- make test`,
		Args: func(cmd *cobra.Command, args []string) error {
			if n := cmd.ArgsLenAtDash(); n > 1 || n < 0 && len(args) > 1 {
				return &supervisor.Failure{What: fmt.Sprintf("enter: %q is one word too many", args[1]), Hint: "a command goes after --: lazaret enter PROFILE -- COMMAND"}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			opt.Profile = supervisor.DefaultProfile
			n := cmd.ArgsLenAtDash()
			if n < 0 {
				n = len(args)
			}
			if n == 1 {
				opt.Profile = args[0]
			}
			opt.Argv = args[n:]
			opt.FailAt = os.Getenv("LAZARET_FAIL_AT")
			warn := func(format string, args ...any) { fmt.Fprintf(errOut, "lazaret: warning: "+format+"\n", args...) }
			note := func(format string, args ...any) { fmt.Fprintf(errOut, "lazaret: "+format+"\n", args...) }
			*status, err = supervisor.Enter(context.Background(), opt, supervisor.Terminal{In: in, Out: out, Err: errOut, Warn: warn, Note: note})
			return err
		},
	}
	cmd.Flags().StringVar(&opt.Workspace, "workspace", "", "use this directory as the workspace, as it is")
	return cmd
}

// printError prints what happened, and on a second line what to do.
func printError(w io.Writer, err error) {
	fmt.Fprintf(w, "lazaret: error: %v\n", err)
	var f *supervisor.Failure
	if errors.As(err, &f) && f.Hint != "" {
		fmt.Fprintf(w, "lazaret: hint: %s\n", f.Hint)
	}
}
