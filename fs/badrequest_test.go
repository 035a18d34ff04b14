package fs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// These numbers stand for what only a run knows.
const (
	someHandle = 0xfe00 // the first of those that were opened
	someNode   = 0xff00 // the first of those that were looked up
	somePid    = 0xff00 // the test's own
)

const (
	rawHeader = int(unsafe.Sizeof(fuse.InHeader{}))
	rawAnswer = int(unsafe.Sizeof(fuse.OutHeader{}))
	badTime   = 10 * time.Second
)

// named are the operations that come with names.
var named = map[uint32]bool{
	transport.OpLookup: true, transport.OpSymlink: true, transport.OpMknod: true, transport.OpMkdir: true, transport.OpUnlink: true, transport.OpRmdir: true, transport.OpRename: true, transport.OpLink: true, transport.OpSetXattr: true,
	transport.OpGetXattr: true, transport.OpRemoveXattr: true, transport.OpCreate: true, transport.OpRename2: true, transport.OpTmpfile: true,
}

// A rawKernel sends requests to a file system, byte for byte, through a socket in place of
// /dev/fuse.
type rawKernel struct {
	fuse.RawFileSystem // what is served now
	transport.Kernel   // what that was told to use

	fd int

	mu       sync.Mutex
	next     uint64
	waits    map[uint64]chan []byte // by number
	panicked string
}

func (k *rawKernel) TryLockw(in *fuse.LkIn) bool { return k.fs().TryLockw(in) }

func (k *rawKernel) fs() *FS { return k.RawFileSystem.(*FS) }

// String names it, as both that are embedded can.
func (k *rawKernel) String() string { return "stagefs" }

// A panicLog takes the log, and keeps what panics have left there.
type panicLog struct{ *rawKernel }

func (l panicLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if bytes.Contains(line, []byte("panic")) {
		l.panicked += string(line)
	}
	return len(line), nil
}

func startRawKernel(t testing.TB, first *FS) *rawKernel {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range pair {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20)
	}
	k := &rawKernel{RawFileSystem: first, fd: pair[0], next: 1, waits: make(map[uint64]chan []byte)}
	opts := first.mountOptions()
	opts.Logger = log.New(panicLog{k}, "", 0)
	init := fuse.InitIn{Major: 7, Minor: 45, MaxReadAhead: 1 << 17, Flags: ^uint32(0), Flags2: ^uint32(0)}
	init.Opcode, init.Unique, init.Length = transport.OpInit, 1, uint32(unsafe.Sizeof(init))
	if _, err := unix.Write(k.fd, (*[unsafe.Sizeof(init)]byte)(unsafe.Pointer(&init))[:]); err != nil {
		t.Fatal(err)
	}
	served, _, err := transport.Start(pair[1], transport.Options{
		FS: k, Mount: opts, Want: transport.Threads, Apart: firstFresh,
		Attach: func(to transport.Kernel) { k.Kernel = to },
		Files:  func() []uint64 { return k.fs().knownFiles() },
		Lines:  func() uint64 { return k.fs().inLine() },
	})
	if err != nil {
		t.Fatal(err)
	}
	go served.Serve()
	go k.hear()
	return k
}

