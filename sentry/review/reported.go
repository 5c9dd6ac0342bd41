package review

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// Reported are the integration files that run only on an explicit command of the developer, or that Git, agents and
// builds read as instructions. They stay shared, because builds, tests and refactorings change them all day. Syntax as in
// [route.NewHeld].
var Reported = []string{
	"Makefile", "makefile", "GNUmakefile", "*.mk", "justfile", "Justfile", ".justfile", "Taskfile*", "Rakefile",
	"package.json", "*.config.js", "*.config.cjs", "*.config.mjs", "*.config.ts", ".npmrc", ".yarnrc*", ".pnpmfile.cjs", "pnpmfile.js",
	"bunfig.toml", "pyproject.toml", "setup.py", "setup.cfg", "conftest.py", "tox.ini", "noxfile.py", "build.rs", ".cargo/config.toml",
	".cargo/config", "rust-toolchain", "rust-toolchain.toml", "go.mod", "go.work", "gradlew", "gradlew.bat", "*.gradle", "*.gradle.kts",
	"gradle/wrapper/*", "mvnw", "mvnw.cmd", "pom.xml", ".mvn/*", ".mvn/wrapper/*", "CMakeLists.txt", "CMakePresets.json",
	"CMakeUserPresets.json", "*.cmake", "Dockerfile*", "Containerfile*", "docker-compose*", "compose.yml", "compose.yaml",
	".github/workflows/*", ".github/actions/*/*", ".gitlab-ci.yml", ".circleci/*", "Jenkinsfile", "CLAUDE.md", "AGENTS.md", "GEMINI.md",
	".cursorrules", ".gitmodules", ".gitattributes", ".gitignore",
}

const (
	maxBaselineNames = 1 << 18  // names of the work tree that are looked at
	maxBaseline      = 20000    // files
	maxDigest        = 1 << 20  // bytes; larger files are known by size and times
	maxDigests       = 64 << 20 // bytes in all; beyond, files are known by size and times
)

// Fact is what is remembered of one file. ctime cannot be set by the sandbox.
type Fact struct {
	Path         []byte // bytes of the sandbox
	Mode         uint32
	Size         int64
	Mtime, Ctime int64  // nanoseconds
	Sum          string // of the content, or "link:" and a target; "" if it was not read
}

// Baseline is the state of the reported files at one time.
type Baseline struct {
	Files   []Fact
	Partial []string `json:",omitempty"`
}

// Change is one reported file that differs from the baseline.
type Change struct {
	Path string // bytes of the sandbox
	What string
}

// Baseline records the reported files of the work tree. Directories that the consented rules hide are not entered: the
// sandbox cannot write there on the host.
func (t *Tree) Baseline() *Baseline {
	b := &Baseline{}
	patterns, err := route.NewHeld(Reported, nil)
	if err != nil {
		panic(err) // our own list
	}
	w := &baselineWalk{b: b, patterns: patterns, held: t.held}
	var view *sentry.ViewDir
	if t.view != nil {
		view = t.view.Root()
	}
	root, err := openDir(t.host, ".")
	if err != nil {
		b.Partial = append(b.Partial, err.Error())
		return b
	}
	defer root.Close()
	w.dir(root, "", view, 0)
	return b
}

type baselineWalk struct {
	b        *Baseline
	patterns *route.Held
	held     *route.Held
	names    int
	read     int64
	full     bool
}

func (w *baselineWalk) skip(rel string, why any) {
	if len(w.b.Partial) < 20 {
		w.b.Partial = append(w.b.Partial, fmt.Sprintf("%s: %v", Show(rel), why))
	}
}

func (w *baselineWalk) dir(d *os.File, rel string, view *sentry.ViewDir, depth int) {
	for {
		entries, err := d.ReadDir(1024) // types come with the names
		for _, e := range entries {
			if w.names++; w.names > maxBaselineNames || len(w.b.Files) >= maxBaseline {
				if !w.full {
					w.full = true
					w.skip(rel, "the work tree has too many names; the rest was not looked at")
				}
				return
			}
			w.entry(d, rel, e, view, depth)
		}
		if err == io.EOF {
			return
		}
		if err != nil {
			w.skip(rel, err)
			return
		}
	}
}

func (w *baselineWalk) entry(d *os.File, rel string, e fs.DirEntry, view *sentry.ViewDir, depth int) {
	name, p := e.Name(), path.Join(rel, e.Name())
	file, dir := w.held.Match(rel, name)
	switch {
	case e.IsDir():
		if dir || name == ".git" || depth == maxDepth || hides(view, name, true) {
			return
		}
		sub, err := openDir(d, name)
		if err != nil {
			if kindAt(d, name) == folder {
				w.skip(p, err)
			}
			return
		}
		defer sub.Close()
		if view != nil {
			view = view.Child(name)
		}
		w.dir(sub, p, view, depth+1)
	case file || hides(view, name, false):
	default:
		if file, _ := w.patterns.Match(rel, name); !file {
			return
		}
		if f, ok := w.fact(d, name); ok {
			f.Path = []byte(p)
			w.b.Files = append(w.b.Files, f)
		}
	}
}

func (w *baselineWalk) fact(d *os.File, name string) (f Fact, ok bool) {
	var st unix.Stat_t
	if statAt(d, name, &st) != nil {
		return f, false
	}
	f = Fact{Mode: st.Mode, Size: st.Size, Mtime: st.Mtim.Nano(), Ctime: st.Ctim.Nano()}
	kind := st.Mode & unix.S_IFMT
	if kind == folder {
		return f, false
	}
	if kind == regular {
		if st.Size > maxDigest || w.read+st.Size > maxDigests {
			return f, true
		}
		w.read += st.Size
	}
	f.Sum, _ = contentOf(d, name)
	return f, true
}

// Changes lists what differs in now, sorted by path.
func (b *Baseline) Changes(now *Baseline) (list []Change) {
	before := make(map[string]*Fact, len(b.Files))
	for i := range b.Files {
		before[string(b.Files[i].Path)] = &b.Files[i]
	}
	for i := range now.Files {
		f := &now.Files[i]
		p := string(f.Path)
		old := before[p]
		delete(before, p)
		switch {
		case old == nil:
			list = append(list, Change{p, "added"})
		case old.Mode&unix.S_IFMT != f.Mode&unix.S_IFMT, old.Sum != "" && f.Sum != "" && old.Sum != f.Sum,
			(old.Sum == "" || f.Sum == "") && (old.Size != f.Size || old.Mtime != f.Mtime || old.Ctime != f.Ctime):
			list = append(list, Change{p, "changed"})
		case (old.Mode^f.Mode)&0o111 != 0:
			list = append(list, Change{p, "changed in mode"})
		}
	}
	for i := range b.Files {
		if p := string(b.Files[i].Path); before[p] != nil {
			list = append(list, Change{p, "removed"})
		}
	}
	slices.SortFunc(list, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return list
}
