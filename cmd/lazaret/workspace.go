package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"lazaret.dev/lazaret/supervisor"
)

func workspaceCommand(in, out, errOut *os.File) *cobra.Command {
	opt := supervisor.WorkspaceOptions{Out: out}
	if term.IsTerminal(int(in.Fd())) {
		opt.Ask = func(question string) (bool, error) { return ask(in, errOut, question) }
	}
	cmd := &cobra.Command{
		Use:   "workspace",
		Short: "See and decide what the sandbox has changed beside your files",
		Long: `What the sandbox changes in ordinary files of the workspace is on the host at once. Changes of files that host programs
act on without being asked are held in a private copy, and so are repository configuration, hooks and paths that Git
ignores. These commands show them, and copy to the host or discard what you choose. docs/workspace.md explains it.`,
		Args: cobra.NoArgs,
	}
	cmd.PersistentFlags().StringVar(&opt.Profile, "profile", supervisor.DefaultProfile, "the profile whose sandbox it is")
	cmd.PersistentFlags().StringVar(&opt.Workspace, "workspace", "", "use this directory as the workspace, as it is")
	sub := func(use, short, long string, args cobra.PositionalArgs, run func(supervisor.WorkspaceOptions) error) *cobra.Command {
		c := &cobra.Command{Use: use, Short: short, Long: long, Args: args, RunE: func(_ *cobra.Command, args []string) error {
			opt.Paths = args
			return run(opt)
		}}
		cmd.AddCommand(c)
		return c
	}
	yes := func(c *cobra.Command) {
		c.Flags().BoolVar(&opt.Yes, "yes", false, "do not ask")
	}
	status := sub("status", "List what is held, private or remarkable",
		"List held changes of integration files, integration files that changed on the host, configuration, hooks and repositories that\nexist inside only, and what is remarkable about the workspace's repositories.",
		cobra.NoArgs, supervisor.WorkspaceStatus)
	status.Flags().BoolVar(&opt.JSON, "json", false, "print as JSON, in ASCII")
	sub("review [PATH…]", "Show the difference between the host's files and the private copies",
		"Show the difference between the host's files and the private copies, of all or of those at or below PATH.", cobra.ArbitraryArgs, supervisor.WorkspaceReview)
	apply := sub("apply PATH…", "Copy held changes to the host",
		`Show the changes at or below PATH, ask, and copy them to the host. Of a repository's configuration only the tracking of
branches is taken over. With --yes nothing is shown: what you reviewed before is applied, if neither side has changed since.`,
		cobra.MinimumNArgs(1), supervisor.WorkspaceApply)
	apply.Flags().BoolVar(&opt.Force, "force", false, "with --yes: apply what is there now, reviewed or not")
	yes(apply)
	yes(sub("drop PATH…", "Discard private copies", "Discard the private copies at or below PATH; the sandbox sees the host's files again.", cobra.MinimumNArgs(1), supervisor.WorkspaceDrop))
	yes(sub("rescan", "Let the sandbox follow ignore rules and tracked paths as they are now",
		`Show which paths of the host the sandbox would see if it followed the ignore rules and tracked paths as they are now, and
ask. Until then a path that was ignored when you last consented stays hidden, whatever the rules say.`, cobra.NoArgs, supervisor.WorkspaceRescan))
	return cmd
}

// ask asks a question on the terminal; everything but y or yes is no.
func ask(in io.Reader, out io.Writer, question string) (bool, error) {
	fmt.Fprintf(out, "%s [y/N] ", question)
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes", nil
}
