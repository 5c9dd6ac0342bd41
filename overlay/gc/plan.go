// Package gc finds and removes what interrupted runs and updates left behind.
//
// What is kept true, for the developer:
//   - Nothing of a running Domain is touched: every removal happens under the lock that the
//     Domain's coordinator, anchor or pin holds while it lives, and is decided again under it.
//   - Persistent state goes only when it was asked for by name ([Options.State]); then it is
//     renamed away first, so a killed gc leaves it whole or marked for removal, never half.
//   - No symbolic link is followed, no mount entered.
//   - Any step may be killed; running gc again finishes the work.
//
// [Plan] is pure: facts in, actions out. [Gather] and [Run] are the drivers. They run as uid 0 in a user namespace with the
// Domains' id map, /proc mounted; the image store may be nil, then images are left alone.
//
// Contract with the coordinator: it creates <Run>/<Domain ID>/lock, takes an exclusive flock on
// it and then checks that the path still names the locked file (gc may have removed it between open
// and flock) before it uses anything of the Domain. [LockDomain] does this.
package gc

import (
	"fmt"
	"slices"
	"strings"

	"lazaret.dev/lazaret/overlay/image"
)

// Kind of an action.
type Kind string

// The kinds, in the order in which they are done.
const (
	Transient Kind = "transient" // runtime and scratch directories of a dead Domain
	Leftover  Kind = "leftover"  // what a killed gc or anchor command was removing or building
	DeadPin   Kind = "pin"       // a pin whose holder is gone
	PinLock   Kind = "pin-lock"  // a pin file without a pin
	Unused    Kind = "image"     // an image without a reference and pin
	Layer     Kind = "layer"     // a layer of an interrupted pull
	State     Kind = "state"     // a Domain Root whose workspace is gone
	Reference Kind = "reference" // a recorded image that no profile names
)

var order = []Kind{Transient, Leftover, DeadPin, PinLock, Reference, Unused, Layer, State}

// Facts are what Gather saw. They may be out of date when an action runs.
type Facts struct {
	Domains []Domain         `json:"domains"`
	Pins    []image.PinInfo  `json:"pins"`
	Strays  []string         `json:"stray_pin_locks"`
	Images  []string         `json:"images"`
	Records []image.Record   `json:"references"`
	Layers  []string         `json:"orphan_layers"` // children first
	Sizes   map[string]int64 `json:"image_sizes"`   // bytes by image ID
}

// Domain is all that is on disk under one Domain ID.
type Domain struct {
	ID        string    `json:"id"`
	Live      bool      `json:"live"`
	Transient int64     `json:"transient_bytes"`
	HasRun    bool      `json:"has_run"`   // a runtime or scratch directory exists
	Leftover  bool      `json:"leftover"`  // unfinished removals or copies exist
	HasRoot   bool      `json:"has_state"` // a Domain Root exists
	State     int64     `json:"state_bytes"`
	Workspace string    `json:"workspace,omitempty"` // empty: not known
	Gone      bool      `json:"workspace_gone"`      // Workspace is known and does not exist
	Anchors   []AnchorU `json:"anchors,omitempty"`
}

// AnchorU is an anchor's path and size, to show before it goes.
type AnchorU struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
}

// Options say what may go besides what is certainly garbage.
type Options struct {
	State      []string // Domain IDs whose state may go; its workspace must be gone, or Force set
	Force      bool     // remove the named state although the workspace exists
	References bool     // recorded images that no profile names may go
	InUse      []string // references that profiles name
}

// Action is one thing to remove.
type Action struct {
	Kind   Kind   `json:"kind"`
	ID     string `json:"id"`
	Reason string `json:"reason"`
	Bytes  int64  `json:"bytes,omitempty"`
	// Ask marks what is only listed: it goes when the developer names it.
	Ask bool `json:"ask,omitempty"`
}

// Plan decides what goes. The result is sorted by kind in the order of execution, then by ID, layers as given.
func Plan(f Facts, o Options) []Action {
	var out []Action
	for _, d := range f.Domains {
		out = append(out, planDomain(d, o)...)
	}
	out = append(out, planImages(f, o)...)
	slices.SortStableFunc(out, func(a, b Action) int {
		if d := slices.Index(order, a.Kind) - slices.Index(order, b.Kind); d != 0 {
			return d
		}
		if a.Kind == Layer {
			return 0
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out
}

func planDomain(d Domain, o Options) []Action {
	if d.Live {
		return nil
	}
	var out []Action
	if d.HasRun {
		out = append(out, Action{Kind: Transient, ID: d.ID, Bytes: d.Transient, Reason: "its Domain does not run"})
	}
	if d.Leftover {
		out = append(out, Action{Kind: Leftover, ID: d.ID, Reason: "an operation was interrupted"})
	}
	if !d.HasRoot {
		return out
	}
	named := slices.Contains(o.State, d.ID)
	switch {
	case d.Gone:
		out = append(out, Action{Kind: State, ID: d.ID, Bytes: d.State, Ask: !named, Reason: fmt.Sprintf("workspace %q does not exist", d.Workspace)})
	case named && o.Force:
		out = append(out, Action{Kind: State, ID: d.ID, Bytes: d.State, Reason: "named by the developer"})
	}
	return out
}

func planImages(f Facts, o Options) []Action {
	var out []Action
	pinned := map[string]bool{}
	for _, p := range f.Pins {
		if p.Live {
			pinned[p.ImageID] = true
			continue
		}
		out = append(out, Action{Kind: DeadPin, ID: p.ID, Reason: fmt.Sprintf("its holder (Domain %q) is gone", p.Owner)})
	}
	for _, id := range f.Strays {
		out = append(out, Action{Kind: PinLock, ID: id, Reason: "no pin belongs to it"})
	}
	recorded := map[string]bool{}
	for _, r := range f.Records {
		if slices.Contains(o.InUse, r.Reference) {
			recorded[r.ImageID] = true
			continue
		}
		out = append(out, Action{Kind: Reference, ID: r.Reference, Ask: !o.References || pinned[r.ImageID], Reason: "no profile names it"})
		if !o.References || pinned[r.ImageID] {
			recorded[r.ImageID] = true
		}
	}
	for _, id := range f.Images {
		if !recorded[id] && !pinned[id] {
			out = append(out, Action{Kind: Unused, ID: id, Bytes: f.Sizes[id], Reason: "no reference means it and no Domain runs on it"})
		}
	}
	for _, id := range f.Layers {
		out = append(out, Action{Kind: Layer, ID: id, Reason: "an interrupted pull left it"})
	}
	return out
}
