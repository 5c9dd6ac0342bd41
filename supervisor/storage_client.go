package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/image"
)

// storagePlan is the plan of a command that is about no Domain.
func storagePlan() (Plan, error) {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return Plan{}, err
	}
	ids := nsenter.PlanIDs(uint32(os.Getuid()), uint32(os.Getgid()), userName(), nsenter.ReadSubordinate())
	return Plan{Dirs: dirs, IDs: ids, UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}, nil
}

func imagePlan() (Plan, error) {
	p, err := storagePlan()
	if err == nil && p.IDs.Kind == nsenter.MapSingle {
		err = refusal("images: an image has files of many owners, and only your own id is mapped ("+p.IDs.Why+")", "get subordinate ids, see 'lazaret doctor'")
	}
	return p, err
}

// PullOptions are those of lazaret image pull.
type PullOptions struct {
	Own      bool         // import a layout or archive without Podman
	Progress func(string) // a line at a time
}

// PullImage fetches an image, or fetches it anew, and records what reference means from now on.
func PullImage(ctx context.Context, reference string, opt PullOptions) (r PulledImage, err error) {
	p, err := imagePlan()
	if err != nil {
		return r, err
	}
	if reference, err = localReference(reference); err != nil {
		return r, err
	}
	if reference == hostImage {
		return r, refusal("pull image \"host\": that name means the host's own /usr, which needs no pull", "write the full name of an image, with its registry")
	}
	req := storageRequest{Op: "image pull", Plan: p, Image: reference, Own: opt.Own}
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); slices.Contains(pullEnviron, name) {
			req.Environ = append(req.Environ, kv)
		}
	}
	err = callStorage(ctx, req, &r, opt.Progress)
	return r, err
}

// localReference makes the path of a local reference absolute, so that a profile can name it too.
func localReference(reference string) (string, error) {
	for _, t := range []string{"oci:", "oci-archive:", "docker-archive:", "dir:"} {
		rest, ok := strings.CutPrefix(reference, t)
		if !ok {
			continue
		}
		path, tag, tagged := strings.Cut(rest, ":")
		abs, err := filepath.Abs(path)
		if err != nil {
			return "", err
		}
		if reference = t + abs; tagged {
			reference += ":" + tag
		}
	}
	if _, err := image.ParseReference(reference); err != nil {
		return "", refusal(err.Error(), "for example: docker.io/library/node:22, oci:DIR, oci-archive:FILE, docker-archive:FILE, dir:DIR")
	}
	return reference, nil
}

// ListImages lists the recorded images.
func ListImages(ctx context.Context) (out []image.Listed, err error) {
	p, err := imagePlan()
	if err != nil {
		return nil, err
	}
	return out, callStorage(ctx, storageRequest{Op: "image ls", Plan: p}, &out, nil)
}

// RemoveImage forgets a reference, and removes its image unless another one means it.
func RemoveImage(ctx context.Context, reference string) error {
	p, err := imagePlan()
	if err != nil {
		return err
	}
	if reference, err = localReference(reference); err != nil {
		return err
	}
	return callStorage(ctx, storageRequest{Op: "image rm", Plan: p, Image: reference}, nil, nil)
}

// AnchorOptions name a Domain, which need not run.
type AnchorOptions struct {
	Profile   string
	Workspace string // a directory; empty: the work tree around the current directory
}

func (o AnchorOptions) plan() (Plan, error) {
	return MakePlan(EnterOptions{Profile: o.Profile, Workspace: o.Workspace})
}

// ListAnchors lists the State Anchors of a Domain.
func ListAnchors(ctx context.Context, o AnchorOptions) (out []AnchorInfo, err error) {
	p, err := o.plan()
	if err != nil {
		return nil, err
	}
	return out, callStorage(ctx, storageRequest{Op: "anchor ls", Plan: p}, &out, nil)
}

// DiffAnchor lists what the agent added, changed and removed over the profile's present base, at most limit.
func DiffAnchor(ctx context.Context, o AnchorOptions, path string, limit int) (r anchor.Report, err error) {
	p, err := o.plan()
	if err != nil {
		return r, err
	}
	return r, callStorage(ctx, storageRequest{Op: "anchor diff", Plan: p, Path: path, Limit: limit}, &r, nil)
}

// ChangeAnchor does "keep", "reset", "snapshot", "restore" or "drop" with a State Anchor that no sandbox uses.
func ChangeAnchor(ctx context.Context, o AnchorOptions, op, path, snapshot string, keep bool) error {
	p, err := o.plan()
	if err != nil {
		return err
	}
	return callStorage(ctx, storageRequest{Op: "anchor " + op, Plan: p, Path: path, Name: snapshot, Keep: keep}, nil, nil)
}

// CollectGarbage removes what interrupted runs and updates left behind, and what opt names.
func CollectGarbage(ctx context.Context, opt GCOptions) (r GCReport, err error) {
	p, err := storagePlan()
	if err != nil {
		return r, err
	}
	if opt.InUse, err = profileImages(p.Dirs); err != nil && opt.Images {
		return r, fmt.Errorf("find the images that profiles name: %w", err)
	}
	for i, name := range opt.State {
		if strings.ContainsRune(name, '/') {
			if opt.State[i], err = canonicalPrefix(absolute(mustGetwd(), name)); err != nil {
				return r, err
			}
		}
	}
	if !opt.DryRun {
		removeStages(p.Dirs)
	}
	return r, callStorage(ctx, storageRequest{Op: "gc", Plan: p, GC: opt}, &r, nil)
}

func mustGetwd() string {
	dir, err := os.Getwd()
	if err != nil {
		return "/"
	}
	return dir
}

// profileImages lists the references that the developer's profiles name.
func profileImages(dirs Dirs) (out []string, err error) {
	names := []string{DefaultProfile}
	files, _ := filepath.Glob(filepath.Join(dirs.Config, "profiles", "*.toml"))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".toml"))
	}
	for _, name := range names {
		p, lerr := LoadProfile(dirs, name)
		if lerr != nil {
			err = errors.Join(err, lerr)
			continue
		}
		out = append(out, p.Image)
	}
	return out, err
}
