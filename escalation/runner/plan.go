package runner

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"os"
	"time"
)

// Plan is one command, exactly as it would run. It owns its descriptors; Close releases them.
type Plan struct {
	Argv    []string
	Env     []string // "NAME=value"
	Dir     *Dir
	Program *Program
	Files   []File // code that arguments name
	ByPath  bool   // run a script of the workspace by its path
	Time    time.Duration
	Output  int64 // bytes of standard output and error together
}

// New pins a command: dir and program become the plan's, also when it fails. code says that the program takes code from
// files that its arguments name, which are pinned by content then.
func New(argv, env []string, dir *Dir, program *Program, code bool) (*Plan, error) {
	p := &Plan{Argv: argv, Env: env, Dir: dir, Program: program}
	if code {
		var err error
		if p.Files, err = pinFiles(argv, dir); err != nil {
			p.Close()
			return nil, err
		}
	}
	return p, nil
}

// Close releases the plan's descriptors. It is safe to call it more than once.
func (p *Plan) Close() {
	p.Dir.File.Close()
	p.Program.File.Close()
}

// Digest identifies everything that the developer consents to.
func (p *Plan) Digest() [32]byte {
	h := sha256.New()
	put := func(parts ...string) { // length first: no two lists have one encoding
		_ = binary.Write(h, binary.BigEndian, uint64(len(parts)))
		for _, s := range parts {
			_ = binary.Write(h, binary.BigEndian, uint64(len(s)))
			h.Write([]byte(s))
		}
	}
	put(p.Argv...)
	put(p.Env...)
	put(p.Dir.Path, p.Program.Path)
	for _, v := range []any{p.Dir.ID.Dev, p.Dir.ID.Ino, p.Program.ID, p.Program.Sum, p.ByPath, int64(p.Time), p.Output} {
		_ = binary.Write(h, binary.BigEndian, v)
	}
	for _, f := range p.Files {
		put(f.Path, string(f.Sum[:]))
	}
	return [32]byte(h.Sum(nil))
}

// verify looks at everything again, as late as possible.
func (p *Plan) verify() error {
	if err := p.Dir.verify(); err != nil {
		return err
	}
	if err := p.Program.verify(); err != nil {
		return err
	}
	for _, f := range p.Files {
		if err := f.verify(p.Dir); err != nil {
			return err
		}
	}
	return nil
}

// Env picks names from a full environment, in the order of the names.
func Env(full, names []string) []string {
	var env []string
	for _, n := range names {
		for _, kv := range full {
			if len(kv) > len(n) && kv[len(n)] == '=' && kv[:len(n)] == n {
				env = append(env, kv)
				break
			}
		}
	}
	return env
}

// Stdio are a command's standard descriptors. Run owns them.
type Stdio struct{ In, Out, Err *os.File }

func (s Stdio) close() error { return errors.Join(s.In.Close(), s.Out.Close(), s.Err.Close()) }

// Exit is how a command ended.
type Exit struct {
	Status int // exit status; -1 if Signal is set
	Signal int // signal that ended it; 0 for none
	Left   int // processes that could not be killed
}
