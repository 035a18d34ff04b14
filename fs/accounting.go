package fs

import (
	"strconv"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// accounting reports whether a file is being opened by acct(2). In its exit(2) a process
// waits until that file is written: should the daemon die, its own end would wait for
// itself, and that of all others behind it.
func (fs *FS) accounting(in *fuse.OpenIn) bool {
	if in.Flags&(unix.O_ACCMODE|unix.O_APPEND|unix.O_TRUNC) != unix.O_WRONLY|unix.O_APPEND || fs.userOf(&in.InHeader) != 0 {
		return false
	}
	// It is about to wait for the answer.
	call := procid.CallOf(int(in.Pid), seeTime)
	return len(call) > 0 && call[0] == strconv.Itoa(unix.SYS_ACCT)
}
