package transport

import (
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// names are the kernel's names of requests, by opcode.
var names = [...]string{
	1: "lookup", "forget", "getattr", "setattr", "readlink", "symlink",
	8: "mknod", "mkdir", "unlink", "rmdir", "rename", "link", "open", "read", "write", "statfs", "release",
	20: "fsync", "setxattr", "getxattr", "listxattr", "removexattr", "flush", "init", "opendir", "readdir", "releasedir",
	"fsyncdir", "getlk", "setlk", "setlkw", "access", "create", "interrupt", "bmap", "destroy", "ioctl", "poll",
	"notify_reply", "batch_forget", "fallocate", "readdirplus", "rename2", "lseek", "copy_file_range",
	"setupmapping", "removemapping", "syncfs", "tmpfile", "statx",
}

// A tally counts requests by opcode; 0 is any that has no name.
type tally [len(names)]atomic.Uint64

func (t *tally) add(h *fuse.InHeader) {
	op := int(h.Opcode)
	if op >= len(t) || names[op] == "" {
		op = 0
	}
	t[op].Add(1)
}

// Requests tells how many requests have begun to be carried out, by name.
func (c *conn) Requests() map[string]uint64 {
	f := &c.inflight
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make(map[string]uint64)
	for op, name := range names {
		n := f.tally[op].Load()
		for s := range f.slots {
			if s.tally != &f.tally {
				n += s.tally[op].Load()
			}
		}
		if name == "" {
			name = "other"
		}
		if n > 0 {
			all[name] += n
		}
	}
	return all
}

// forLong prepares a slot for a thread that does one request after another.
func (f *inflight) forLong(s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.quick, s.tally = new(quick), new(tally)
}

// keepLocked keeps the count of a slot that goes.
func (f *inflight) keepLocked(s *slot) {
	if s.tally == &f.tally {
		return
	}
	for op := range s.tally {
		f.tally[op].Add(s.tally[op].Load())
	}
}
