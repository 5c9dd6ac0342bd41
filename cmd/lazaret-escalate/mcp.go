package main

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/escalation/wire"
)

// maxReply bounds how much of each output stream a tool result holds, in bytes; the command itself is not stopped by it.
const maxReply = 128 << 10

type toolInput struct {
	Command []string `json:"command" jsonschema:"program and its arguments, one element each; no shell is involved"`
	Reason  string   `json:"reason" jsonschema:"why this has to run on the host, in one honest sentence for the developer"`
	Timeout int      `json:"timeout_seconds,omitempty" jsonschema:"how long to wait for the developer's answer, in seconds"`
}

type toolOutput struct {
	Outcome   string `json:"outcome" jsonschema:"completed, denied, timed-out, cancelled or failed"`
	Detail    string `json:"detail,omitempty"`
	Status    int    `json:"exit_status" jsonschema:"the command's exit status, or as documented for lazaret-escalate"`
	Stdout    string `json:"stdout"`
	Stderr    string `json:"stderr"`
	Truncated bool   `json:"truncated,omitempty" jsonschema:"output was longer than is shown"`
}

// serveMCP serves the tool until standard input ends. Nothing else may write to standard output meanwhile.
func serveMCP(ctx context.Context) error {
	s := mcp.NewServer(&mcp.Implementation{Name: "lazaret-escalate", Version: "1"}, nil)
	addTool(s, ask)
	return s.Run(ctx, &mcp.StdioTransport{})
}

func addTool(s *mcp.Server, ask func(context.Context, client.Request) (wire.Result, error)) {
	mcp.AddTool(s, &mcp.Tool{
		Name: "run_on_host",
		Description: "Ask the developer to run one command on their machine, outside of this sandbox. They see exactly the command and " +
			"approve, edit or deny it; it may take minutes. Use it only for what cannot be done inside, such as a push with their credentials. " +
			"If it is denied, do not try again in other words.",
	}, func(ctx context.Context, _ *mcp.CallToolRequest, in toolInput) (*mcp.CallToolResult, toolOutput, error) {
		if len(in.Command) == 0 {
			return nil, toolOutput{}, fmt.Errorf("command is empty")
		}
		var out, errs capped
		res, err := ask(ctx, client.Request{Argv: in.Command, Reason: in.Reason, Wait: time.Duration(in.Timeout) * time.Second, Stdout: &out, Stderr: &errs})
		if err != nil {
			return nil, toolOutput{}, err
		}
		status, _ := verdict(res)
		o := toolOutput{Outcome: outcomeName(res.Outcome), Detail: res.Detail, Status: status, Stdout: out.String(), Stderr: errs.String(),
			Truncated: out.cut || errs.cut}
		return &mcp.CallToolResult{IsError: res.Outcome != wire.Completed || status != 0}, o, nil
	})
}

func outcomeName(o wire.Outcome) string {
	switch o {
	case wire.Completed:
		return "completed"
	case wire.Denied:
		return "denied"
	case wire.TimedOut:
		return "timed-out"
	case wire.Cancelled:
		return "cancelled"
	}
	return "failed"
}

// capped keeps the beginning of what is written to it.
type capped struct {
	bytes.Buffer
	cut bool
}

func (c *capped) Write(b []byte) (int, error) {
	keep := b[:min(len(b), maxReply-c.Len())]
	c.cut = c.cut || len(keep) < len(b)
	c.Buffer.Write(keep)
	return len(b), nil
}
