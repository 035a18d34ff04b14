package fs

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ControlDir is the name of the control directory in the root of a mount.
const ControlDir = ".stagefs"

// notInControl is the answer to whoever would change names in the control directory, or
// its own.
const notInControl = fuse.EPERM

// A control is the control directory or a file in it. What a file of text
// shows is made when it is opened, so that a reader sees one state of the
// table.
type control struct {
	id    uint64
	name  string
	mode  uint32
	show  func(*FS) []byte                             // a file of text
	open  func(*FS, *fuse.OpenIn) (controlFile, error) // a file that does more
	flags uint32                                       // for the kernel, of an open file
	dir   *controlDir
}

// A controlFile is an open control file. A read that has to wait ends when
// cancel is closed, or when the mount shuts down.
type controlFile interface {
	read(cancel <-chan struct{}, in *fuse.ReadIn) ([]byte, fuse.Status)
	write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) fuse.Status
	close()
}

// controlDir serves the control directory.
type controlDir struct {
	fs    *FS
	since time.Time
	files []*control // the directory itself first; the rest in listing order

	fresh atomic.Uint64 // how many node numbers were given to files

	mu       sync.Mutex
	opened   map[uint64]openControl // by handle
	nodes    map[uint64]openNode    // by number
	next     uint64
	shutting chan struct{} // closed when the mount is about to end (M4)

	parked bound // requests that wait
	bytes  bound // of open files of text
}

// An openControl is an open control file, and the number of its node.
type openControl struct {
	controlFile
	node uint64
}

// An openNode is how often a node is open, and the bytes of the text that was opened last.
type openNode struct{ opens, size int }

// firstControlHandle keeps the numbers of the control files' handles apart from
// all others.
const firstControlHandle = 1 << 63

// firstControl is the node number of the control directory.
const firstControl = 2

// controlIno is the inode number that the mount shows of a control file.
func controlIno(node uint64) uint64 { return 1<<63 | node }

// Each lookup of a file gives it a new node number: the kernel locks an inode while a
// write to it lasts, and nobody is to wait for another's wait; nor are the pages that
// sendfile(2) reads of a text to be those of an earlier one.
const (
	firstFresh = 1 << 62
	freshStep  = 1 << 8
)

func (d *controlDir) init(fs *FS) {
	d.fs, d.since, d.opened, d.next = fs, time.Now(), make(map[uint64]openControl), firstControlHandle
	d.nodes = make(map[uint64]openNode)
	d.shutting = make(chan struct{})
	d.parked.most, d.parked.mostUser, d.parked.full = maxParked, maxParkedUser, errParked
	d.bytes.most, d.bytes.mostUser, d.bytes.full = maxTexts, maxTextsUser, errTexts
	d.files = []*control{
		{name: ControlDir, mode: unix.S_IFDIR | 0o555},
		{name: "ctl", mode: unix.S_IFREG | 0o666, open: newCtl},
		{name: "denials", mode: unix.S_IFREG | 0o444, show: (*FS).showDenials},
		{name: "events", mode: unix.S_IFREG | 0o444, open: openEvents, flags: fuse.FOPEN_NONSEEKABLE | fuse.FOPEN_STREAM},
		{name: "locks", mode: unix.S_IFREG | 0o444, show: (*FS).showLocks},
		{name: "locks.json", mode: unix.S_IFREG | 0o444, show: (*FS).showLocksJSON},
		{name: "metrics", mode: unix.S_IFREG | 0o444, show: (*FS).showMetrics},
		{name: "quarantine", mode: unix.S_IFREG | 0o444, show: (*FS).showQuarantine},
		{name: "version", mode: unix.S_IFREG | 0o444, show: (*FS).showVersion},
	}
	for i, c := range d.files {
		c.id, c.dir = uint64(firstControl+i), d
	}
}

// shutDown ends what waits in a control file.
func (d *controlDir) shutDown() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.isShutting() {
		close(d.shutting)
	}
}

