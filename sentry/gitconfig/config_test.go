package gitconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func parse(t testing.TB, src string) *File {
	t.Helper()
	f, err := Parse([]byte(src))
	must(t, err)
	return f
}

func TestSR4PrivateCopyHoldsNoSecretsOrPrograms(t *testing.T) {
	host := parse(t, `[core]
	repositoryFormatVersion = 1
	bare = false
	fsmonitor = /usr/local/bin/evil
	sshCommand = ssh -i ~/.ssh/key
	hooksPath = /home/u/hooks
	excludesFile = ~/.gitignore
	worktree = /src/app
[extensions]
	objectFormat = sha256
	partialClone = https://u:SECRET0@h/x
[credential]
	helper = store --file SECRET1
[credential "https://x"]
	username = SECRET2
[http "https://github.com/"]
	extraHeader = AUTHORIZATION: basic SECRET3
	cookieFile = /home/u/SECRET4
[http]
	proxy = http://u:SECRET5@proxy:1
	sslVerify = true
[remote "origin"]
	url = https://SECRET6@github.com/x/y
	pushurl = ssh://git:SECRET7@h/x
	fetch = +refs/heads/*:refs/remotes/origin/*
	proxy = u:SECRET15@proxy
[remote "ok"]
	url = ssh://git@h/x
	url = git@h:x
	url = /elsewhere/repo
[url "https://u:SECRET8@github.com/"]
	insteadOf = gh:
[url "https://github.com/"]
	insteadOf = https://u:SECRET9@github.com/
	insteadOf = gh2:
[branch "main"]
	remote = https://u:SECRET10@h/x
	merge = refs/heads/main
[filter "crypt"]
	clean = crypt clean
	required = true
[diff "x"]
	textconv = ./run
[gpg "ssh"]
	program = /opt/SIGN
[commit]
	gpgSign = true
[tag]
	gpgSign = false
[alias]
	st = status
	go = !curl -H 'Authorization: Bearer SECRET11'
	run = !make
[mytool]
	apiToken = SECRET12
[sendemail]
	smtpPass = SECRET13
[include]
	path = /src/app/.gitconfig.shared
	path = ~/SECRET-free
[lfs "https://u:SECRET14@h/"]
	access = basic
`)
	visible := func(p string) bool { return strings.HasPrefix(p, "/src/app") }
	s := Sanitise(host, SanitiseOptions{Visible: visible, ExcludesFile: "/etc/lazaret/excludes"})
	text := string(s.File.Bytes())
	if strings.Contains(strings.ReplaceAll(text, "SECRET0@", ""), "SECRET") && strings.Count(text, "SECRET") != 2 { // SECRET0 is verbatim, "SECRET-free" a path
		t.Errorf("secret in the copy:\n%s", text)
	}
	var notes []string
	for _, n := range s.Notes {
		if strings.Contains(n.Name, "SECRET") {
			t.Errorf("secret in a note: %q", n.Name)
		}
		notes = append(notes, fmt.Sprintf("%s: %v", n.Name, n.Reason))
	}
	want := []string{
		"core.sshcommand: left out: it names a program of the host",
		"core.hookspath: not available inside",
		"core.excludesfile: not available inside",
		"credential.helper: left out: it may hold credentials",
		"credential.https://x.username: left out: it may hold credentials",
		"http.https://github.com/.extraheader: left out: it may hold credentials",
		"http.https://github.com/.cookiefile: left out: it may hold credentials",
		"http.proxy: user or password taken out of the URL",
		"remote.origin.url: user or password taken out of the URL",
		"remote.origin.pushurl: user or password taken out of the URL",
		"remote.origin.proxy: left out: it may hold credentials",
		"remote.ok.url: not available inside",
		"url.https://github.com/.insteadof: left out: it may hold credentials",
		"url.https://github.com/.insteadof: left out: it may hold credentials",
		"branch.main.remote: user or password taken out of the URL",
		"filter.crypt.clean: works only if its program is installed inside",
		"diff.x.textconv: left out: it names a program of the host",
		"gpg.ssh.program: left out: it names a program of the host",
		"commit.gpgsign: not available inside",
		"alias.go: left out: it may hold credentials",
		"alias.run: works only if its program is installed inside",
		"mytool.apitoken: left out: it may hold credentials",
		"sendemail.smtppass: left out: it may hold credentials",
		"include.path: not available inside",
		"lfs.https://h/.access: left out: it may hold credentials",
		"core.fsmonitor: set for the sandbox",
	}
	if !slices.Equal(notes, want) {
		t.Errorf("notes:\n%s", strings.Join(notes, "\n"))
	}
	for name, value := range map[string]string{
		"core.repositoryformatversion": "1", "extensions.objectFormat": "sha256", "core.fsmonitor": "false", "core.excludesFile": "/etc/lazaret/excludes",
		"remote.origin.url": "https://github.com/x/y", "remote.origin.pushurl": "ssh://git@h/x", "http.proxy": "http://proxy:1", "commit.gpgsign": "false",
		"filter.crypt.clean": "crypt clean", "alias.st": "status", "gc.pruneExpire": "never", "core.worktree": "/src/app",
	} {
		if have := s.File.String(name); have != value {
			t.Errorf("%s = %q, want %q", name, have, value)
		}
	}
	// What no note names is as it was.
	named := map[string]bool{"core.fsmonitor": true, "gc.auto": true, "gc.pruneexpire": true}
	for _, n := range s.Notes {
		named[n.Name] = true
	}
	for _, d := range Compare(host, s.File) {
		if name, _ := redact(d.Name); !named[name] {
			t.Errorf("changed without a note: %v", d)
		}
	}
	allowed := Sanitise(host, SanitiseOptions{Allow: []string{"*.extraHeader", "credential.helper"}})
	if allowed.File.String("http.https://github.com/.extraheader") == "" || allowed.File.String("credential.helper") == "" {
		t.Error("allowed settings are missing")
	}
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"https://t@h/x":                "https://h/x",
		"HTTPS://u:p@h":                "HTTPS://h",
		"https://u:p@ss@h/x":           "https://h/x",
		"https://u:p#a?b@h/x":          "https://h/x",
		"ssh://git@h/x":                "ssh://git@h/x",
		"git+ssh://git:p@h/x":          "git+ssh://git@h/x",
		"https://h/a@b":                "https://h/a@b",
		"git@h:x":                      "git@h:x",
		"a https://t@h b ftp://u:p@h2": "a https://h b ftp://h2",
		"://":                          "://",
		"://a@":                        "://",
	} {
		if have, found := redact(in); have != want || found != (in != want) {
			t.Errorf("%q: %q, %v; want %q", in, have, found, want)
		}
	}
}

