//go:build linux

package procid

import (
	"errors"
	"strconv"
)

// ErrUnknown says that an id does not lead to a living process: it is zero, or
// not of the daemon's pid namespace, or the process is gone (H4). Where the
// kernel gave a reason, that is wrapped beside it.
var ErrUnknown = errors.New("unknown process")

// An ID names one process for all time of one boot: a pid may be used again, a
// pid with its start time is not (H1). The zero ID is nobody.
type ID struct {
	Pid   int    // thread group id in the daemon's pid namespace
	Start uint64 // clock ticks since boot, proc(5) stat field 22
	// again tells a process from those before it in the same tick, as long as these are
	// known. It is not written down: the next daemon knows one at most.
	again uint64
}

// String returns "pid@start".
func (id ID) String() string {
	return strconv.Itoa(id.Pid) + "@" + strconv.FormatUint(id.Start, 10)
}

// An Ancestor is one step up from a process.
type Ancestor struct {
	ID     ID
	Reaper bool `json:",omitempty"` // init, subreaper or service manager: never inherits a lock (R5)
}
