package image

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"unicode"
)

// Reference is a parsed image reference of a profile.
type Reference struct {
	Transport string // "docker", "oci", "oci-archive", "docker-archive" or "dir"
	Path      string // of the local transports: absolute, clean
	Tag       string // "docker": all after docker://; else what follows the path, may be empty
}

// ParseReference parses a reference. Without a transport it means docker://. Local paths must be
// absolute: there is no working directory that a profile could mean.
func ParseReference(s string) (Reference, error) {
	bad := func(why string) (Reference, error) { return Reference{}, fmt.Errorf("image %q: %s", s, why) }
	if s == "" || len(s) > 4096 || strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }) {
		return bad("empty, too long, or with spaces or control characters")
	}
	if s[0] == '-' {
		return bad("begins with '-'")
	}
	for _, t := range []string{"oci", "oci-archive", "docker-archive", "dir"} {
		rest, ok := strings.CutPrefix(s, t+":")
		if !ok {
			continue
		}
		path, tag := rest, ""
		if t != "dir" {
			path, tag, _ = strings.Cut(rest, ":")
		}
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return bad("needs an absolute, clean path after " + t + ":")
		}
		return Reference{t, path, tag}, nil
	}
	rest := strings.TrimPrefix(s, "docker://")
	if rest == "" || strings.Contains(rest, "://") || strings.HasPrefix(rest, "/") || strings.HasPrefix(rest, "-") {
		return bad("transport is not one of docker://, oci:, oci-archive:, docker-archive: and dir:")
	}
	return Reference{Transport: "docker", Tag: rest}, nil
}

// String is the form that Podman reads.
func (r Reference) String() string {
	switch {
	case r.Transport == "docker":
		return "docker://" + r.Tag
	case r.Tag == "":
		return r.Transport + ":" + r.Path
	}
	return r.Transport + ":" + r.Path + ":" + r.Tag
}

// importable tells whether Lazaret can read the reference without Podman.
func (r Reference) importable() bool { return r.Transport != "docker" && r.Transport != "dir" }

// podmanName is the grammar of a repository name, with Podman's localhost/ before it.
var podmanName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+$`) })

// podmanCanName tells whether Podman can pull the reference: it makes an image name of an oci:
// path, and refuses a path that is none, such as one with a capital.
func (r Reference) podmanCanName() bool {
	return r.Transport != "oci" || podmanName().MatchString(r.Path) && len(r.Path) < 200
}