// hear passes answers on. It ends with the process.
func (k *rawKernel) hear() {
	buf := make([]byte, 4<<20)
	for {
		n, err := unix.Read(k.fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n < rawAnswer {
			return
		}
		unique := binary.NativeEndian.Uint64(buf[8:])
		k.mu.Lock()
		if wait := k.waits[unique]; wait != nil {
			wait <- bytes.Clone(buf[:n])
			delete(k.waits, unique)
		}
		k.mu.Unlock()
	}
}

// send sends a request with another number, and returns that and where the answer comes.
func (k *rawKernel) send(req []byte) (unique uint64, answer <-chan []byte) {
	wait := make(chan []byte, 1)
	k.mu.Lock()
	k.next += 2
	unique = k.next
	k.waits[unique] = wait
	k.mu.Unlock()
	if len(req) >= 16 {
		binary.NativeEndian.PutUint64(req[8:], unique)
	}
	if len(req) > 0 {
		unix.Write(k.fd, req)
	}
	return unique, wait
}

// A badRun is one file system, and what was learnt of it.
type badRun struct {
	kernel  *rawKernel
	nodes   []uint64
	handles []uint64
	owners  []uint64 // of handles: their nodes
	pending map[uint64]<-chan []byte
}

// known puts into a request what was learnt.
func (r *badRun) known(req []byte) {
	put := func(at int) {
		v := binary.NativeEndian.Uint64(req[at:])
		if i := v - someNode; i < uint64(len(r.nodes)) {
			binary.NativeEndian.PutUint64(req[at:], r.nodes[i])
		}
		if i := v - someHandle; i < uint64(len(r.handles)) {
			binary.NativeEndian.PutUint64(req[at:], r.handles[i])
		}
	}
	put(16)
	if binary.NativeEndian.Uint32(req[32:]) == somePid {
		binary.NativeEndian.PutUint32(req[32:], uint32(os.Getpid()))
	}
	for at := rawHeader; at+8 <= len(req); at += 8 {
		put(at)
	}
}

// tame reports whether a request is one that the kernel may make, but for its form: it knows
// what a name is. Nor does it fill the disk.
func tame(op uint32, body []byte) bool {
	most := func(at int) {
		if len(body) >= at+8 {
			binary.NativeEndian.PutUint64(body[at:], binary.NativeEndian.Uint64(body[at:])&0xfffff)
		}
	}
	switch op {
	case transport.OpFallocate:
		most(16)
	case transport.OpCopyFileRange:
		most(40)
	}
	return !named[op] || !bytes.Contains(body, []byte("/")) && (op == transport.OpLookup || !bytes.Contains(body, []byte("..")))
}

func (r *badRun) do(req []byte) {
	op := uint32(0)
	if len(req) >= rawHeader {
		r.known(req)
		op = binary.NativeEndian.Uint32(req[4:])
		if !tame(op, req[rawHeader:]) {
			return
		}
	}
	unique, answer := r.kernel.send(req)
	switch {
	case len(req) < rawHeader, op == transport.OpForget, op == transport.OpInterrupt, op == transport.OpNotifyReply, op == transport.OpBatchForget: // have no answer
		return
	}
	select {
	case got := <-answer:
		r.learn(op, req, got)
	case <-time.After(50 * time.Millisecond):
		r.pending[unique] = answer
	}
}

func (r *badRun) learn(op uint32, req, got []byte) {
	node := binary.NativeEndian.Uint64(req[16:])
	at := func(off int) uint64 { return binary.NativeEndian.Uint64(got[rawAnswer+off:]) }
	if int32(binary.NativeEndian.Uint32(got[4:])) != 0 {
		return
	}
	entry := int(unsafe.Sizeof(fuse.EntryOut{}))
	switch op {
	case transport.OpLookup, transport.OpSymlink, transport.OpMknod, transport.OpMkdir, transport.OpLink:
		r.nodes = append(r.nodes, at(0))
	case transport.OpOpen, transport.OpOpenDir:
		r.handles, r.owners = append(r.handles, at(0)), append(r.owners, node)
	case transport.OpCreate, transport.OpTmpfile:
		r.nodes = append(r.nodes, at(0))
		r.handles, r.owners = append(r.handles, at(entry)), append(r.owners, at(0))
	}
}

// settle has all that waits come to an end.
func (r *badRun) settle(t *testing.T) {
	for unique, answer := range r.pending {
		r.kernel.send(raw(transport.OpInterrupt, 0, le(unique)))
		select {
		case <-answer:
		case <-time.After(badTime):
			t.Fatalf("request %d is not answered, though it was interrupted", unique)
		}
	}
}

// le is a number as the kernel writes it.
func le(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

func le32(v ...uint32) (b []byte) {
	for _, v := range v {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// raw is a request.
func raw(op uint32, node uint64, parts ...[]byte) []byte {
	body := bytes.Join(parts, nil)
	h := fuse.InHeader{Length: uint32(rawHeader + len(body)), Opcode: op, NodeId: node}
	h.Pid = somePid
	return append(bytes.Clone((*[unsafe.Sizeof(h)]byte)(unsafe.Pointer(&h))[:]), body...)
}

// script is several requests, as the fuzzer has them.
func script(reqs ...[]byte) (b []byte) {
	for _, r := range reqs {
		b = append(binary.NativeEndian.AppendUint16(b, uint16(len(r))), r...)
	}
	return b
}

func scripted(b []byte) (reqs [][]byte) {
	for len(b) >= 2 && len(reqs) < 64 {
		n := min(int(binary.NativeEndian.Uint16(b)), len(b)-2)
		reqs = append(reqs, bytes.Clone(b[2:2+n]))
		b = b[2+n:]
	}
	return reqs
}

// digest has all that a directory is, and what is in it.
func digest(t *testing.T, dir string) string {
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		content := []byte(nil)
		if d.Type().IsRegular() {
			if content, err = os.ReadFile(path); err != nil {
				return err
			}
		}
		n, _ := unix.Llistxattr(path, nil)
		fmt.Fprintf(&b, "%s %o %d:%d %d %d %v %x %d\n", path, st.Mode, st.Uid, st.Gid, st.Nlink, st.Size, st.Mtim, content, n)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// FuzzBadRequests: whatever comes from /dev/fuse, the daemon neither panics nor hangs,
// changes nothing in a directory that somebody else holds, and nothing outside of its own.
func FuzzBadRequests(f *testing.F) {
	const (
		d = someNode + iota
		x
		file
		link
		held
		heldFile
		ctlNode
		eventsNode
		made // by the script
	)
	const (
		xHandle = someHandle + iota
		fileHandle
		heldHandle
		ctl
		events
		_ // the holder's
		madeHandle
	)
	name := func(s ...string) []byte { return []byte(strings.Join(s, "\x00") + "\x00") }
	lock := func(h uint64, kind, flags uint32) []byte {
		return bytes.Join([][]byte{le(h), le(7), le(0), le(1<<63 - 1), le32(kind, somePid, flags, 0)}, nil)
	}
	setattr := func(valid uint32, h uint64) []byte {
		in := fuse.SetAttrIn{}
		in.Valid, in.Fh, in.Size, in.Mode = valid, h, 5, 0o100600
		return bytes.Clone((*[unsafe.Sizeof(in)]byte)(unsafe.Pointer(&in))[rawHeader:])
	}
	for _, s := range [][]byte{
		script(
			raw(transport.OpLookup, d, name("x")),
			raw(transport.OpLookup, 1, name(".stagefs")),
			raw(transport.OpLookup, 2, name("ctl")),
			raw(transport.OpLookup, d, name("..")),
			raw(transport.OpLookup, file, name("y")),
			raw(transport.OpLookup, d, []byte("x")),
		),
		script(
			raw(transport.OpCreate, held, le32(unix.O_CREAT|unix.O_RDWR, 0o644, 0, 0), name("new")),
			raw(transport.OpCreate, held, le32(unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644, 0, 0), name("devserver")),
		),
		script(
			raw(transport.OpCreate, d, le32(unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644, 0, 0), name("devserver")),
			raw(transport.OpWrite, made, le(madeHandle), le(0), le32(3, 0), le(0), le32(0, 0), []byte("abc")),
		),
		script(
			raw(transport.OpCreate, held, le32(unix.O_CREAT|unix.O_RDWR, 0o644, 0, 0), name("a.cand")),
			raw(transport.OpWrite, made, le(madeHandle), le(0), le32(3, 0), le(0), le32(0, 0), []byte("abc")),
			raw(transport.OpRead, made, le(madeHandle), le(0), le32(4096, 0), le(0), le32(0, 0)),
			raw(transport.OpLink, held, le(made), name("devserver")),
		),
		script(
			raw(transport.OpMknod, d, le32(unix.S_IFIFO|0o644, 0, 0, 0), name("fifo")),
			raw(transport.OpMknod, d, le32(unix.S_IFREG|0o644, 0, 0, 0), name("devserver")),
			raw(transport.OpTmpfile, d, le32(unix.O_RDWR, 0o644, 0, 0), name("#1")),
		),
		script(
			raw(transport.OpMkdir, d, le32(0o755, 0), name("sub")),
			raw(transport.OpRmdir, d, name("sub")),
			raw(transport.OpUnlink, d, name("x")),
			raw(transport.OpUnlink, held, name("x")),
			raw(transport.OpRmdir, held, name("devserver")),
			raw(transport.OpSymlink, d, name("l", "x")),
		),
		script(
			raw(transport.OpRename, d, le(held), name("x", "y")),
			raw(transport.OpRename2, d, le(d), le32(1, 0), name("x", "y")),
			raw(transport.OpRename2, d, le(d), le32(2, 0), name("y", "x")),
			raw(transport.OpRename2, held, le(d), le32(0, 0), name("x", "z")),
		),
		script(
			raw(transport.OpLink, d, le(x), name("hard")),
			raw(transport.OpLink, held, le(x), name("hard")),
			raw(transport.OpLink, d, le(heldFile), name("alias")),
			raw(transport.OpLink, d, le(file), name("devserver")),
		),
		script(
			raw(transport.OpOpen, x, le32(unix.O_RDWR, 0)),
			raw(transport.OpOpen, heldFile, le32(unix.O_WRONLY, 0)),
			raw(transport.OpOpen, link, le32(0, 0)),
			raw(transport.OpOpen, d, le32(0, 0)),
			raw(transport.OpOpenDir, file, le32(0, 0)),
		),
		script(
			raw(transport.OpRead, file, le(fileHandle), le(0), le32(1<<16, 0), le(0), le32(0, 0)),
			raw(transport.OpRead, file, le(fileHandle), le(1<<63), le32(1<<31, 0), le(0), le32(0, 0)),
			raw(transport.OpRead, file, le(0), le(0), le32(10, 0), le(0), le32(0, 0)),
		),
		script(
			raw(transport.OpWrite, file, le(fileHandle), le(0), le32(3, 0), le(0), le32(0, 0), []byte("abc")),
			raw(transport.OpWrite, heldFile, le(heldHandle), le(0), le32(3, 0), le(0), le32(0, 0), []byte("abc")),
			raw(transport.OpWrite, file, le(fileHandle), le(1<<63), le32(1<<30, 0), le(0), le32(0, 0), []byte("a")),
		),
		script(
			raw(transport.OpReadDir, d, le(0), le(0), le32(4096, 0), le(0), le32(0, 0)),
			raw(transport.OpReadDirPlus, d, le(0), le(1), le32(4096, 0), le(0), le32(0, 0)),
			raw(transport.OpReadDirPlus, d, le(fileHandle), le(1<<63), le32(24, 0), le(0), le32(0, 0)),
		),
		script(
			raw(transport.OpSetAttr, x, setattr(1<<3, 0)),
			raw(transport.OpSetAttr, heldFile, setattr(1<<3|1<<0, 0)),
			raw(transport.OpSetAttr, file, setattr(1<<3|1<<6, fileHandle)),
			raw(transport.OpSetAttr, held, setattr(1<<4|1<<5, 0)),
			raw(transport.OpSetAttr, file, setattr(^uint32(0), 0)),
		),
		script(
			raw(transport.OpGetAttr, x, le32(0, 0), le(0)),
			raw(transport.OpGetAttr, file, le32(1, 0), le(fileHandle)),
			raw(transport.OpGetAttr, 1<<61+5, le32(0, 0), le(0)),
			raw(transport.OpGetAttr, 4711, le32(0, 0), le(0)),
			raw(transport.OpStatx, file, le32(0, 0), le(0), le32(0, 0)),
		),
		script(
			raw(transport.OpSetXattr, file, le32(1, 0), name("user.a"), []byte("v")),
			raw(transport.OpGetXattr, file, le32(64, 0), name("user.a")),
			raw(transport.OpGetXattr, x, le32(64, 0), name("user.stagefs.owner")),
			raw(transport.OpListXattr, file, le32(64, 0)),
			raw(transport.OpRemoveXattr, file, name("user.a")),
			raw(transport.OpSetXattr, held, le32(1, 0), name("user.a"), []byte("v")),
		),
		script(
			raw(transport.OpSetlk, file, lock(fileHandle, unix.F_WRLCK, 1)),
			raw(transport.OpSetlkw, x, lock(xHandle, unix.F_RDLCK, 0)),
			raw(transport.OpGetlk, file, lock(fileHandle, unix.F_RDLCK, 0)),
			raw(transport.OpSetlk, file, lock(fileHandle, unix.F_UNLCK, 1)),
			raw(transport.OpSetlkw, held, lock(0, 77, 0)),
		),
		script(
			raw(transport.OpFallocate, file, le(fileHandle), le(0), le(4096), le32(0, 0)),
			raw(transport.OpFallocate, file, le(fileHandle), le(1<<63), le(1<<62), le32(3, 0)),
			raw(transport.OpLseek, file, le(fileHandle), le(0), le32(unix.SEEK_HOLE, 0)),
			raw(transport.OpLseek, file, le(fileHandle), le(1<<63), le32(99, 0)),
		),
		script(
			raw(transport.OpCopyFileRange, x, le(xHandle), le(0), le(file), le(fileHandle), le(0), le(4096), le(0)),
			raw(transport.OpCopyFileRange, x, le(xHandle), le(1<<63), le(heldFile), le(heldHandle), le(1<<63), le(1<<63), le(0)),
			raw(transport.OpCopyFileRange64, x, le(xHandle), le(0), le(file), le(fileHandle), le(0), le(1), le(0)),
		),
		script(
			raw(transport.OpIoctl, file, le(fileHandle), le32(0, 0x80087601), le(0), le32(0, 8)),
			raw(transport.OpIoctl, file, le(fileHandle), le32(0, 0x40086602), le(0), le32(8, 0), le(16)),
			raw(transport.OpIoctl, d, le(0), le32(1, 0x801c581f), le(0), le32(0, 28)),
			raw(transport.OpIoctl, 1, le(0), le32(0, 0), le(0), le32(1<<31, 1<<31)),
		),
		script(
			raw(transport.OpWrite, ctlNode, le(ctl), le(0), le32(10, 0), le(0), le32(0, 0), []byte("acquire d\n")),
			raw(transport.OpRead, ctlNode, le(ctl), le(0), le32(4096, 0), le(0), le32(0, 0)),
			raw(transport.OpWrite, ctlNode, le(ctl), le(0), le32(10, 0), le(0), le32(0, 0), []byte("release d\x00")),
		),
		script(
			raw(transport.OpRead, eventsNode, le(events), le(0), le32(4096, fuse.READ_LOCKOWNER), le(0), le32(0, 0)),
			raw(transport.OpRead, 4, le(events), le(1<<63), le32(4096, 0), le(0), le32(0, 0)),
			raw(transport.OpOpen, 6, le32(unix.O_WRONLY, 0)),
			raw(transport.OpSetAttr, 3, setattr(1<<3, 0)),
		),
		script(
			raw(transport.OpForget, x, le(1)),
			raw(transport.OpForget, x, le(1<<63)),
			raw(transport.OpBatchForget, 0, le32(2, 0), le(d), le(1), le(file), le(1<<62)),
			raw(transport.OpBatchForget, 0, le32(1<<31, 0), le(d), le(1)),
			raw(transport.OpGetAttr, d, le32(0, 0), le(0)),
			raw(transport.OpLookup, d, name("x")),
		),
		script(
			raw(transport.OpFlush, file, le(fileHandle), le32(0, 0), le(7)),
			raw(transport.OpRelease, file, le(fileHandle), le32(0, 2), le(7)),
			raw(transport.OpRelease, file, le(fileHandle), le32(0, 2), le(7)),
			raw(transport.OpRelease, x, le(0), le32(0, 0), le(0)),
			raw(transport.OpReleaseDir, d, le(0), le32(0, 0), le(0)),
			raw(transport.OpReleaseDir, d, le(0), le32(0, 0), le(0)),
		),
		script(
			raw(transport.OpFsync, file, le(fileHandle), le32(1, 0)),
			raw(transport.OpFsyncDir, d, le(0), le32(0, 0)),
			raw(transport.OpReadlink, link),
			raw(transport.OpReadlink, file),
			raw(transport.OpStatfs, 1),
			raw(transport.OpAccess, file, le32(2, 0)),
			raw(transport.OpPoll, file, le(fileHandle), le(0), le32(0, 0)),
			raw(transport.OpSyncfs, 1, le(0)),
			raw(transport.OpBmap, file, le(0), le32(0, 0)),
		),
		script(
			raw(transport.OpCreate, file, le32(unix.O_CREAT|unix.O_RDWR, 0o644, 0, 0), name("f")),
			raw(transport.OpMkdir, x, le32(0o755, 0), name("sub")),
			raw(transport.OpMknod, link, le32(unix.S_IFREG, 0, 0, 0), name("f")),
			raw(transport.OpSymlink, file, name("l", "x")),
			raw(transport.OpUnlink, x, name("x")),
			raw(transport.OpRmdir, x, name("x")),
			raw(transport.OpRename, d, le(file), name("x", "y")),
			raw(transport.OpRename2, file, le(d), le32(0, 0), name("x", "y")),
			raw(transport.OpLink, file, le(x), name("y")),
			raw(transport.OpTmpfile, x, le32(unix.O_RDWR, 0o644, 0, 0), name("#1")),
			raw(transport.OpReadDir, x, le(0), le(0), le32(4096, 0), le(0), le32(0, 0)),
		),
		script(
			raw(transport.OpInit, 0, le32(7, 45, 0, 0)),
			raw(transport.OpInterrupt, 0, le(5)),
			raw(transport.OpDestroy, 0),
			raw(transport.OpNotifyReply, 1, le(0), le(0), le32(0, 0)),
			raw(transport.OpSetupmapping, 1),
			raw(60, 1),
			raw(1<<31, 1),
			raw(104, 1),
			nil, []byte("short"),
			raw(transport.OpLookup, 1)[:20],
			raw(transport.OpLookup, 1),
		),
	} {
		f.Add(s)
	}
	var kernel *rawKernel
	holder := exec.Command("sleep", "infinity")
	if err := holder.Start(); err != nil {
		f.Skip(err)
	}
	f.Cleanup(func() {
		holder.Process.Kill()
		holder.Wait()
	})
	f.Fuzz(func(t *testing.T, requests []byte) {
		fs, top, dir := unmounted(t)
		if kernel == nil {
			kernel = startRawKernel(t, fs)
		}
		kernel.RawFileSystem = fs
		fs.events = new(eventLog)
		fs.setNames([]string{"devserver", "devserver.lock"}, nil, []string{"*.cand"})
		fs.attach(kernel.Kernel)
		fs.linger.start(fs)
		t.Cleanup(fs.linger.close)
		if err := fs.expiry.start(fs); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(fs.expiry.close)
		outside := filepath.Join(filepath.Dir(top), "outside")
		if err := os.MkdirAll(filepath.Join(top, "held"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{outside, filepath.Join(top, "file"), filepath.Join(top, "held", "x")} {
			if err := os.WriteFile(path, []byte("content"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("../outside", filepath.Join(top, "link")); err != nil {
			t.Fatal(err)
		}
		r := &badRun{kernel: kernel, pending: make(map[uint64]<-chan []byte)}
		r.nodes = []uint64{dir, lookedUp(t, fs, dir, "x")}
		for _, name := range []string{"file", "link", "held"} {
			r.nodes = append(r.nodes, lookedUp(t, fs, 1, name))
		}
		at := r.nodes[4]
		r.nodes = append(r.nodes, lookedUp(t, fs, at, "x"))
		open := func(node uint64, flags uint32) {
			in, out := fuse.OpenIn{Flags: flags}, fuse.OpenOut{}
			in.NodeId, in.Pid = node, uint32(os.Getpid())
			if status := fs.Open(nil, &in, &out); status != fuse.OK {
				t.Fatalf("open %d: %v", node, status)
			}
			r.handles, r.owners = append(r.handles, out.Fh), append(r.owners, node)
		}
		open(r.nodes[1], unix.O_RDONLY)
		open(r.nodes[2], unix.O_RDWR)
		open(r.nodes[5], unix.O_RDONLY)
		for _, name := range []string{"ctl", "events"} {
			r.nodes = append(r.nodes, lookedUp(t, fs, firstControl, name))
			open(r.nodes[len(r.nodes)-1], map[string]uint32{"ctl": unix.O_RDWR}[name])
		}
		create := fuse.CreateIn{Flags: unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY, Mode: 0o644}
		create.NodeId, create.Pid = at, uint32(holder.Process.Pid)
		made := fuse.CreateOut{}
		if status := fs.Create(nil, &create, "devserver", &made); status != fuse.OK {
			t.Fatal(status)
		}
		r.handles, r.owners = append(r.handles, made.Fh), append(r.owners, made.NodeId)
		before := digest(t, filepath.Join(top, "held")) + digest(t, outside)

		for _, req := range scripted(requests) {
			r.do(req)
		}
		r.settle(t)
		_, answer := kernel.send(raw(transport.OpStatfs, 1))
		select {
		case got := <-answer:
			if errno := int32(binary.NativeEndian.Uint32(got[4:])); errno != 0 {
				t.Errorf("statfs: %v", unix.Errno(-errno))
			}
		case <-time.After(badTime):
			t.Fatal("it serves no more")
		}
		for i, h := range r.handles {
			in := fuse.ReleaseIn{Fh: h}
			in.NodeId = r.owners[i]
			fs.Release(nil, &in)
			fs.ReleaseDir(&in)
		}
		if after := digest(t, filepath.Join(top, "held")) + digest(t, outside); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
		kernel.mu.Lock()
		defer kernel.mu.Unlock()
		if kernel.panicked != "" {
			t.Errorf("%s", kernel.panicked)
			kernel.panicked = ""
		}
		clear(kernel.waits)
	})
}
