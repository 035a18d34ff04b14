package fs

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// identity tells one file of the backing from all others, also from a later
// one that got the same inode number: that has another birth time. A file
// system that keeps no lasting birth times leaves it 0.
type identity struct {
	dev   uint32 // as the kernel keeps it: 12 bits major, 20 bits minor
	ino   uint64
	birth int64
}

func identityOf(st *unix.Statx_t) identity {
	id := identity{dev: st.Dev_major<<20 | st.Dev_minor, ino: st.Ino}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.birth = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return id
}

// identityOf tells a file of the backing from all others.
func (t *nodeTable) identityOf(st *unix.Statx_t) identity {
	return identityIn(t.reborn, st)
}

func (fs *FS) identityOf(st *unix.Statx_t) identity { return fs.nodes.identityOf(st) }

// identityIn is identityOf in a file system of which isReborn is known.
func identityIn(reborn bool, st *unix.Statx_t) identity {
	id := identityOf(st)
	if reborn {
		id.birth = 0
	}
	return id
}

// shownIno returns the inode number that the mount shows of a file. All of the mount has
// one device number: what is on another file system than the root, such as a subvolume
// of btrfs, gets a number of its own, or two files would pass for one.
func (t *nodeTable) shownIno(id identity) uint64 { return id.ino ^ t.inosOf(id.dev) }

// inosOf tells the inode numbers of a file system from those of the root's.
func (t *nodeTable) inosOf(dev uint32) uint64 {
	if dev == t.dev {
		return 0
	}
	return uint64(dev*0x9e3779b1>>10) << 40 // bits 62 and 63: see privateIno, and the control directory
}

// isReborn reports whether a file gets another birth time with its first change,
// because overlayfs copies it then. Where its layers are on several file systems, a
// directory also gets another inode number once the kernel has forgotten it.
func isReborn(dir int) bool { return fsType(dir) == unix.OVERLAYFS_SUPER_MAGIC }

// fsType returns f_type of statfs(2) for the file system of a descriptor, 0 if it can't
// be had.
func fsType(fd int) int64 {
	var st unix.Statfs_t
	if ignoringEINTR(func() error { return unix.Fstatfs(fd, &st) }) != nil {
		return 0
	}
	return int64(st.Type)
}

// fileID is id as the lock table knows it.
func (id identity) fileID() lockstate.FileID {
	return lockstate.FileID{Dev: uint64(id.dev), Ino: id.ino, Birth: id.birth}
}

// carry is id as it is handed over, and carriedIdentity is the way back.
func (id identity) carry() [3]uint64 { return [3]uint64{uint64(id.dev), id.ino, uint64(id.birth)} }

func carriedIdentity(c [3]uint64) identity {
	return identity{dev: uint32(c[0]), ino: c[1], birth: int64(c[2])}
}

// inode is id from mount to mount.
func (id identity) inode() lockstate.Inode { return lockstate.Inode{Ino: id.ino, Birth: id.birth} }

const statxMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME

// statAt returns the attributes of name below dir, or of dir itself if name is
// empty. It never follows a symlink (M3).
func statAt(dir int, name string, st *unix.Statx_t) error {
	return ignoringEINTR(func() error {
		return unix.Statx(dir, name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_STATX_SYNC_AS_STAT, statxMask, st)
	})
}

