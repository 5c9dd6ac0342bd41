package sentry

import (
	"io"
	"strconv"
	"strings"
	"time"
)

// DenialsFile lists, in Workspace.Private, what the sandbox was refused: one line each, "TIME OPERATION ERRNO "PATH"",
// where PATH is from the workspace root and quoted in ASCII. Each operation on each path is listed about once a Domain
// start. The workspace server appends to it, at most MaxDenials bytes each time it runs, and then DenialsCut.
const (
	DenialsFile = "denials.log"
	MaxDenials  = 128 << 10
	DenialsCut  = "more"
	DenialTime  = time.RFC3339
)

// Denial is one refusal. Git itself asks for a few that it can do without.
type Denial struct {
	Time  time.Time
	Op    string // as route.Op says it
	Errno string // what the sandbox was told
	Path  string // from the workspace root; bytes of the sandbox's choice
}

// ParseDenials reads a list of refusals, oldest first; cut is true if some are missing. Lines that make no sense, as the
// last one of a server that was killed, are left out.
func ParseDenials(r io.Reader) (list []Denial, cut bool, err error) {
	b, err := io.ReadAll(io.LimitReader(r, 4*MaxDenials))
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSuffix(line, "\n"); line == DenialsCut {
			cut = true
			continue
		}
		f := strings.SplitN(line, " ", 4)
		if len(f) != 4 {
			continue
		}
		at, terr := time.Parse(DenialTime, f[0])
		path, perr := strconv.Unquote(f[3])
		if terr == nil && perr == nil {
			list = append(list, Denial{Time: at, Op: f[1], Errno: f[2], Path: path})
		}
	}
	return list, cut, err
}
