package supervisor

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/nsenter"
)

// requestsCall is what a client asks a coordinator about open Host Escalations.
type requestsCall struct {
	Op     string // "list", "show", "answer"
	ID     string
	Answer prompt.Answer
}

// serveRequests answers one requestsCall.
func (c *coordinator) serveRequests(conn *nsenter.Conn, call requestsCall) {
	<-c.started
	if c.startup != nil {
		_ = conn.Send(event{Failed: asFailure(c.startup)})
		return
	}
	switch call.Op {
	case "list":
		list := []PendingRequest{}
		for _, p := range c.desk.server.Pending() {
			list = append(list, shorten(PendingRequest{Pending: p, Domain: c.plan.DomainID}))
		}
		sendList(conn, list)
	case "show":
		list := []PendingRequest{}
		for _, p := range c.desk.server.Pending() {
			if p.Request.ID == call.ID {
				list = append(list, PendingRequest{Pending: p, Domain: c.plan.DomainID})
			}
		}
		sendList(conn, list)
	case "answer":
		err := c.desk.server.Answer(call.ID, call.Answer)
		if errors.Is(err, escalation.ErrNotPending) {
			err = hint(err, "it was answered, has ended, or is not what you saw; see: lazaret requests")
		}
		_ = conn.Send(event{Requests: err == nil, Failed: asFailure(err)})
	default:
		_ = conn.Send(event{Failed: &Failure{What: fmt.Sprintf("this coordinator has no operation %q on requests", call.Op)}})
	}
}

func sendList(conn *nsenter.Conn, list []PendingRequest) {
	f, err := pack(list)
	if err != nil {
		_ = conn.Send(event{Failed: asFailure(err)})
		return
	}
	_ = conn.Send(event{Requests: true}, f)
	f.Close()
}

// listedBytes bounds the arguments of one request in a list: there may be a thousand of 256 KiB.
const listedBytes = 1000

// shorten makes r fit for a list.
func shorten(r PendingRequest) PendingRequest {
	left := listedBytes
	for i, a := range r.Request.Argv {
		if left -= len(a); left < 0 {
			r.Request.Argv = append(slices.Clone(r.Request.Argv[:i]), a[:len(a)+left])
			r.Short = true
			break
		}
	}
	r.Request.Remember = ""
	return r
}

// PendingRequest is an open Host Escalation of a running Domain of the developer.
type PendingRequest struct {
	escalation.Pending
	Domain string // ID
	Short  bool   // not all of the arguments are in it
}

// Waits reports whether the request can be answered.
func (r PendingRequest) Waits() bool { return r.Phase == "queued" || r.Phase == "prompted" }

// PendingRequests lists the open requests of all running Domains of the developer.
func PendingRequests() ([]PendingRequest, error) {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return nil, err
	}
	domains, err := os.ReadDir(dirs.Runtime)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var out []PendingRequest
	for _, e := range domains {
		var list []PendingRequest
		if err := callRequests(dirs, e.Name(), requestsCall{Op: "list"}, &list); err != nil {
			if errors.Is(err, errGone) {
				continue // it is ending
			}
			return nil, err
		}
		out = append(out, list...)
	}
	return out, nil
}

// FindRequest finds the one open request whose ID begins with id and that can be answered, in full length.
func FindRequest(id string) (PendingRequest, error) {
	all, err := PendingRequests()
	if err != nil {
		return PendingRequest{}, err
	}
	var found []PendingRequest
	for _, r := range all {
		if id != "" && strings.HasPrefix(r.Request.ID, id) && r.Waits() {
			found = append(found, r)
		}
	}
	const list = "lazaret requests lists those that wait"
	switch len(found) {
	case 0:
		return PendingRequest{}, refusal(fmt.Sprintf("request %q: none with this ID waits for an answer", id), list)
	case 1:
		return showRequest(found[0])
	}
	return PendingRequest{}, refusal(fmt.Sprintf("request %q: there are %d whose ID begins so", id, len(found)), list)
}

func showRequest(r PendingRequest) (PendingRequest, error) {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return r, err
	}
	var list []PendingRequest
	err = callRequests(dirs, r.Domain, requestsCall{Op: "show", ID: r.Request.ID}, &list)
	if err == nil && len(list) != 1 || errors.Is(err, errGone) {
		return r, refusal(fmt.Sprintf("request %s: it has ended", r.Request.ID), "lazaret requests lists those that wait")
	}
	if err != nil {
		return r, err
	}
	return list[0], nil
}

// AnswerRequest answers a request. An approval holds only for what a.Digest identifies.
func AnswerRequest(r PendingRequest, a prompt.Answer) error {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return err
	}
	err = callRequests(dirs, r.Domain, requestsCall{Op: "answer", ID: r.Request.ID, Answer: a}, nil)
	if errors.Is(err, errGone) {
		return refusal("answer the request: its Domain has ended", "lazaret requests lists those that wait")
	}
	return err
}

// callRequests asks the coordinator of a Domain; errGone when there is none. A list goes to out.
func callRequests(dirs Dirs, domain string, call requestsCall, out any) error {
	path := filepath.Join(dirs.Runtime, domain)
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return errGone
	}
	dir, err := PrivateDir(path)
	if err != nil {
		return err
	}
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: socketPath(dir)})
	dir.Close()
	if err != nil {
		return errGone // remains of one that was killed
	}
	conn := nsenter.FromUnix(uc)
	defer conn.Close()
	if err := conn.Send(request{Proto: protocolVersion, Op: "requests", Requests: &call}); err != nil {
		return fmt.Errorf("ask the coordinator: %w", err)
	}
	var ev event
	files, err := conn.Recv(&ev)
	switch {
	case err != nil:
		return errGone
	case ev.Failed != nil:
		nsenter.CloseAll(files)
		return ev.Failed
	case out != nil:
		return unpack(files, out)
	}
	nsenter.CloseAll(files)
	return nil
}

// RulesReport is what the rules of a profile say about one command.
type RulesReport struct {
	Action   rules.Action `json:"action"` // "auto", "ask" or "deny"
	Program  string       `json:"program"`
	Why      []string     `json:"why"`
	Warnings []string     `json:"warnings,omitempty"`
}

// TestRules tells what would happen to a command that the sandbox of a Domain asks for, and why. Nothing runs.
func TestRules(opt NetworkOptions, argv []string) (RulesReport, error) {
	profile := opt.Profile
	if profile == "" {
		profile = DefaultProfile
	}
	plan, err := MakePlan(EnterOptions{Profile: profile, Workspace: opt.Workspace})
	if err != nil {
		return RulesReport{}, err
	}
	res := resolverOf(plan)
	set, warnings, err := plan.Profile.Escalation.compile(res)
	if err != nil {
		return RulesReport{}, err
	}
	prog, err := res.Resolve(argv[0], plan.Workspace.Cwd)
	if err != nil {
		return RulesReport{}, hint(err, "it is looked for on your PATH, in directories that the sandbox cannot write")
	}
	cmd := rules.Command{Argv: argv, Program: prog}
	return RulesReport{Action: set.Decide(cmd).Action, Program: prog.Path, Why: set.Explain(cmd), Warnings: warnings}, nil
}