func TestSR4OnlyTrackingIsAdopted(t *testing.T) {
	hostText := "[remote \"origin\"]\n\turl = x\n[branch \"old\"]\n\tremote = origin ; mine\n\tmerge = refs/heads/old\n"
	host := parse(t, hostText)
	private := parse(t, hostText+"[branch \"new\"]\nremote=origin\nmerge=refs/heads/new\nrebase\npushRemote=.\ndescription=hi\n"+
		"[branch \"bad\"]\nremote=https://evil/\nmerge=refs/tags/x\nrebase=interactive\n[branch \"b2\"]\nmerge=\"refs/heads/x\\nevil\"\nmerge=refs/heads/y\n"+
		"[branch \"ev..il\"]\nremote=origin\n[core]\nfsmonitor=evil\n[remote \"evil\"]\nurl=y\n[branch \"b3\"]\nremote=evil\n[branch \"e]x\\\"\"]\nremote=origin\n[branch \"b4\"]\nmerge=\"refs/heads/x\\n[core]\"\n")
	var adopted []Entry
	var names []string
	for _, d := range Compare(host, private) {
		if e, err := Adoptable(d, host); err == nil {
			adopted = append(adopted, e)
			names = append(names, e.Name()+"="+e.Value)
		}
	}
	// A quote and a bracket are legal in a branch name; Edit writes them so that they stay a name.
	want := []string{"branch.e]x\".remote=origin", "branch.new.merge=refs/heads/new", "branch.new.pushremote=.", "branch.new.rebase=true", "branch.new.remote=origin"}
	if !slices.Equal(names, want) {
		t.Errorf("adopted %q, want %q", names, want)
	}
	out, err := Edit([]byte(hostText), adopted)
	must(t, err)
	if !strings.HasPrefix(string(out), hostText) {
		t.Errorf("other bytes changed: %q", out)
	}
	if have := parse(t, string(out)); have.String("branch.new.merge") != "refs/heads/new" || len(have.Entries) != len(host.Entries)+5 {
		t.Errorf("result %q", out)
	}
}

