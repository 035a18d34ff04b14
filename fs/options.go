package fs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Options say what is mounted and how. Dir is required; the zero value of
// everything else is the default.
type Options struct {
	Dir           string        // the static directory
	Mountpoint    string        // "": over Dir itself (M1)
	LockNames     []string      // names of lock files, as path.Match patterns; nil: DefaultLockNames
	SharedNames   []string      // names that everyone may make and change, as path.Match patterns (W5)
	Candidates    []string      // added templates of candidates, as path.Match patterns (A9)
	Depth         int           // directories nearer than this to the root are containers (C4); 0: 1
	Owner         string        // who owns a lock together with who takes it (H3): process, group, session or cgroup; "": process
	DenyUnlocked  bool          // writing needs a lock (W4)
	NoLocking     bool          // everything passes; nothing is a lock
	NoPassthrough bool          // all data goes through the daemon
	IDMap         bool          // the mount's IDs may be mapped; for root, from Linux 6.12 on
	Observe       bool          // everything passes; refusals are only noted
	StateDir      string        // "": /var/lib/stagefs, for ordinary users below XDG_STATE_HOME (S1)
	Strict        bool          // refuse to mount while there are ways under it (M5)
	Compat        bool          // use only what Linux 5.10 offers
	OnCrash       string        // what becomes of the content if the owner crashes (R7): lockstate.Keep, Destroy or Quarantine; "": Keep
	Grace         time.Duration // how long a busy mount is waited for at the end (M4); 0: 5 s
	Version       string        // shown in the control directory
	Transport     string        // how requests come: one of transport's names; "": transport.Auto
	Debug         bool          // log each request
	MountFlags    MountFlags    // what the mount has otherwise than the file system of Dir
	Successor     bool          // take the place of a dead mount, or fail with ErrUnmounted; and of its state, or fail with ErrLostState
	Log           *slog.Logger  // nil: no log

	// Mounted is told when the mount is there, long before it answers, and when
	// it is taken back because it cannot be served. nil: nobody asks.
	Mounted func(there bool)

	// Shelf has the processes of a supervised daemon that the next one wants to know
	// of. nil: there is no supervisor.
	Shelf *procid.Shelf

	// Replace runs another program in this process, which goes on with what is
	// in state by [Continue]. It returns only if that fails. nil: the daemon
	// cannot be replaced.
	Replace func(program, state *os.File) error
}

// DefaultLockNames are the names of lock files unless Options name others.
var DefaultLockNames = []string{"devserver", "devserver.lock"}

// An OptionError is an option that makes no sense.
type OptionError struct {
	Option, Value, Reason string
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("%s %q: %s", e.Option, e.Value, e.Reason)
}

// Errors of [Mount] and its companions. Each comes wrapped with the path it is
// about.
var (
	ErrNotExist       = os.ErrNotExist
	ErrNotDirectory   = errors.New("is not a directory")
	ErrOnFuse         = errors.New("is on a FUSE file system, which cannot be a backing")
	ErrReadOnly       = errors.New("is on a read-only file system")
	ErrKernelFS       = errors.New("is on a file system of the kernel's own, which holds no files to serve")
	ErrNeeded         = errors.New("the system needs that directory as it is")
	ErrMountpointBusy = errors.New("is a mountpoint already")
	ErrInside         = errors.New("is inside the static directory: mount elsewhere, or over the directory itself")
	ErrStaleMount     = errors.New("is a dead mount")
	ErrNotTaken       = errors.New("the dead mount there is kept, as no other can be made in its place")
	ErrMoved          = errors.New("was moved or replaced while it was to be mounted")
	ErrUnmounted      = errors.New("was unmounted before it was served")
	ErrState          = errors.New("what an earlier daemon recorded cannot be judged now")
	ErrNewerState     = filestore.ErrNewer
	ErrLostState      = filestore.ErrLost
	ErrNoFuse         = errors.New("FUSE is not available")
	ErrHelperKilled   = errors.New("fusermount3 was killed before it had mounted")
	ErrNoCall         = errors.New("a system call is forbidden or missing")
	ErrNoTransport    = transport.ErrUnavailable
	ErrStrict         = errors.New("there are ways under the mount")
	ErrNoAtimes       = errors.New("access times cannot change otherwise than they do")
	ErrNoMount        = errors.New("no stagefs mount")
	ErrMountLocked    = errors.New("the mount is locked in this mount namespace")
	ErrDetached       = errors.New("the mount is busy: detached, and served until the last file is closed")
)

