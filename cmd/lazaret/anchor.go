package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"lazaret.dev/lazaret/supervisor"
)

// defaultAnchor is the path that commands mean without one.
const defaultAnchor = "/home/agent"

func anchorCommand(in *os.File, out, errOut io.Writer) *cobra.Command {
	var opt supervisor.AnchorOptions
	cmd := &cobra.Command{
		Use:   "anchor",
		Short: "Show and manage what persists of a sandbox besides the workspace",
		Long: `Show and manage State Anchors: what the agent wrote in the persistent paths of a profile (persist = […]), for the current
workspace. PATH is the path in the sandbox, ` + defaultAnchor + ` if it is not given. All but ls and diff need a Domain that does not run.`,
		Example: `  lazaret anchor diff                              what is in the home that was not there
  lazaret anchor snapshot /usr/local before-upgrade
  lazaret anchor restore /usr/local before-upgrade`,
	}
	cmd.PersistentFlags().StringVar(&opt.Profile, "profile", supervisor.DefaultProfile, "of this profile's Domain")
	cmd.PersistentFlags().StringVar(&opt.Workspace, "workspace", "", "of the Domain on this directory")
	cmd.AddCommand(anchorList(&opt, out), anchorDiff(&opt, out), anchorSnapshot(&opt, out),
		destructive(&opt, in, errOut, "reset PATH", "Empty a persistent path: it is as the base has it at the next start; snapshots stay", cobra.ExactArgs(1),
			func(args []string) (string, string, string) {
				return "reset", args[0], fmt.Sprintf("Remove all that the agent wrote in %s?", strconv.Quote(args[0]))
			}),
		destructive(&opt, in, errOut, "restore PATH NAME", "Put a snapshot in the place of what is there now", cobra.ExactArgs(2),
			func(args []string) (string, string, string) {
				return "restore", args[0], fmt.Sprintf("Replace what is in %s by the snapshot %s?", strconv.Quote(args[0]), strconv.Quote(args[1]))
			}),
		destructive(&opt, in, errOut, "drop PATH NAME", "Remove a snapshot", cobra.ExactArgs(2),
			func(args []string) (string, string, string) {
				return "drop", args[0], fmt.Sprintf("Remove the snapshot %s of %s?", strconv.Quote(args[1]), strconv.Quote(args[0]))
			}),
		&cobra.Command{
			Use:   "keep PATH",
			Short: "Keep what is there over the profile's present base, though it was written over another",
			Args:  cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				ctx, stop := interruptible()
				defer stop()
				return supervisor.ChangeAnchor(ctx, opt, "keep", args[0], "", false)
			},
		})
	return cmd
}

// destructive is a command that asks first, unless --yes is given.
func destructive(opt *supervisor.AnchorOptions, in *os.File, errOut io.Writer, use, short string, args cobra.PositionalArgs,
	what func([]string) (op, path, question string)) *cobra.Command {
	yes := false
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args,
		RunE: func(_ *cobra.Command, args []string) error {
			op, path, question := what(args)
			if !yes {
				if err := confirm(in, errOut, question); err != nil {
					return err
				}
			}
			ctx, stop := interruptible()
			defer stop()
			return supervisor.ChangeAnchor(ctx, *opt, op, path, strings.Join(args[1:], ""), false)
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// confirm asks on the terminal; without one, it refuses.
func confirm(in *os.File, errOut io.Writer, question string) error {
	if !term.IsTerminal(int(in.Fd())) {
		return &supervisor.Failure{What: "this cannot be undone, and there is no terminal to ask on", Hint: "add --yes if it shall be done"}
	}
	fmt.Fprintf(errOut, "%s This cannot be undone. [y/N] ", question)
	line, _ := bufio.NewReader(in).ReadString('\n')
	if a := strings.ToLower(strings.TrimSpace(line)); a != "y" && a != "yes" {
		return &supervisor.Failure{What: "nothing was done"}
	}
	return nil
}

func anchorSnapshot(opt *supervisor.AnchorOptions, out io.Writer) *cobra.Command {
	keep := false
	cmd := &cobra.Command{
		Use:   "snapshot PATH [NAME]",
		Short: "Copy what is there now under a name",
		Args:  cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			name := time.Now().UTC().Format("20060102-150405")
			if len(args) == 2 {
				name = args[1]
			}
			ctx, stop := interruptible()
			defer stop()
			if err := supervisor.ChangeAnchor(ctx, *opt, "snapshot", args[0], name, keep); err != nil {
				return err
			}
			fmt.Fprintln(out, name)
			return nil
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "then keep what is there over the profile's present base")
	return cmd
}

func anchorList(opt *supervisor.AnchorOptions, out io.Writer) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the persistent paths that hold something, with their snapshots",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := interruptible()
			defer stop()
			list, err := supervisor.ListAnchors(ctx, *opt)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(out, list)
			}
			w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "PATH\tSIZE\tSTATE\tBASE")
			for _, a := range list {
				fmt.Fprintf(w, "%q\t%s\t%s\t%s\n", a.Path, supervisor.HumanSize(a.Bytes), anchorState(a), anchorBase(a))
				for _, s := range a.Snapshots {
					fmt.Fprintf(w, "  %s\t\tsnapshot\t%s\n", s.Name, s.Meta.Base.Image)
				}
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func anchorState(a supervisor.AnchorInfo) string {
	switch {
	case a.Damaged:
		return "damaged"
	case a.InUse:
		return "in use"
	case a.Meta == nil:
		return "empty"
	case a.Another:
		return "of another base"
	}
	return "kept"
}

func anchorBase(a supervisor.AnchorInfo) string {
	if a.Meta == nil {
		return ""
	}
	return a.Meta.Base.Image
}

func anchorDiff(opt *supervisor.AnchorOptions, out io.Writer) *cobra.Command {
	asJSON, limit := false, 1000
	cmd := &cobra.Command{
		Use:   "diff [PATH]",
		Short: "List what the agent added, changed and removed over the base",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			path := defaultAnchor
			if len(args) == 1 {
				path = args[0]
			}
			ctx, stop := interruptible()
			defer stop()
			r, err := supervisor.DiffAnchor(ctx, *opt, path, limit)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(out, r)
			}
			for _, c := range r.Changes {
				fmt.Fprintf(out, "%-8s %q\n", c.Kind, c.Path) // the sandbox chose the name
			}
			if r.Truncated {
				fmt.Fprintf(out, "… and more; --limit shows more than %d\n", limit)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	cmd.Flags().IntVar(&limit, "limit", limit, "list at most so many")
	return cmd
}
