package rules

import (
	"path/filepath"
	"regexp"
	"strings"
)

// What may never run without being asked about, by what it does with its arguments or its environment. A name is looked
// up for the requested program, for every symbolic link on the way to it and for the file itself; a version at its end
// is ignored (python3.12).
var never = func() map[string]string {
	kinds := map[string]string{
		"is a shell": "sh ash bash dash zsh fish ksh mksh oksh csh tcsh nu pwsh powershell elvish xonsh busybox toybox rbash yash",
		"is an interpreter": "python pypy ipython perl ruby irb node nodejs deno bun php lua luajit tclsh wish expect awk gawk mawk nawk " +
			"R Rscript julia guile racket sbcl clisp emacs vim vi nvim view ed ex nano java jshell groovy scala kotlin dotnet mono " +
			"osascript gdb lldb bpftrace sqlite3 psql mysql m4 bc dc erl elixir iex ghc ghci runghc ocaml swift swipl ts-node tsx raku",
		"runs another command": "env timeout nice ionice nohup setsid stdbuf time xargs find fd parallel watch strace ltrace perf script " +
			"unshare nsenter chroot chrt taskset numactl setarch linux32 linux64 flock sem entr inotifywait cpulimit prlimit choom " +
			"faketime proot fakeroot eatmydata systemd-run systemd-inhibit dbus-run-session at batch crontab start-stop-daemon " +
			"run-parts xvfb-run tmux screen zellij dtach abduco ld.so ld-linux-x86-64.so ld-linux-aarch64.so ld-musl-x86_64.so " +
			"bwrap firejail direnv mise asdf nix nix-shell nix-build guix conda pipx uvx uv npx pnpx bunx",
		"changes user or reaches another machine": "sudo doas su runuser pkexec run0 ssh scp sftp rsync mosh telnet nc ncat netcat socat",
		"is a container engine or virtual machine": "docker podman buildah nerdctl ctr crictl runc crun runsc lxc lxc-attach incus " +
			"kubectl helm oc minikube kind vagrant qemu-system-x86_64 virsh machinectl systemd-nspawn apptainer singularity distrobox toolbox",
		"is Lazaret itself":                            "lazaret lazaret-escalate lazaret-runsc",
		"runs what a repository's configuration names": "git hg svn jj gh glab tig lazygit git-lfs",
		"runs a command that an argument names": "tar bsdtar zip sed less more man sort split ctags rlwrap gpg openssl curl wget " +
			"ffmpeg ldconfig ldd xdg-open open gio systemctl launchctl",
	}
	m := map[string]string{}
	for why, names := range kinds {
		for _, n := range strings.Fields(names) {
			m[n] = why
		}
	}
	return m
}()

// Build tools: a rule may approve them, but Compile says what that means.
var workspaceCode = func() map[string]bool {
	m := map[string]bool{}
	for _, n := range strings.Fields("make gmake ninja meson cmake just task rake bundle gem npm yarn pnpm corepack cargo go gradle mvn ant " +
		"bazel buck buck2 sbt lein tox nox pytest pip poetry pdm hatch pre-commit composer mix rebar3 dune stack cabal turbo nx jest vitest tsc webpack vite") {
		m[n] = true
	}
	return m
}()

var version = regexp.MustCompile(`[-.]?[0-9][0-9.]*$`)

// forms returns the names under which a program's name is looked up.
func forms(name string) []string {
	base := strings.TrimSuffix(filepath.Base(name), ".exe")
	fs := []string{base, version.ReplaceAllString(base, "")}
	if i := strings.Index(base, ".so"); i > 0 { // ld-linux-x86-64.so.2
		fs = append(fs, base[:i+3])
	}
	return fs
}

// NeverAuto says why programs of this name never run without being asked about; "" if they may.
func NeverAuto(name string) string {
	for _, f := range forms(name) {
		if why := never[f]; why != "" {
			return why
		}
	}
	return ""
}

// TakesCode reports whether a program of this name runs code that it finds in files named by its arguments. Such files
// are pinned by content between approval and execution.
func TakesCode(name string) bool {
	why := NeverAuto(name)
	return why == "is a shell" || why == "is an interpreter" || why == "runs another command"
}