// openAt opens one name below dir, never through a symlink (M3).
func openAt(dir int, name string, flags int, mode uint32) (int, error) {
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Openat(dir, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOCTTY, mode)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// openBeneath opens the directory that names lead to from dir, one at a time, or dir itself
// again if there are none.
func openBeneath(dir int, names []string, flags int) (int, error) {
	if len(names) == 0 {
		return openAt(dir, ".", flags|unix.O_DIRECTORY, 0)
	}
	fd := dir
	for _, name := range names {
		next, err := openAt(fd, name, flags|unix.O_DIRECTORY, 0)
		if fd != dir {
			unix.Close(fd)
		}
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// dup returns another descriptor of what is open as fd.
func dup(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3) }

// isDirectory reports whether these are the attributes of a directory.
func isDirectory(st *unix.Statx_t) bool { return uint32(st.Mode)&unix.S_IFMT == unix.S_IFDIR }

// devName is the device that a file is on, as [MountEntry.Dev] has it.
func devName(st *unix.Statx_t) string { return fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor) }

// ignoringEINTR repeats a system call that a signal to the daemon interrupted.
// The Go runtime sends itself such signals.
func ignoringEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// A place is where the backing has a file: a name below a directory
// descriptor, or a descriptor of the file itself and no name.
type place struct {
	fd   int
	name string
	ref  *dirFD // keeps fd open
}

func (p place) done() {
	if p.ref != nil {
		p.ref.release()
	}
}

func (p place) stat(st *unix.Statx_t) error { return statAt(p.fd, p.name, st) }

// withFD calls f with a descriptor of the file itself, which permits nothing but to name
// it.
func (p place) withFD(f func(fd int) error) error {
	if p.name == "" {
		return f(p.fd)
	}
	fd, err := openAt(p.fd, p.name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}

// open opens the file. Flags that would create it are the caller's business.
func (b *backing) open(p place, flags int) (int, error) {
	if p.name != "" {
		return openAt(p.fd, p.name, flags, 0)
	}
	// A descriptor is opened again through /proc; the link there leads to
	// the file itself and nowhere else.
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Openat(b.proc, procName(p.fd), flags&^unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// A backing is the real content of the static directory, reached only through
// descriptors (M3).
type backing struct {
	root int // opened before mounting
	proc int // /proc/self/fd
	dirs dirCache

	opensByIno bool // see there

	oldXattrs atomic.Bool // there is no getxattrat(2), which came with Linux 6.13
	oldChmod  atomic.Bool // there is no fchmodat2(2), which came with Linux 6.6
}

// writable returns EROFS while the backing is mounted read-only.
func (b *backing) writable() error {
	if err := unix.Faccessat(b.root, ".", unix.W_OK, unix.AT_EACCESS); err == unix.EROFS {
		return err
	}
	return nil
}

// awaitThaw returns when the backing takes changes, or refuses them: while it is
// frozen (ioctl FIFREEZE), the kernel keeps all waiting.
func (b *backing) awaitThaw() {
	// No filesystem has an attribute without a namespace.
	unix.Fsetxattr(b.root, "stagefs", nil, 0)
}

// procName is what a descriptor is called below backing.proc.
func procName(fd int) string { return strconv.Itoa(fd) }

// procPath is a path to what is open, for calls that take no descriptor.
func procPath(fd int) string { return "/proc/self/fd/" + procName(fd) }

// pathOfFD is where the kernel sees what is open, if anything leads there.
func pathOfFD(fd int) (string, error) { return os.Readlink(procPath(fd)) }

// dirFD is an open directory of the backing.
type dirFD struct {
	cache *dirCache
	node  *node
	fd    int

	// Protected by cache.mu.
	refs    int
	evicted bool
	newer   *dirFD
	older   *dirFD
}

func (d *dirFD) release() {
	c := d.cache
	c.mu.Lock()
	d.refs--
	last := d.refs == 0 && d.evicted
	c.mu.Unlock()
	if last {
		unix.Close(d.fd)
	}
}

// dirCache keeps the directories that were used last open, up to a limit, so
// that descriptors do not grow with the tree.
type dirCache struct {
	mu     sync.Mutex
	limit  int
	n      int
	newest *dirFD
	oldest *dirFD
}

// get returns n's descriptor with a reference, or nil.
func (c *dirCache) get(n *node) *dirFD {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := n.more.Load().cached
	if d == nil {
		return nil
	}
	d.refs++
	if c.newest != d {
		c.unlink(d)
		c.push(d)
	}
	return d
}

// put adds a descriptor of n and returns it with a reference. If there is one
// already, that is returned and fd is closed.
func (c *dirCache) put(n *node, fd int) *dirFD {
	var doomed []int
	c.mu.Lock()
	d := n.more.Load().cached
	if d != nil {
		doomed = append(doomed, fd)
		d.refs++
	} else {
		d = &dirFD{cache: c, node: n, fd: fd, refs: 1}
		n.more.Load().cached = d
		c.push(d)
		for old := c.oldest; c.n > c.limit && old != nil && old != d; {
			next := old.newer
			if c.evict(old) {
				doomed = append(doomed, old.fd)
			}
			old = next
		}
	}
	c.mu.Unlock()
	for _, fd := range doomed {
		unix.Close(fd)
	}
	return d
}

// drop forgets n's descriptor and, if nobody uses it, adds it to those that the
// caller is to close.
func (c *dirCache) drop(n *node, doomed []int) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := n.more.Load().cached; d != nil && c.evict(d) {
		doomed = append(doomed, d.fd)
	}
	return doomed
}

// dropAdrift forgets the descriptors of directories to which nothing leads any more:
// who is in them, or knows their names, has lost the place. The caller holds FS.ns
// alone.
func (c *dirCache) dropAdrift() {
	var all []*node
	c.mu.Lock()
	for d := c.newest; d != nil; d = d.older {
		all = append(all, d.node)
	}
	c.mu.Unlock()
	var doomed []int
	for _, n := range all {
		if n.adrift() {
			doomed = c.drop(n, doomed)
		}
	}
	for _, fd := range doomed {
		unix.Close(fd)
	}
}

// evict takes d out and reports whether its descriptor is to be closed now.
func (c *dirCache) evict(d *dirFD) bool {
	c.unlink(d)
	d.node.more.Load().cached = nil
	d.evicted = true
	return d.refs == 0
}

func (c *dirCache) push(d *dirFD) {
	d.older, d.newer = c.newest, nil
	if c.newest != nil {
		c.newest.newer = d
	}
	c.newest = d
	if c.oldest == nil {
		c.oldest = d
	}
	c.n++
}

func (c *dirCache) unlink(d *dirFD) {
	if d.newer != nil {
		d.newer.older = d.older
	} else {
		c.newest = d.older
	}
	if d.older != nil {
		d.older.newer = d.newer
	} else {
		c.oldest = d.newer
	}
	d.newer, d.older = nil, nil
	c.n--
}

// dir returns an open descriptor of a directory. The caller holds FS.ns, so
// that no name on the way changes.
func (b *backing) dir(n *node) (*dirFD, error) {
	if d := b.dirs.get(n); d != nil {
		return d, nil
	}
	p, err := b.place(n)
	if err != nil {
		return nil, err
	}
	defer p.done()
	if p.name == "" {
		fd, err := dup(p.fd)
		if err != nil {
			return nil, err
		}
		return b.dirs.put(n, fd), nil
	}
	fd, err := openAt(p.fd, p.name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil || n.tab.identityOf(&st) != n.key() {
		unix.Close(fd)
		return nil, errors.Join(err, unix.ESTALE)
	}
	return b.dirs.put(n, fd), nil
}

// place returns where n is. The caller holds FS.ns and calls done.
func (b *backing) place(n *node) (place, error) { return b.placeAt(n.location()) }

func (b *backing) placeAt(parent *node, name string, fd int) (place, error) {
	switch {
	case fd >= 0:
		return place{fd: fd}, nil
	case parent == nil:
		return place{}, unix.ESTALE
	}
	d, err := b.dir(parent)
	if err != nil {
		return place{}, err
	}
	return place{fd: d.fd, name: name, ref: d}, nil
}
