package fs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

const (
	// maxCommand bounds a line written to ctl, in bytes. The longest path has room,
	// with each of its bytes escaped, and all options.
	maxCommand = 32 << 10
	// maxCommands bounds what is written at once.
	maxCommands = 64 << 10
)

// A ctl is an open ctl file. What is written is carried out in the write, a
// command a line, and the write fails with the errno of the first that does; a
// read tells more of the last one.
type ctl struct {
	fs  *FS
	uid uint32 // who opened it

	mu     sync.Mutex
	answer []byte
	watch  *watch // the read waits for it

	// A write that was cut off when the daemon was replaced comes again. Of
	// that one, so many bytes are carried out.
	unique uint64
	done   int
}

// A watch is a lock that a descriptor follows to its end.
type watch struct {
	answer lockstate.Answer
	ended  <-chan struct{}
	how    func() lockstate.Ending
}

func newCtl(fs *FS, in *fuse.OpenIn) (controlFile, error) {
	uid, err := fs.commanderOf(&in.InHeader)
	return &ctl{fs: fs, uid: uid}, err
}

func (f *ctl) close() {}

func (f *ctl) write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) fuse.Status {
	uid, err := f.fs.commanderOf(&in.InHeader)
	if err != nil {
		return f.fail(syscall.Errno(statusOf(err)))
	}
	if uid != f.uid || uid == procid.NoID {
		// A program with another user's rights, whose output somebody has
		// sent here, lends them to nobody.
		return f.fail(unix.EPERM)
	}
	if len(data) > maxCommands {
		return f.fail(unix.E2BIG)
	}
	f.mu.Lock()
	if f.unique == in.Unique {
		data = data[min(f.done, len(data)):]
	} else {
		f.unique, f.done = in.Unique, 0
	}
	f.mu.Unlock()
	for line := range bytes.Lines(data) {
		if len(line) > maxCommand {
			return f.fail(unix.E2BIG)
		}
		s := strings.TrimSuffix(string(line), "\n")
		if strings.TrimSpace(s) == "" {
			f.mu.Lock()
			f.done += len(line)
			f.mu.Unlock()
			continue
		}
		c := &command{fs: f.fs, cancel: cancel, header: &in.InHeader, uid: uid}
		status := c.run(s)
		if status != fuse.OK {
			c.answer.Error = unix.ErrnoName(syscall.Errno(status))
			if c.answer.Message == "" {
				c.answer.Message = syscall.Errno(status).Error()
			}
			c.watch = nil
		}
		f.mu.Lock()
		f.answer, f.watch = encode(c.answer), c.watch
		if status == fuse.OK {
			f.done += len(line)
		}
		f.mu.Unlock()
		if status != fuse.OK {
			return status
		}
	}
	return fuse.OK
}

// fail is the end of a write of which no command is carried out (any more). A read tells
// of that, and not of the command before.
func (f *ctl) fail(errno syscall.Errno) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer, f.watch = encode(lockstate.Answer{Error: unix.ErrnoName(errno), Message: errno.Error()}), nil
	return fuse.Status(errno)
}

func (f *ctl) read(cancel <-chan struct{}, in *fuse.ReadIn) ([]byte, fuse.Status) {
	f.mu.Lock()
	answer, w := f.answer, f.watch
	f.mu.Unlock()
	if w == nil {
		return part(answer, in), fuse.OK
	}
	if !isClosed(w.ended) {
		leave, err := f.fs.control.parked.enter(f.fs.userOf(&in.InHeader), 1)
		if err != nil {
			return nil, statusOf(err)
		}
		defer leave()
		select {
		case <-w.ended:
		case <-cancel:
			return nil, fuse.EINTR
		case <-f.fs.control.shutting:
			return nil, fuse.Status(unix.ESHUTDOWN)
		}
	}
	a, how := w.answer, w.how()
	a.Ended, a.By, a.Why = how.Reason, how.By, how.Why
	answer = encode(a)
	f.mu.Lock()
	if f.watch == w {
		f.answer, f.watch = answer, nil
	}
	f.mu.Unlock()
	return part(answer, in), fuse.OK
}

// encode returns v as a line of JSON.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return []byte("{}\n") // of a value that cannot be encoded; none is written here
	}
	return escaped(b.Bytes())
}

// escaped returns a line of JSON with what a terminal obeys, or does not show, as escapes:
// JSON lets DEL, the controls of U+0080 to U+009F and marks of direction through, by
// which a name could hide another's row from who reads it with cat(1) (§9).
func escaped(line []byte) []byte {
	i := slices.IndexFunc(line, func(c byte) bool { return c >= 0x7f })
	if i < 0 {
		return line
	}
	out := append(make([]byte, 0, len(line)+64), line[:i]...)
	for _, r := range string(line[i:]) {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
