package fs

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// FS answers the kernel's requests.
type FS struct {
	fuse.RawFileSystem // ENOSYS for what is not served

	opts       Options
	log        *slog.Logger
	mountID    int    // what the kernel calls the mount,
	mountDev   uint64 // and the device that its files show
	lostKeys   lostKeys
	openers    openers
	privileged bool // root: other users' files and processes are served too
	uid, gid   uint32
	caps       capabilities
	started    time.Time

	back     backing
	streams  dirStreams
	openDirs openDirs // of an ordinary user's mount
	table    *lockstate.Table
	procs    *procid.Resolver
	nodes    *nodeTable
	root     *node
	handles  handleTable
	pass     passthrough

	names struct{ lock, locked, shared, candidate nameSet } // of opts, sorted out

	spare    budget
	linger   lingers
	advisory *advisory.Table
	// lockMu makes a change of a lock file's locks and of what they keep one
	// step.
	lockMu     sync.Mutex
	waits      waitList
	expiry     expiry
	events     *eventLog
	cands      candidates
	denials    denialLog
	orphans    orphanList
	leftovers  leftovers
	control    controlDir
	ownedAlone sync.Once // it was told that the mount's owner scope can't be had by everybody
	given      lineLimit // lines of the log on locks that were given back by command

	storeErr   atomic.Pointer[string] // why the state can't be written now; nil: it can
	reserveErr atomic.Pointer[string] // why no tokens could be reserved at last; nil: they could

	unrepresented unrepresented

	replacing replacing

	// ns protects the names in the backing: whoever relies on them holds it
	// shared, a rename exclusively.
	ns spinMutex
	// stuck is when somebody has waited for ns in vain; nil: not lately.
	stuck atomic.Pointer[time.Time]
	// renames is odd while one goes on. Protected by ns, held alone; read without it.
	renames atomic.Uint64

	// aliasMu is held shared by operations on files with several links, and
	// taken by an acquisition to wait for them.
	aliasMu spinMutex

	hot       hotDirs
	capsOff   capsOff
	labels    labels
	copiedUp  copiedUp
	copyUps   copyUps
	listers   listers
	ahead     readahead
	lockLooks lockLooks
	stale     staleFinds
	underWay  changesUnderWay

	hiddenMu  sync.Mutex      // protects which hidden directories there are
	filling   map[string]bool // hidden directories that content is moved to at the moment, as DIR/N; likewise
	trashMu   sync.Mutex      // one goroutine empties the trash
	clearings sync.WaitGroup  // what clears away in the background (R7)
	toClear   sync.Map        // the tokens of locks that are to be cleared there: see clearLater

	reapMu  sync.Mutex                // one exit is carried out at a time
	thaws   atomic.Pointer[time.Time] // since when that waits for the backing to thaw, or nil
	reaping map[procid.ID]bool        // those under way, one for the sake of another; protected by reapMu
	watchMu sync.Mutex
	watched map[procid.ID]*procid.Process // protected by watchMu
	// maxWatched bounds watched where a lock is acquired, not where one is restored or passes on.
	maxWatched int

	kernel  transport.Kernel // set before the first request is answered
	idmap   bool             // likewise: see idmap.go
	permits permits
}

func newFS(o Options, root int, table *lockstate.Table, procs *procid.Resolver) (*FS, error) {
	fs := &FS{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		opts:          o, log: o.Log, table: table, procs: procs,
		privileged: unix.Geteuid() == 0, uid: uint32(unix.Geteuid()), gid: uint32(unix.Getegid()),
	}
	fs.setNames(o.LockNames, o.SharedNames, o.Candidates)
	var err error
	if fs.caps, err = readCapabilities(); err != nil {
		return nil, err
	}
	fs.caps.obeyQuotas()
	fs.labels.init()
	fs.started = time.Now()
	fs.back.root = root
	fs.back.opensByIno = fs.privileged && opensByIno(root)
	fs.back.oldXattrs.Store(o.Compat)
	fs.back.oldChmod.Store(o.Compat)
	fs.back.dirs.limit = dirCacheLimit()
	if fs.back.proc, err = unix.Open("/proc/self/fd", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return nil, err
	}
	var st unix.Statx_t
	if err := statAt(root, "", &st); err != nil {
		return nil, err
	}
	flags := o.mountFlags(root)
	fs.pass.noatime, fs.pass.strictatime = flags&unix.MS_NOATIME != 0, flags&unix.MS_STRICTATIME != 0
	fs.nodes = newNodeTable(table)
	fs.nodes.reborn = isReborn(root)
	fs.nodes.hashing = fsType(root) == unix.EXT4_SUPER_MAGIC
	fs.nodes.drop, fs.nodes.follow = fs.dropNode, fs.follow
	fs.nodes.shared, fs.nodes.isLockName = fs.isSharedName, fs.isLockName
	fs.root = fs.nodes.newRoot(fs.identityOf(&st), table.Root(), root)
	fs.watched = make(map[procid.ID]*procid.Process)
	fs.advisory = advisory.New()
	fs.handles.init()
	fs.leftovers.init()
	fs.spare.init(fileBudget())
	fs.maxWatched = watchLimit()
	fs.cands.init(fs.table)
	fs.control.init(fs)
	return fs, nil
}