// isShutting reports whether the mount is about to end.
func (d *controlDir) isShutting() bool { return isClosed(d.shutting) }

// over is a channel that is closed.
var over = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// isClosed reports whether a channel is that nothing is sent to.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// node returns the control file with a node number, or nil.
func (d *controlDir) node(id uint64) *control {
	if id >= firstFresh {
		id = id % freshStep
	}
	if id < firstControl || id >= firstControl+uint64(len(d.files)) {
		return nil
	}
	return d.files[id-firstControl]
}

// lookup serves LOOKUP where it is the control directory's business; c is nil
// where there is no such file.
func (d *controlDir) lookup(h *fuse.InHeader, parent *node, name string) (c *control, ok bool) {
	if parent != nil {
		if d.fs.reserved(parent, name) {
			return d.files[0], true
		}
		return nil, false
	}
	if d.node(h.NodeId) == nil {
		return nil, false
	}
	for _, c := range d.files[1:] {
		if c.name == name {
			return c, true
		}
	}
	return nil, true
}

func (c *control) isDir() bool { return c.mode&unix.S_IFMT == unix.S_IFDIR }

func (c *control) fillAttr(a *fuse.Attr) {
	a.Ino, a.Mode, a.Nlink = controlIno(c.id), c.mode, 1
	a.Uid, a.Gid, a.Blksize = c.dir.fs.uid, c.dir.fs.gid, 4096
	now := time.Now()
	a.SetTimes(&now, &now, &c.dir.since)
}

func (c *control) fillEntry(out *fuse.EntryOut) {
	out.NodeId = c.id
	c.fillAttr(&out.Attr)
	if c.isDir() {
		out.SetEntryTimeout(c.dir.fs.nodes.validFor)
		return
	}
	out.NodeId += firstFresh + freshStep*c.dir.fresh.Add(1)
}

// getAttr is stat(2) of a node. What nobody has open shows no size, as in proc(5).
func (d *controlDir) getAttr(c *control, node uint64, a *fuse.Attr) {
	c.fillAttr(a)
	d.mu.Lock()
	defer d.mu.Unlock()
	a.Size = uint64(d.nodes[node].size)
	a.Blocks = (a.Size + 511) / 512 // or programs look for holes
}

// writable reports whether the file can be written to.
func (c *control) writable() bool { return c.mode&0o222 != 0 }

// setAttr lets a shell truncate the ctl file before it writes to it.
func (c *control) setAttr(in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if !c.writable() || in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		return notInControl
	}
	c.fillAttr(&out.Attr)
	return fuse.OK
}

func (c *control) openFile(in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	var f controlFile
	switch {
	case writes(in.Flags) && !c.writable():
		return fuse.EACCES
	case c.show != nil:
		text, err := c.dir.newText(c.show(c.dir.fs), c.dir.fs.userOf(&in.InHeader))
		if err != nil {
			return statusOf(err)
		}
		f = text
	case c.open != nil:
		var err error
		if f, err = c.open(c.dir.fs, in); err != nil {
			return statusOf(err)
		}
	default:
		return fuse.Status(unix.EISDIR)
	}
	d := c.dir
	d.mu.Lock()
	defer d.mu.Unlock()
	out.Fh = d.next
	d.next++
	if d.nodes[in.NodeId].opens == 0 {
		d.tellSize(in.NodeId, f)
	}
	d.add(out.Fh, f, in.NodeId)
	out.OpenFlags = fuse.FOPEN_DIRECT_IO | c.flags
	return fuse.OK
}

// add notes an open file. The mutex is held.
func (d *controlDir) add(fh uint64, f controlFile, node uint64) {
	d.opened[fh] = openControl{f, node}
	n := d.nodes[node]
	n.opens++
	if t, ok := f.(*controlText); ok {
		n.size = len(t.text)
	}
	d.nodes[node] = n
}

