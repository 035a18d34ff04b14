package fs

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// accounting reports whether a file is being opened by acct(2). In its exit(2) a process
// waits until that file is written: should the daemon die, its own end would wait for
// itself, and that of all others behind it.
func (fs *FS) accounting(in *fuse.OpenIn) bool {
	if in.Flags&(unix.O_ACCMODE|unix.O_APPEND|unix.O_TRUNC) != unix.O_WRONLY|unix.O_APPEND || fs.userOf(&in.InHeader) != 0 {
		return false
	}
	path := "/proc/" + strconv.FormatUint(uint64(in.Pid), 10) + "/syscall"
	call, err := os.ReadFile(path)
	// It is about to wait for the answer, and then the file says in which call.
	for end := time.Now().Add(seeTime); err == nil && string(call) == "running\n" && time.Now().Before(end); call, err = os.ReadFile(path) {
		time.Sleep(50 * time.Microsecond)
	}
	return err == nil && bytes.HasPrefix(call, []byte(strconv.Itoa(unix.SYS_ACCT)+" "))
}
