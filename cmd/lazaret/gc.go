package main

import (
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"lazaret.dev/lazaret/supervisor"
)

func gcCommand(status *int, out io.Writer) *cobra.Command {
	var opt supervisor.GCOptions
	asJSON := false
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Remove what interrupted runs and updates left behind",
		Long: `Remove what interrupted runs and image updates left behind, and list it. It is safe beside running sandboxes, and may be
interrupted and run again. What persists is never removed unless --state names it: by Domain ID or by workspace.`,
		Example: `  lazaret gc --dry-run                 list only
  lazaret gc --state ~/src/old         also all that persists of a workspace that is gone`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			opt.FailAt = os.Getenv("LAZARET_FAIL_AT")
			ctx, stop := interruptible()
			defer stop()
			r, err := supervisor.CollectGarbage(ctx, opt)
			if err != nil {
				return err
			}
			for _, a := range r.Actions {
				if a.Error != "" {
					*status = 1
				}
			}
			if asJSON {
				return printJSON(out, r)
			}
			return printGarbage(out, r)
		},
	}
	cmd.Flags().BoolVar(&opt.DryRun, "dry-run", false, "list, and remove nothing")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	cmd.Flags().StringArrayVar(&opt.State, "state", nil, "also remove all that persists of the Domain with this ID or `workspace`")
	cmd.Flags().BoolVar(&opt.Force, "force", false, "with --state: although the workspace exists")
	cmd.Flags().BoolVar(&opt.Images, "images", false, "also remove images that no profile names")
	return cmd
}

func printGarbage(out io.Writer, r supervisor.GCReport) error {
	if len(r.Actions) == 0 {
		_, err := fmt.Fprintln(out, "nothing to remove")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WHAT\tRESULT\tSIZE\tNAME\tWHY")
	for _, a := range r.Actions {
		result := "would go"
		switch {
		case a.Ask:
			result = "kept; " + map[string]string{"state": "--state removes it", "reference": "--images removes it"}[string(a.Kind)]
		case a.Done:
			result = "removed"
		case a.Left:
			result = "left; it is in use again"
		case a.Error != "":
			result = "failed"
		}
		name := a.ID
		if a.Workspace != "" {
			name += fmt.Sprintf(" (%q)", a.Workspace)
		}
		why := a.Reason
		if a.Error != "" {
			why = a.Error
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", a.Kind, result, supervisor.HumanSize(a.Bytes), name, why)
	}
	return w.Flush()
}
