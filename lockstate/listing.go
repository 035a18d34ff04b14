package lockstate

import "time"

// A Listing is what the control directory shows of a table, in the form of
// locks.json. Paths are relative to the root of the mount; "." is the root.
type Listing struct {
	Locks    []Row     `json:"locks"`
	Waiters  []Waiter  `json:"waiters"`
	Orphans  []Orphan  `json:"orphans"`
	Blockers []Blocker `json:"blockers"` // left open under locks that have ended (R8)

	Mode     string `json:"mode,omitempty"`     // observe: refusals are only noted; off: nothing is locked
	Unlocked string `json:"unlocked,omitempty"` // deny: writing needs a lock (W4)
}

// A Row is one lock of a [Listing].
type Row struct {
	Dir       string    `json:"dir"`
	DirBytes  []byte    `json:"dir_bytes,omitempty"` // the path, when it is not valid UTF-8
	Kind      string    `json:"kind"`                // implicit, explicit, shared or lease
	Protocol  string    `json:"protocol"`            // how it was taken: mkdir, create, link …
	Token     uint64    `json:"token"`
	Since     time.Time `json:"since"`
	Pid       int       `json:"pid"`
	Start     uint64    `json:"start"` // clock ticks after boot, proc(5)
	UID       uint32    `json:"uid"`
	Cmd       string    `json:"cmd"`
	Client    string    `json:"client"`
	Scope     string    `json:"scope"`              // process, group, session, cgroup or client: whose lock it is
	TTL       float64   `json:"ttl,omitempty"`      // of a lease, in seconds
	Deadline  float64   `json:"deadline,omitempty"` // of a lease, in seconds from now
	Why       string    `json:"why,omitempty"`
	OnCrash   string    `json:"on_crash,omitempty"` // R7; as the mount does if not there
	File      string    `json:"file,omitempty"`     // the lock file's name
	FileBytes []byte    `json:"file_bytes,omitempty"`
	Blockers  []Blocker `json:"blockers"`
}

// A Blocker is a write handle that keeps others from acquiring a directory
// (C3d, R8).
type Blocker struct {
	Pid       int    `json:"pid"` // 0: not known, as of one that an earlier daemon served
	Start     uint64 `json:"start"`
	Cmd       string `json:"cmd"`
	Path      string `json:"path"`
	PathBytes []byte `json:"path_bytes,omitempty"`
}

// A Waiter is a request that waits for a lock.
type Waiter struct {
	Dir      string    `json:"dir"`
	DirBytes []byte    `json:"dir_bytes,omitempty"` // when it is not valid UTF-8
	Pid      int       `json:"pid"`
	Start    uint64    `json:"start"`
	Cmd      string    `json:"cmd"`
	Since    time.Time `json:"since"`
}

// An Orphan is a lock file that no lock stands behind (S3).
type Orphan struct {
	Path      string `json:"path"`
	PathBytes []byte `json:"path_bytes,omitempty"` // when it is not valid UTF-8
}

// A Denial is one refusal (W6).
type Denial struct {
	Time      time.Time `json:"time"`  // the last time
	Times     int       `json:"times"` // how often it came
	Op        string    `json:"op"`
	Path      string    `json:"path"`
	PathBytes []byte    `json:"path_bytes,omitempty"` // when it is not valid UTF-8
	Pid       int       `json:"pid"`
	Start     uint64    `json:"start"`
	UID       uint32    `json:"uid"`
	Cmd       string    `json:"cmd"`
	Errno     string    `json:"errno"`
	Lock      string    `json:"lock"` // directory of the lock that stood in the way
	LockBytes []byte    `json:"lock_bytes,omitempty"`
	LockPid   int       `json:"lock_pid"`
	Reason    string    `json:"reason"`
}

// PermitName is the name of a file that mknod(2) makes nowhere where the IDs of a mount may
// be mapped (mount --idmap): it fails with EALREADY for who may make entries in the directory
// by the mapping of the mount that it came by, and a command that was refused for want of
// that right succeeds within 5 s.
const PermitName = ".stagefs-permit"

// An Answer is what a read of the ctl file tells of the last command that was
// written through the same descriptor. Which fields are there depends on the
// command and on its outcome.
type Answer struct {
	Dir      string    `json:"dir,omitempty"`
	DirBytes []byte    `json:"dir_bytes,omitempty"`
	Token    uint64    `json:"token"` // 0 with locking off, or where a refusal was only noted
	Kind     string    `json:"kind,omitempty"`
	Protocol string    `json:"protocol,omitempty"`
	Since    time.Time `json:"since,omitzero"`
	Client   string    `json:"client,omitempty"`
	TTL      float64   `json:"ttl,omitempty"`         // seconds
	Deadline float64   `json:"deadline_in,omitempty"` // seconds from now

	// Of an acquisition: the lock ends with who took it, whose parent inherits none (R5).
	Heirless bool `json:"heirless,omitempty"`

	// Of a lock that was watched.
	Ended Reason `json:"reason,omitempty"` // how it ended
	By    int    `json:"by,omitempty"`     // the process that ended it
	Why   string `json:"why,omitempty"`

	// Of a command that failed.
	Error    string    `json:"error,omitempty"`   // the name of its errno
	Message  string    `json:"message,omitempty"` // what to do about it
	Permit   []byte    `json:"permit,omitempty"`  // a path in the mount: see [PermitName]
	Held     *Row      `json:"held,omitempty"`    // the lock in the way
	Blockers []Blocker `json:"blockers,omitempty"`
}

// Quarantined tells of content that was put aside when its owner crashed (R7).
type Quarantined struct {
	ID     string    `json:"id"` // what it is restored by
	Dir    Bytes     `json:"dir"`
	Token  uint64    `json:"token"`
	Pid    int       `json:"pid"`
	UID    uint32    `json:"uid"`
	Client string    `json:"client,omitempty"`
	Reason string    `json:"reason"` // why the lock ended
	Why    string    `json:"why,omitempty"`
	Time   time.Time `json:"time"`
}