// A ServedError says that another daemon serves the directory (M1).
type ServedError struct {
	Dir string
	Pid int // 0: unknown
}

func (e *ServedError) Error() string {
	if e.Pid == 0 {
		return fmt.Sprintf("%s is served by another stagefs already", e.Dir)
	}
	return fmt.Sprintf("%s is served by another stagefs already (pid %d)", e.Dir, e.Pid)
}

// Validate reports the first option that makes no sense, as an [*OptionError].
func (o *Options) Validate() error {
	if o.Dir == "" {
		return &OptionError{"directory", "", "is empty"}
	}
	if o.NoLocking && (o.Observe || o.DenyUnlocked) {
		return &OptionError{"locking", "off", "leaves nothing to observe or to deny"}
	}
	if _, ok := scopeNamed(o.Owner); !ok && o.Owner != "" {
		return &OptionError{"owner", o.Owner, "is none of process, group, session, cgroup"}
	}
	if o.Depth < 0 {
		return &OptionError{"depth", fmt.Sprint(o.Depth), "is below zero"}
	}
	switch o.OnCrash {
	case "", lockstate.Keep, lockstate.Destroy, lockstate.Quarantine:
	default:
		return &OptionError{"on-crash", o.OnCrash, "is none of keep, destroy, quarantine"}
	}
	if o.Grace < 0 {
		return &OptionError{"grace", o.Grace.String(), "is below zero"}
	}
	if !slices.Contains([]string{"", transport.Auto, transport.Uring, transport.Threads, transport.Fuse}, o.Transport) {
		return &OptionError{"transport", o.Transport, "is none of auto, uring, threads and fuse"}
	}
	if o.Compat && o.Transport == transport.Uring {
		return &OptionError{"transport", o.Transport, "is more than Linux 5.10 offers: leave out --compat"}
	}
	if o.IDMap && o.Compat {
		return &OptionError{"idmap", "on", "is more than Linux 5.10 offers: leave out --compat"}
	}
	if o.IDMap && unix.Geteuid() != 0 {
		return &OptionError{"idmap", "on", "is for root alone, as only root can map the IDs of a mount"}
	}
	for _, l := range []struct {
		option string
		names  []string
	}{{"lock name", o.LockNames}, {"shared name", o.SharedNames}, {"candidate", o.Candidates}} {
		for _, n := range l.names {
			if reason := badPattern(n); reason != "" {
				return &OptionError{l.option, n, reason}
			}
		}
	}
	lockNames := newNameSet(o.lockNames())
	for _, n := range o.SharedNames {
		if !isPattern(n) && lockNames.has(n) {
			return &OptionError{"shared name", n, "is a lock file's name"}
		}
	}
	return nil
}

// lockNames are the names and patterns of lock files.
func (o *Options) lockNames() []string {
	if o.LockNames == nil {
		return DefaultLockNames
	}
	return o.LockNames
}

func badPattern(n string) string {
	switch _, err := path.Match(n, ""); {
	case n == "":
		return "is empty"
	case strings.Contains(n, "/"):
		return "holds a slash; give a name, not a path"
	case strings.ContainsRune(n, 0) || len(n) > 255:
		return "cannot be a file name"
	case n == "." || n == ".." || n == ControlDir:
		return "is a reserved name"
	case err != nil:
		return "is not a pattern: " + err.Error()
	case strings.Trim(n, "*") == "":
		return "matches every name"
	}
	return ""
}

func (o *Options) setDefaults() {
	if o.MountFlags.Set&unix.MS_RDONLY != 0 { // where access times don't change
		o.MountFlags.add(flagOptions["noatime"])
	}
	o.LockNames = o.lockNames()
	if o.Depth == 0 {
		o.Depth = 1
	}
	if o.Grace == 0 {
		o.Grace = 5 * time.Second
	}
	if o.Transport == "" {
		o.Transport = transport.Auto
	}
	if o.Compat && o.Transport == transport.Auto {
		o.Transport = transport.Threads
	}
	if o.Mounted == nil {
		o.Mounted = func(bool) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}