// tellSize makes the kernel, which holds a file that is not open to be empty, read with
// sendfile(2) and splice(2), too. Nobody has the node open, so that no page of it is being
// read. The mutex is held.
func (d *controlDir) tellSize(node uint64, f controlFile) {
	switch f := f.(type) {
	case *controlText:
		if last := len(f.text) - 1; last >= 0 {
			d.fs.kernel.NotifyStore(node, int64(last), f.text[last:])
		}
	case *eventReader:
		d.fs.kernel.NotifyStore(node, 1<<40, []byte{0}) // the read tells them to do otherwise
	}
}

func (d *controlDir) release(fh uint64) {
	d.mu.Lock()
	f, ok := d.opened[fh]
	if ok {
		delete(d.opened, fh)
		if n := d.nodes[f.node]; n.opens > 1 {
			d.nodes[f.node] = openNode{n.opens - 1, n.size}
		} else {
			delete(d.nodes, f.node)
		}
	}
	d.mu.Unlock()
	if ok {
		f.close()
	}
}

// known returns node numbers of control files that the kernel knows: of open ones.
func (d *controlDir) known(most int) (ids []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.nodes {
		if most--; most < 0 {
			break
		}
		if id != 0 { // see carriedControl
			ids = append(ids, id)
		}
	}
	return ids
}

func (d *controlDir) handle(fh uint64) controlFile {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.opened[fh].controlFile
}

func (d *controlDir) read(cancel <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
	f := d.handle(in.Fh)
	if f == nil {
		return nil, fuse.EBADF
	}
	b, status := f.read(cancel, in)
	return fuse.ReadResultData(b), status
}

func (d *controlDir) write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	f := d.handle(in.Fh)
	if f == nil {
		return 0, fuse.EBADF
	}
	if status := f.write(cancel, in, data); status != fuse.OK {
		return 0, status
	}
	return uint32(len(data)), fuse.OK
}

// lseek serves SEEK_DATA and SEEK_HOLE.
func (d *controlDir) lseek(in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	size := 0
	if t, ok := d.handle(in.Fh).(*controlText); ok {
		size = len(t.text)
	}
	return seekWhole(uint64(size), in, out)
}

// part returns what a read at an offset gets of content.
func part(content []byte, in *fuse.ReadIn) []byte {
	if in.Offset >= uint64(len(content)) {
		return nil
	}
	return content[in.Offset:min(in.Offset+uint64(in.Size), uint64(len(content)))]
}

// A controlText is an open file of text.
type controlText struct {
	text  []byte
	uid   uint32 // who opened it
	leave func() // gives back what it takes of controlDir.bytes; nil: nothing
}

// newText returns an open file of text, or an error if its user has too much open.
func (d *controlDir) newText(text []byte, uid uint32) (t *controlText, err error) {
	t = &controlText{text: text, uid: uid}
	if uid != 0 {
		t.leave, err = d.bytes.enter(uid, len(text))
	}
	return t, err
}

func (t *controlText) read(_ <-chan struct{}, in *fuse.ReadIn) ([]byte, fuse.Status) {
	return part(t.text, in), fuse.OK
}

func (t *controlText) write(<-chan struct{}, *fuse.WriteIn, []byte) fuse.Status { return fuse.EBADF }

func (t *controlText) close() {
	if t.leave != nil {
		t.leave()
	}
}

func (d *controlDir) readDir(in *fuse.ReadIn, add func(dirEntry) bool) fuse.Status {
	self := controlIno(firstControl)
	entries := []dirEntry{{name: ".", typ: unix.DT_DIR, ino: self}, {name: "..", typ: unix.DT_DIR, ino: self}}
	for _, c := range d.files[1:] {
		entries = append(entries, dirEntry{name: c.name, typ: unix.DT_REG, ino: controlIno(c.id)})
	}
	for i := in.Offset; i < uint64(len(entries)); i++ {
		entries[i].next = i + 1
		if !add(entries[i]) {
			break
		}
	}
	return fuse.OK
}
