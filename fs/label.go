package fs

import (
	"bytes"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// labelAttr is where SELinux keeps what ls(1) asks each file for.
const labelAttr = "security.selinux"

// labels tells whether there may be SELinux labels. Where the kernel knows none
// and nobody has made one, the mount says that it has no such thing, as file
// systems without it do: ls(1) then asks once, and not for each file.
type labels struct{ may atomic.Bool }

func (l *labels) init() {
	known, err := os.ReadFile("/proc/filesystems")
	l.may.Store(err != nil || bytes.Contains(known, []byte("selinuxfs")))
}

// missing returns the answer to who asks for an attribute that a file does not
// have.
func (l *labels) missing(attr string) error {
	if attr == labelAttr && !l.may.Load() {
		return unix.EOPNOTSUPP
	}
	return unix.ENODATA
}

// seen takes note of an attribute that there is, or will be.
func (l *labels) seen(attr string) {
	if attr == labelAttr && !l.may.Load() {
		l.may.Store(true)
	}
}
