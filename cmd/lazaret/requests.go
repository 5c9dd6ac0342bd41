package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/supervisor"
)

func requestsCommand(in, out *os.File) *cobra.Command {
	asJSON := false
	list := func(*cobra.Command, []string) error {
		all, err := supervisor.PendingRequests()
		if err != nil {
			return err
		}
		if asJSON {
			return printJSON(out, requestsJSON(all))
		}
		printRequests(out, all, time.Now())
		return nil
	}
	cmd := &cobra.Command{
		Use:   "requests",
		Short: "List and answer what agents ask to have run on the host",
		Long: `List and answer what the agents of all your running sandboxes ask to have run on the host. A request of a session with a
terminal is also asked there; the first answer counts.`,
		Args: cobra.NoArgs,
		RunE: list,
	}
	cmd.PersistentFlags().BoolVar(&asJSON, "json", false, "print as JSON; texts of the agent are quoted")
	cmd.AddCommand(&cobra.Command{Use: "list", Short: "List open requests", Args: cobra.NoArgs, RunE: list}, approveCommand(in, out),
		&cobra.Command{
			Use:   "deny ID",
			Short: "Deny a request; the beginning of its ID is enough",
			Args:  cobra.ExactArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				r, err := supervisor.FindRequest(args[0])
				if err != nil {
					return err
				}
				return supervisor.AnswerRequest(r, prompt.Answer{Kind: prompt.Denied})
			},
		})
	return cmd
}

func approveCommand(in, out *os.File) *cobra.Command {
	digest := ""
	cmd := &cobra.Command{
		Use:   "approve ID [--digest DIGEST]",
		Short: "Show a request on this terminal and ask; the beginning of its ID is enough",
		Long: `Show a request on this terminal, all of it, and ask. Without a terminal, --digest must name what you have seen: the agent
chooses the ID, and an edit on the session's own terminal changes what runs. lazaret requests list --json has both.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := supervisor.FindRequest(args[0])
			if err != nil {
				return err
			}
			a := prompt.Answer{Kind: prompt.Approved}
			switch n, err := hex.Decode(a.Digest[:], []byte(digest[:min(len(digest), 64)])); {
			case digest == "":
				if !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) {
					return &supervisor.Failure{What: "approve: there is no terminal to show the request on", Hint: "name what you have seen with --digest; lazaret requests list --json has it"}
				}
				if a, err = askHere(cmd.Context(), in, out, r); err != nil {
					return err
				}
			case err != nil || n != len(a.Digest) || len(digest) != 64:
				return &supervisor.Failure{What: fmt.Sprintf("approve: %q is no digest", digest), Hint: "lazaret requests list --json has it"}
			}
			if a.Kind == prompt.Unanswered {
				return &supervisor.Failure{What: "approve: the time for an answer is over"}
			}
			return supervisor.AnswerRequest(r, a)
		},
	}
	cmd.Flags().StringVar(&digest, "digest", "", "approve without asking, if this identifies what would run")
	return cmd
}

// askHere shows the same prompt as the session's own terminal would.
func askHere(ctx context.Context, in, out *os.File, r supervisor.PendingRequest) (prompt.Answer, error) {
	ctx, cancel := context.WithDeadline(ctx, r.Request.Expires)
	defer cancel()
	return prompt.Ask(ctx, prompt.Terminal{In: in, Out: out}, r.Request, func(context.Context, []string) (prompt.Request, error) {
		return prompt.Request{}, errors.New("a command can be edited on the terminal of its session only")
	})
}

// requestView is a request in JSON: what the agent chose is quoted, so that nothing of it is lost or takes effect.
type requestView struct {
	ID        string    `json:"id"`
	Digest    string    `json:"digest"`
	Phase     string    `json:"phase"`
	Profile   string    `json:"profile"`
	Domain    string    `json:"domain"`
	Session   string    `json:"session"`
	Program   string    `json:"program"`
	Argv      []string  `json:"argv"`
	Short     bool      `json:"short,omitempty"` // argv is not all of it
	Directory string    `json:"directory"`
	Env       []string  `json:"env"`
	Reason    string    `json:"reason"`
	Expires   time.Time `json:"expires"`
}

func requestsJSON(all []supervisor.PendingRequest) []requestView {
	out := []requestView{}
	for _, r := range all {
		q := r.Request
		v := requestView{ID: q.ID, Digest: hex.EncodeToString(q.Digest[:]), Phase: r.Phase, Profile: q.Profile, Domain: r.Domain, Session: q.Session,
			Program: prompt.Quote(q.Program), Directory: prompt.Quote(q.Dir), Env: q.Env, Short: r.Short, Reason: prompt.Quote(q.Reason), Expires: q.Expires}
		for _, a := range q.Argv {
			v.Argv = append(v.Argv, prompt.Quote(a))
		}
		out = append(out, v)
	}
	return out
}

func printRequests(out io.Writer, all []supervisor.PendingRequest, now time.Time) {
	if len(all) == 0 {
		fmt.Fprintln(out, "no agent asks for anything")
	}
	for i, r := range all {
		if i > 0 {
			fmt.Fprintln(out)
		}
		q := r.Request
		state := r.Phase
		if r.Waits() {
			state = fmt.Sprintf("waits for %v more", q.Expires.Sub(now).Round(time.Second))
		}
		fmt.Fprintf(out, "%s  %s\n", q.ID, state)
		fmt.Fprintf(out, "  profile    %s, session %s\n", q.Profile, q.Session)
		fmt.Fprintf(out, "  program    %s\n", prompt.Quote(q.Program))
		fmt.Fprintf(out, "  command    %s\n", shortened(r, prompt.Join(q.Argv)))
		fmt.Fprintf(out, "  in         %s\n", prompt.Quote(q.Dir))
		fmt.Fprintf(out, "  the agent says: %s\n", prompt.Quote(q.Reason))
	}
}

func shortened(r supervisor.PendingRequest, s string) string {
	if r.Short {
		return s + " … (lazaret requests approve shows all of it)"
	}
	return s
}
