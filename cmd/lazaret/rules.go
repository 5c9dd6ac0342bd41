package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"lazaret.dev/lazaret/supervisor"
)

// Exit statuses of lazaret rules test.
const (
	exitAsk  = 1
	exitDeny = 2
)

func rulesCommand(status *int, out io.Writer) *cobra.Command {
	var opt supervisor.NetworkOptions
	asJSON := false
	cmd := &cobra.Command{Use: "rules", Short: "Test the rules for commands that the agent asks to have run on the host"}
	test := &cobra.Command{
		Use:   "test [--profile NAME] -- COMMAND [ARG…]",
		Short: "Tell whether a command would run unasked, be asked about, or be denied, and why",
		Long: `Tell whether a command that the agent asks for would run unasked (exit status 0), be asked about (1) or be denied (2), and
which rule of the profile, section [escalation], decides. Nothing runs.`,
		Example: `  lazaret rules test -- git push origin main`,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := supervisor.TestRules(opt, args)
			if err != nil {
				return err
			}
			switch r.Action {
			case "ask":
				*status = exitAsk
			case "deny":
				*status = exitDeny
			}
			if asJSON {
				return printJSON(out, r)
			}
			for _, line := range append(r.Why, prefixed("warning: ", r.Warnings)...) {
				fmt.Fprintln(out, line)
			}
			return nil
		},
	}
	test.Flags().StringVar(&opt.Profile, "profile", supervisor.DefaultProfile, "of this profile")
	test.Flags().StringVar(&opt.Workspace, "workspace", "", "on this directory")
	test.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	cmd.AddCommand(test)
	return cmd
}

func prefixed(prefix string, lines []string) (out []string) {
	for _, l := range lines {
		out = append(out, prefix+l)
	}
	return out
}