// dropNode gives back what a forgotten node kept. It is called with the node
// table's mutex held, and adds the descriptors to doomed.
func (fs *FS) dropNode(n *node, doomed []int) []int {
	if n.dir != nil {
		doomed = fs.back.dirs.drop(n, doomed)
		doomed = fs.streams.drop(n, doomed)
		fs.table.Forget(n.dir)
	}
	if m := n.more.Load(); m != nil && m.fd >= 0 {
		doomed = append(doomed, m.fd)
		m.fd = -1
		fs.nodes.gone++
		fs.nodes.closing.Add(1)
		if m.round == fs.nodes.round {
			fs.nodes.awaited.Add(-1)
		}
		if m.big {
			m.big = false
			fs.nodes.big.Add(-1)
		}
	}
	return doomed
}

func (fs *FS) close() {
	fs.nodes.mu.Lock()
	defer fs.nodes.unlock()
	for n := range fs.nodes.byID.all {
		if n.id >= firstNode {
			fs.nodes.doomed = fs.dropNode(n, fs.nodes.doomed)
		}
	}
	fs.nodes.doomed = fs.back.dirs.drop(fs.root, fs.nodes.doomed)
	fs.nodes.doomed = fs.streams.drop(fs.root, fs.nodes.doomed)
	fs.nodes.heap.close()
	unix.Close(fs.back.proc)
}

// String names the file system to go-fuse.
func (fs *FS) String() string { return "stagefs" }

// notifyAttr tells the kernel that the attributes of n changed without it.
//
// Names are never notified: the kernel would lock the directory for it, which a
// request that waits for the daemon may have locked, and if the daemon died in
// between, neither could end. It is not needed: a lookup that is to create the
// name exclusively always asks, and what is stale otherwise ends in ESTALE,
// upon which the kernel asks again.
func (fs *FS) notifyAttr(n *node) {
	if n != nil && fs.kernel != nil { // nil: not mounted yet
		fs.kernel.InodeNotify(n.id, -1, 0) // ENOENT: the kernel does not know it, fine
	}
}

// forgetNames has the kernel ask again for all names, because one came or went on the
// daemon's own account that it may not ask for by itself: one that went leads to a file
// that has others, or an old one is not there. What somebody has mounted inside would be
// gone with its name; so where something is, or the kernel can't be told, the names are
// seen when the old ones have expired. To look for that may take a while: FS.ns is not
// held. It reports whether the kernel was told.
func (fs *FS) forgetNames() (told bool) {
	told = fs.kernel != nil && fs.kernel.TellsNames() && !fs.hasMountsInside()
	if told {
		fs.kernel.ForgetNames()
	}
	return told
}

// hasMountsInside reports whether something is mounted on a directory of the mount, or that
// can't be seen.
func (fs *FS) hasMountsInside() bool {
	mounts, err := ReadMounts()
	return err != nil || len(mountedOn(mounts, func(m *MountEntry) bool { return m.device() == fs.mountDev })) > 0 ||
		mountedOnElsewhere(fs.mountDev)
}

// notifyDir tells the kernel that a name in n came or went without it: it drops
// the listing that it keeps, and asks for the attributes again. Whatever
// changes a directory on the daemon's own account calls it afterwards.
func (fs *FS) notifyDir(n *node) {
	if n != nil && fs.kernel != nil {
		fs.kernel.InodeNotify(n.id, 0, 0)
	}
}

// isLockName reports whether an entry called name in parent is a lock file.
// The root has none: it is never locked (C4).
func (fs *FS) isLockName(parent *node, name string) bool {
	return parent != fs.root && !fs.opts.NoLocking && fs.names.lock.has(name)
}

// isSharedName reports whether no lock covers a file of this name, although one
// covers its directory (W5).
func (fs *FS) isSharedName(parent *node, name string) bool {
	return fs.names.shared.has(name) && !fs.isLockName(parent, name)
}
