package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/supervisor"
)

// interruptible is a context that ends with Ctrl-C; a second one ends the program.
func interruptible() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

func imageCommand(out, errOut io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Fetch, list, update and remove the images that profiles name",
		Long: `Fetch, list, update and remove the images that profiles name as their base: image = "REFERENCE".

An image is fetched once and stays as it was until it is updated; a start never goes to the network. REFERENCE is a name with
its registry, or oci:DIR, oci-archive:FILE, docker-archive:FILE or dir:DIR. Podman fetches; layouts and archives do without.`,
		Example: `  lazaret image pull docker.io/library/node:22
  lazaret image pull oci-archive:./image.tar
  lazaret image update                            all that are recorded`,
	}
	cmd.AddCommand(imagePull(out, errOut), imageUpdate(out, errOut), imageList(out), &cobra.Command{
		Use:   "rm REFERENCE…",
		Short: "Forget images, and remove their files unless a sandbox runs on them",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			ctx, stop := interruptible()
			defer stop()
			for _, ref := range args {
				if err := supervisor.RemoveImage(ctx, ref); err != nil {
					return err
				}
			}
			return nil
		},
	})
	return cmd
}

func imagePull(out, errOut io.Writer) *cobra.Command {
	own := false
	cmd := &cobra.Command{
		Use:   "pull REFERENCE…",
		Short: "Fetch images and pin the references to what they mean now",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return pull(args, own, out, errOut)
		},
	}
	cmd.Flags().BoolVar(&own, "no-podman", false, "import a layout or archive without Podman")
	return cmd
}

func pull(refs []string, own bool, out, errOut io.Writer) error {
	ctx, stop := interruptible()
	defer stop()
	for _, ref := range refs {
		r, err := supervisor.PullImage(ctx, ref, supervisor.PullOptions{Own: own, Progress: func(line string) { fmt.Fprintln(errOut, line) }})
		if err != nil {
			return err
		}
		state := "unchanged"
		if r.Changed {
			state = "new"
		}
		fmt.Fprintf(out, "%.12s  %s  (%s)\n", r.ImageID, r.Reference, state)
	}
	return nil
}

func imageUpdate(out, errOut io.Writer) *cobra.Command {
	return &cobra.Command{
		Use:   "update [REFERENCE…]",
		Short: "Fetch recorded images anew; running sandboxes keep the old ones",
		Long: `Fetch recorded images anew, all of them without arguments. Running sandboxes keep the image that they started on; lazaret gc
removes it when none is left. A State Anchor that was written over the old one waits for your choice at the next start.`,
		RunE: func(_ *cobra.Command, args []string) error {
			ctx, stop := interruptible()
			defer stop()
			if len(args) == 0 {
				list, err := supervisor.ListImages(ctx)
				if err != nil {
					return err
				}
				for _, l := range list {
					args = append(args, l.Reference)
				}
			}
			var errs []error
			for _, ref := range args {
				if ctx.Err() == nil {
					errs = append(errs, pull([]string{ref}, false, out, errOut))
				}
			}
			return errors.Join(errs...)
		},
	}
}

func imageList(out io.Writer) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the images",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := interruptible()
			defer stop()
			list, err := supervisor.ListImages(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(out, list)
			}
			w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "IMAGE\tSIZE\tPULLED\tIN USE\tREFERENCE")
			for _, l := range list {
				size := supervisor.HumanSize(l.Size)
				if l.Missing {
					size = "missing"
				}
				fmt.Fprintf(w, "%.12s\t%s\t%s\t%d\t%s\n", l.ImageID, size, l.Pulled.Local().Format("2006-01-02 15:04"), l.Pins, l.Reference)
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}
