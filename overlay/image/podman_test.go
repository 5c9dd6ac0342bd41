package image

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"lazaret.dev/lazaret/overlay/nstest"
)

// podmanCommand runs Podman on the store, as a developer who names it would.
func podmanCommand(s *Store, args ...string) *exec.Cmd {
	cmd := exec.Command("podman", append([]string{"--root", s.cfg.graph(), "--runroot", s.cfg.runroot(), "--tmpdir", s.cfg.tmpdir(),
		"--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none"}, args...)...)
	cmd.Env = podmanEnviron(s.cfg, os.Environ())
	return cmd
}

// TestPodmanBeside: Podman reads what we import, respects our pins, and works at the same time.
func TestPodmanBeside(t *testing.T) {
	_, err := exec.LookPath("podman")
	nstest.Needs(t, "podman", err)
	s, dir := newStore(t), lowerDir(t)
	img := hostile(t)
	img.WriteOCI(t, dir+"/a", "")
	other := img
	other.Layers = [][]byte{img.Layers[0], nstest.Layer(t, nstest.File{Name: "other"})}
	other.WriteOCI(t, dir+"/b", "")
	_, _, err = s.Pull(bg, "oci:"+dir+"/a", PullOptions{Own: true})
	must(t, err)
	if out, err := podmanCommand(s, "image", "inspect", img.ID()).CombinedOutput(); err != nil {
		t.Fatalf("podman does not read our import: %v %s", err, out)
	}
	pin, err := s.Pin(img.ID(), "domain-1")
	must(t, err)
	for _, args := range [][]string{{"rmi", img.ID()}, {"image", "prune", "-a", "-f"}, {"system", "prune", "-a", "-f"}} {
		out, err := podmanCommand(s, args...).CombinedOutput()
		t.Logf("podman %v: %v %s", args, err, out)
		if _, err := s.Image(img.ID()); err != nil {
			t.Fatalf("podman %v took a pinned image: %v", args, err)
		}
	}
	must(t, pin.Release())

	var wg sync.WaitGroup
	errs := make(chan error, 100)
	wg.Go(func() {
		for range 5 {
			if out, err := podmanCommand(s, "pull", "-q", "oci:"+dir+"/b").CombinedOutput(); err != nil {
				errs <- fmt.Errorf("podman pull: %w %s", err, out)
			}
			if out, err := podmanCommand(s, "rmi", "-f", other.ID()).CombinedOutput(); err != nil {
				errs <- fmt.Errorf("podman rmi: %w %s", err, out)
			}
		}
	})
	for range 2 {
		wg.Go(func() {
			for range 15 {
				p, err := s.Pin(img.ID(), "domain-2")
				if err == nil {
					_, err = s.List()
					err = errors.Join(err, p.Release())
				}
				if err != nil {
					errs <- err
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	verifyImage(t, s, img, Record{ImageID: img.ID()})
}