func TestSR4EditKeepsOtherBytes(t *testing.T) {
	set := func(key, value string) Entry {
		return Entry{Section: "branch", Sub: "b", HasSub: true, Key: key, Value: value}
	}
	for _, c := range []struct {
		src  string
		set  []Entry
		want string // "" for an error
	}{
		{"", []Entry{set("remote", "o")}, "[branch \"b\"]\n\tremote = o\n"},
		{"# c\n[x]", []Entry{set("remote", "o")}, "# c\n[x]\n[branch \"b\"]\n\tremote = o\n"},
		{"[branch \"b\"] remote = a # c\n  merge = m\n[y]\n", []Entry{set("remote", "o")}, "[branch \"b\"] remote = o\n  merge = m\n[y]\n"},
		{"[branch \"b\"]\r\n\tmerge = 1\r\n\tmerge = 2\r\n;\r\n", []Entry{set("merge", "3")}, "[branch \"b\"]\r\n\t\n\tmerge = 3\n;\r\n"},
		{"[x]\n\ty = a\\", []Entry{set("merge", "3")}, ""},
		{"[x]\n\ty = \"", []Entry{set("merge", "3")}, ""},
		{"[branch \"b\"]\nmerge = 1\\\n 2\nz = 1\n", []Entry{set("merge", "3"), set("remote", ".")}, "[branch \"b\"]\nmerge = 3\nz = 1\n[branch \"b\"]\n\tremote = .\n"},
		{"[branch \"b\"]\nmerge = 1\n", []Entry{set("merge", "3"), set("merge", "4")}, ""},
	} {
		have, err := Edit([]byte(c.src), c.set)
		if string(have) != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%q: %q, %v; want %q", c.src, have, err, c.want)
		}
	}
}

