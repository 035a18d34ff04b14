package fs

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// While a dead mount is there, the static directory may have become another one: its
// file system was detached, or it was renamed and something else has its name. Whoever
// uses the mount means the one that was there.

// An AnotherError says that a static directory is not the one that a dead mount
// showed.
type AnotherError struct {
	Dir        string
	Mountpoint string // of the dead mount
}

func (e *AnotherError) Error() string {
	return fmt.Sprintf("%s is not the directory that the dead mount at %s showed", e.Dir, e.Mountpoint)
}

// confirmSame refuses a static directory that is not the one that a dead mount showed,
// as far as the state directory tells: the state of the daemon that has died there is
// the last one that was in use for that path, and is the directory's own. A dead mount
// outlives no boot, so what is from an earlier one says nothing.
func (d *deadMount) confirmSame(o *Options, root int) error {
	if d == nil || !d.showed(o.Dir) {
		return nil
	}
	stateDir, err := o.stateDir()
	if err != nil {
		return err
	}
	keys, err := stateKeys(root)
	if err != nil {
		return err
	}
	here, err := placeOfState(root, o.Dir)
	if err != nil {
		return err
	}
	last, err := filestore.LastOpened(stateDir, func(place string) bool {
		p, ok := parsePlace(place)
		return ok && p.boot == here.boot && p.path == here.path
	})
	if procid.IsShort(err) {
		return err
	}
	if last == "" || slices.Contains(keys, last) || bornAs(root, keys, last) {
		return nil
	}
	return &AnotherError{Dir: o.Dir, Mountpoint: d.path}
}

// showed reports whether the dead mount was one of a static directory with that path.
func (d *deadMount) showed(dir string) bool {
	at, err := AbsoluteOf(dir)
	return err == nil && (d.entry.Source == dir || d.entry.Source == at)
}

// bornAs reports whether a key differs from a directory's own only in what its file
// system is known by: that may have another device number, or have got a UUID.
func bornAs(root int, keys []string, key string) bool {
	if kind := fsType(root); len(keys) < 2 || kind == 0 || kind == unix.BTRFS_SUPER_MAGIC {
		return false // no birth time is known, or snapshots have the same
	}
	own := strings.Split(keys[0], "-")
	return strings.HasSuffix(key, "-"+strings.Join(own[len(own)-2:], "-"))
}
