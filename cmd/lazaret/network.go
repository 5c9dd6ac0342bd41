package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lazaret.dev/lazaret/supervisor"
)

func networkCommand(status *int, out io.Writer) *cobra.Command {
	var opt supervisor.NetworkOptions
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Show, test and change which destinations the sandbox may reach",
		Long: `Show, test and change which destinations the sandbox of a profile may reach on the current workspace.

Of all rules the longest prefix decides. Lasting rules are written into the profile, section [network]; docs/network.md
has the built-in ones. Changes made here take effect at once, cut connections that are now forbidden, and end with the
running Domain.`,
		Example: `  lazaret network test 10.20.0.7                    which rule decides, and why
  lazaret network allow 10.20.0.0/16 --for 30m      open a network for half an hour
  lazaret network reset                             back to the profile`,
	}
	cmd.PersistentFlags().StringVar(&opt.Profile, "profile", supervisor.DefaultProfile, "of this profile's Domain")
	cmd.PersistentFlags().StringVar(&opt.Workspace, "workspace", "", "of the Domain on this directory")
	cmd.AddCommand(networkShow(&opt, out), networkTest(&opt, status, out),
		networkLive(&opt, out, "allow", "Let the running sandbox reach a prefix"),
		networkLive(&opt, out, "deny", "Keep the running sandbox from a prefix, and cut its connections there"),
		&cobra.Command{
			Use:   "reset [PREFIX]",
			Short: "Take back live changes: that of PREFIX, or all",
			Args:  cobra.MaximumNArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				r, err := supervisor.ChangeNetwork(opt, "reset", strings.Join(args, ""), 0)
				return printLive(out, r, err)
			},
		},
		&cobra.Command{
			Use:   "reload",
			Short: "Read the section [network] of the profile again and put it in force; live changes stay",
			Args:  cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				r, err := supervisor.ChangeNetwork(opt, "reload", "", 0)
				return printLive(out, r, err)
			},
		})
	return cmd
}

func networkShow(opt *supervisor.NetworkOptions, out io.Writer) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "show",
		Short: "List the rules in force, or those that a start would put in force now",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			r, err := supervisor.ShowNetwork(*opt)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(out, r)
			}
			printNetwork(out, r)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func networkTest(opt *supervisor.NetworkOptions, status *int, out io.Writer) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "test DEST",
		Short: "Tell whether an address, or a name's addresses, may be reached, and which rule decides",
		Long:  "Tell whether DEST may be reached, and which rule decides. Nothing is sent to it. The exit status is 1 if any of its addresses is denied.",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := supervisor.TestNetwork(cmd.Context(), *opt, args[0])
			if err != nil {
				return err
			}
			for _, d := range r.Decisions {
				if !d.Allowed {
					*status = 1
				}
			}
			if asJSON {
				return printJSON(out, r)
			}
			for _, d := range r.Decisions {
				fmt.Fprintf(out, "%s: %s, by %s: %s\n", d.Addr, d.Rule.Verdict, d.Rule.Prefix, d.Rule.Why)
				for _, o := range d.Overridden {
					fmt.Fprintf(out, "  more specific than %s %s (%s)\n", o.Verdict, o.Prefix, o.Why)
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func networkLive(opt *supervisor.NetworkOptions, out io.Writer, op, short string) *cobra.Command {
	var d time.Duration
	cmd := &cobra.Command{
		Use:   op + " PREFIX [--for DURATION]",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if d < 0 {
				return &supervisor.Failure{What: fmt.Sprintf("--for %v is in the past", d), Hint: "write for example --for 30m"}
			}
			r, err := supervisor.ChangeNetwork(*opt, op, args[0], d)
			return printLive(out, r, err)
		},
	}
	cmd.Flags().DurationVar(&d, "for", 0, "end the rule after this time, such as 30m; without it, with the Domain")
	return cmd
}

func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// printLive prints what differs from the profile.
func printLive(out io.Writer, r supervisor.NetworkReport, err error) error {
	if err != nil {
		return err
	}
	live := 0
	for _, rule := range r.Rules {
		if rule.Layer == "live" {
			fmt.Fprintf(out, "%-5s  %s  (%s)\n", rule.Verdict, rule.Prefix, rule.Why)
			live++
		}
	}
	if live == 0 {
		fmt.Fprintf(out, "the profile %q decides; there are no live changes\n", r.Profile)
	}
	return nil
}

func printNetwork(out io.Writer, r supervisor.NetworkReport) {
	state := "not running; this would be in force now"
	if r.Running {
		state = fmt.Sprintf("running, sidecar %s, uplink pid %d", r.Sidecar, r.UplinkPID)
	}
	fmt.Fprintf(out, "profile %q on %s: %s\n", r.Profile, r.Workspace, state)
	if r.Broken != "" {
		fmt.Fprintf(out, "the %s is being replaced; nothing passes meanwhile\n", r.Broken)
	}
	if r.Proxy != "" {
		fmt.Fprintf(out, "proxy for TCP: %s\n", r.Proxy)
	}
	resolvers := "none"
	for i, a := range r.Resolvers {
		if i == 0 {
			resolvers = a.String()
		} else {
			resolvers += ", " + a.String()
		}
	}
	fmt.Fprintf(out, "resolvers: %s\n", resolvers)
	if !r.IPv6 {
		fmt.Fprintln(out, "IPv6: off")
	}
	width := 0
	for _, rule := range r.Rules {
		width = max(width, len(rule.Prefix.String()))
	}
	for _, rule := range r.Rules {
		fmt.Fprintf(out, "%-5s  %-*s  %-8s  %s\n", rule.Verdict, width, rule.Prefix, rule.Layer, rule.Why)
	}
}