func TestValidRef(t *testing.T) {
	for name, want := range map[string]bool{
		"refs/heads/main": true, "refs/heads/a/b-c.d": true, "refs/heads/é": true, "main": false, "refs/heads/": false, "refs/heads/.a": false,
		"refs/heads/a.lock": false, "refs/heads/a.lock/b": false, "refs/heads/a..b": false, "refs/heads/a b": false, "refs/heads/a~b": false, "refs/heads/a\x1b[m": false,
		"refs/heads/a@{b": false, "refs//heads": false, "refs/heads/a.": false, "refs/heads/a\\b": false, "refs/heads/\u202eabc": false, "refs/heads/\xff": false, "refs/heads/\u200bx": false,
	} {
		if ValidRef(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
}

func TestDifferenceIsSafeToPrint(t *testing.T) {
	d := Compare(parse(t, "[a]\nk = 1\nk = 2\n"), parse(t, "[a \"\x1b[31m\"]\nk = \"x\\ny\"\n[a]\nk\n"))
	var out string
	for _, x := range d {
		out += x.String()
	}
	want := "+ \"a.\\x1b[31m.k\" = \"x\\ny\"\n- a.k = 1\n- a.k = 2\n+ a.k\n"
	if out != want {
		t.Errorf("%q, want %q", out, want)
	}
}

func TestBool(t *testing.T) {
	for text, want := range map[string][2]bool{
		"k": {true, true}, "k=": {false, true}, "k=YES": {true, true}, "k=off": {false, true}, "k=0": {false, true}, "k=2k": {true, true}, "k=-1": {true, true}, "k=maybe": {false, false}, "k=k": {false, false},
	} {
		v, ok := parse(t, "[a]\n"+text+"\n").Bool("A.K", false)
		if (v != want[0] && ok) || ok != want[1] {
			t.Errorf("%s: %v, %v", text, v, ok)
		}
	}
	if v, ok := parse(t, "").Bool("a.k", true); !v || !ok {
		t.Error("default")
	}
}

func TestSR13IncludesAreBounded(t *testing.T) {
	files := map[string]string{
		"/h/.gitconfig":   "[include]\npath = .gitconfig\npath = .gitconfig\npath = ~other/x\n[core]\nexcludesFile = ~other/y\n",
		"/h/c/git/config": "[broken\n",
	}
	reads := 0
	env := Env{Home: "/h", XDGConfigHome: "/h/c", System: "/denied", ReadFile: func(p string) ([]byte, error) {
		reads++
		if p == "/denied" {
			return nil, fs.ErrPermission
		}
		if src, ok := files[p]; ok {
			return []byte(src), nil
		}
		return nil, fs.ErrNotExist
	}}
	eff := Resolve(env)
	if reads > maxFiles || len(eff.Problems) == 0 || !errors.Is(eff.Problems[0], fs.ErrPermission) {
		t.Errorf("%d reads, problems %v", reads, eff.Problems[:min(3, len(eff.Problems))])
	}
	if _, err := env.Excludes(eff); err == nil {
		t.Error("another user's home")
	}
	delete(files, "/h/.gitconfig")
	if p, err := env.Excludes(Resolve(env)); p != "/h/c/git/ignore" || err != nil {
		t.Errorf("default %q, %v", p, err)
	}
}

// FuzzParse: never panics; what is accepted can be written, read and sanitised.
func FuzzParse(f *testing.F) {
	for _, p := range pieces {
		f.Add([]byte("[s \"t\"]\n" + p))
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		file, err := Parse(src)
		if err != nil {
			return
		}
		again, err := Parse(file.Bytes())
		if err != nil || !reflect.DeepEqual(list(file), list(again)) {
			t.Fatalf("%q written as %q: %v", src, file.Bytes(), err)
		}
		s := Sanitise(file, SanitiseOptions{})
		private, err := Parse(s.File.Bytes())
		if err != nil || !reflect.DeepEqual(list(s.File), list(private)) {
			t.Fatalf("sanitised %q: %v", s.File.Bytes(), err)
		}
		if v, _ := private.Last("core.fsmonitor"); v.Value != "false" {
			t.Fatal("fsmonitor")
		}
		for _, e := range private.Entries {
			if e.Section == "credential" {
				t.Fatalf("%+v", e)
			}
		}
		_, _ = Edit(src, []Entry{{Section: "branch", Sub: "b", HasSub: true, Key: "merge", Value: "refs/heads/b"}})
	})
}

func TestSR4OnlyFactsGoInside(t *testing.T) {
	src := "[user]\nname = N\nemail = e@x\nsigningKey = K\n[credential]\nhelper = h\n[safe]\ndirectory = /old\ndirectory =\ndirectory = /src/app\n[alias]\nx = !y\n[core]\nsshCommand = z\n"
	eff := Resolve(Env{Home: "/h", ReadFile: func(p string) ([]byte, error) {
		if p == "/h/.gitconfig" {
			return []byte(src), nil
		}
		return nil, fs.ErrNotExist
	}})
	want := "[core]\n\tcheckstat = minimal\n\texcludesfile = /etc/x\n\tfilesreflocktimeout = 2000\n\tpackedrefstimeout = 2000\n[reftable]\n\tlocktimeout = 2000\n[gc]\n\tauto = 0\n[maintenance]\n\tauto = false\n[protocol \"file\"]\n\tallow = always\n[user]\n\tname = N\n\temail = e@x\n[safe]\n\tdirectory = /src/app\n"
	if have := string(Inside(eff, "/etc/x").Bytes()); have != want {
		t.Errorf("have:\n%s", have)
	}
}
