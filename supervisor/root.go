package supervisor

import (
	"fmt"
	"os"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay"
)

// nobodyBase is the first of the ids that stand for the host's in root's view of /usr; no Domain maps them.
const nobodyBase = 2_100_000_000

// usrOfRoot returns a mount of the host's /usr for real root's Domains, whose agent is root outside: in it, the files of
// root are nobody's, so what only root may read stays closed. Where the file system cannot do that, /usr is used as it is
// if everybody may read all of it; then nothing is returned.
func usrOfRoot() ([]*os.File, error) {
	ids := &nsenter.IDMap{Kind: nsenter.MapRoot, UID: []nsenter.Range{{Outside: nobodyBase, Count: 65536}}, GID: []nsenter.Range{{Outside: nobodyBase, Count: 65536}}}
	ns, err := nsenter.UserNamespace(ids)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	usr, err := overlay.IdmappedClone("/usr", ns)
	if err == nil {
		return []*os.File{usr}, nil
	}
	if private := overlay.FirstPrivate("/usr"); private != "" {
		return nil, refusal(fmt.Sprintf("show root's /usr: %s is not for everybody, and this file system cannot hide it (%v)", private, err),
			"run Lazaret as an ordinary user")
	}
	return nil, nil
}
