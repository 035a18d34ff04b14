package fs

import (
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ControlDir is the name of the control directory in the root of a mount (§9).
const ControlDir = ".stagefs"

// A control is the control directory or a file in it. Its content is made when
// it is opened, so that a reader sees one state of the table.
type control struct {
	id   uint64
	name string
	mode uint32
	show func(*FS) []byte                              // for reading
	take func(*FS, *fuse.InHeader, []byte) fuse.Status // for writing
	dir  *controlDir
}

// controlDir serves the control directory.
type controlDir struct {
	fs    *FS
	since time.Time
	files []*control // the directory itself first; the rest in listing order

	mu   sync.Mutex
	open map[uint64][]byte
	next uint64
}

// firstControlHandle keeps the numbers of the control files' handles apart from
// all others.
const firstControlHandle = 1 << 63

// firstControl is the node number of the control directory.
const firstControl = 2

func (d *controlDir) init(fs *FS) {
	d.fs, d.since, d.open, d.next = fs, time.Now(), make(map[uint64][]byte), firstControlHandle
	d.files = []*control{
		{name: ControlDir, mode: unix.S_IFDIR | 0o555},
		{name: "ctl", mode: unix.S_IFREG | 0o666, take: (*FS).command, show: func(*FS) []byte { return nil }},
		{name: "denials", mode: unix.S_IFREG | 0o444, show: (*FS).showDenials},
		{name: "locks", mode: unix.S_IFREG | 0o444, show: (*FS).showLocks},
		{name: "locks.json", mode: unix.S_IFREG | 0o444, show: (*FS).showLocksJSON},
		{name: "metrics", mode: unix.S_IFREG | 0o444, show: (*FS).showMetrics},
		{name: "version", mode: unix.S_IFREG | 0o444, show: (*FS).showVersion},
	}
	for i, c := range d.files {
		c.id, c.dir = uint64(firstControl+i), d
	}
}

// node returns the control file with a node number, or nil.
func (d *controlDir) node(id uint64) *control {
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

func (c *control) fillAttr(a *fuse.Attr) {
	a.Ino, a.Mode, a.Nlink = 1<<63|c.id, c.mode, 1
	a.Uid, a.Gid, a.Blksize = c.dir.fs.uid, uint32(unix.Getegid()), 4096
	now := time.Now()
	a.SetTimes(&now, &now, &c.dir.since)
}

func (c *control) fillEntry(out *fuse.EntryOut) {
	out.NodeId = c.id
	out.SetEntryTimeout(validFor)
	c.fillAttr(&out.Attr)
}

// setAttr lets a shell truncate the ctl file before it writes to it.
func (c *control) setAttr(in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if c.take == nil || in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		return frozen
	}
	c.fillAttr(&out.Attr)
	return fuse.OK
}

func (c *control) open(in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if writes(in.Flags) && c.take == nil {
		return fuse.EACCES
	}
	if c.show == nil {
		return fuse.Status(unix.EISDIR)
	}
	content := c.show(c.dir.fs)
	d := c.dir
	d.mu.Lock()
	defer d.mu.Unlock()
	out.Fh = d.next
	d.next++
	d.open[out.Fh] = content
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (d *controlDir) release(fh uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, fh)
}

func (d *controlDir) read(in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	d.mu.Lock()
	content := d.open[in.Fh]
	d.mu.Unlock()
	if in.Offset >= uint64(len(content)) {
		return fuse.ReadResultData(nil), fuse.OK
	}
	end := min(in.Offset+uint64(in.Size), uint64(len(content)))
	return fuse.ReadResultData(content[in.Offset:end]), fuse.OK
}

func (d *controlDir) write(in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	c := d.node(in.NodeId)
	if c == nil || c.take == nil {
		return 0, fuse.EBADF
	}
	if status := c.take(d.fs, &in.InHeader, data); status != fuse.OK {
		return 0, status
	}
	return uint32(len(data)), fuse.OK
}

func (d *controlDir) readDir(in *fuse.ReadIn, add func(dirEntry) bool) fuse.Status {
	entries := []dirEntry{{name: ".", typ: unix.DT_DIR}, {name: "..", typ: unix.DT_DIR}}
	for _, c := range d.files[1:] {
		entries = append(entries, dirEntry{name: c.name, typ: unix.DT_REG, ino: 1<<63 | c.id})
	}
	for i, e := range entries {
		if uint64(i) < in.Offset {
			continue
		}
		if e.ino == 0 {
			e.ino = 1<<63 | firstControl
		}
		e.next = uint64(i + 1)
		if !add(e) {
			break
		}
	}
	return fuse.OK
}
