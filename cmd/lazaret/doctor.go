package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"lazaret.dev/lazaret/supervisor"
)

func doctorCommand(status *int, out *os.File) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check what a start needs on this machine, by trying it",
		Long:  "Check each prerequisite of lazaret enter and print ok, or what to type. The exit status is 1 if one is missing.",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			checks := supervisor.Doctor()
			for _, c := range checks {
				if c.Verdict == supervisor.Bad {
					*status = 1
				}
			}
			if asJSON {
				e := json.NewEncoder(out)
				e.SetIndent("", "  ")
				return e.Encode(checks)
			}
			printChecks(out, checks)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func printChecks(w io.Writer, checks []supervisor.Check) {
	for _, c := range checks {
		fmt.Fprintf(w, "%-5s %-20s %s\n", c.Verdict, c.Name, c.Found)
		if c.Fix != "" {
			fmt.Fprintf(w, "%-5s %-20s -> %s\n", "", "", c.Fix)
		}
	}
}
