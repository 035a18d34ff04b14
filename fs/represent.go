package fs

import (
	"slices"
	"sync"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A member is who may stand for a scope that owns locks; busy: those that are left
// can't be looked at now.
type member struct {
	proc *procid.Process
	busy bool
}

// represent has p stand for the scope that owns a lock (H3), and reports false if
// that lock is no more.
func (fs *FS) represent(l lockstate.Lock, p *procid.Process) bool {
	ended, ok := fs.table.Represent(l.Token, p)
	if !ok {
		return false
	}
	if ended != nil {
		fs.logReleased(*ended, lockstate.Unlocked)
		return true
	}
	if err := fs.watch(p); err != nil {
		fs.log.Warn("the end of a lock's scope may be noticed late", "dir", l.Path, "pid", p.ID().Pid, "err", err)
	}
	return true
}

// unrepresented are locks of scopes whose members are all in execve(2), so that
// nobody can be told to stand for them; and those of which it can't be said yet what
// becomes of them, for want of descriptors or memory.
type unrepresented struct {
	tokens sync.Map               // their tokens
	owners map[procid.ID][]uint64 // the same by the dead owner; protected by FS.reapMu
	over   bool                   // likewise: nobody looks again
}

// representTime is how soon the members are looked at again.
const representTime = 100 * time.Millisecond

// representLater leaves locks to their dead owner for a while. The caller holds
// FS.reapMu.
func (fs *FS) representLater(id procid.ID, how procid.Exit, tokens []uint64) {
	u := &fs.unrepresented
	for _, t := range tokens {
		u.tokens.Store(t, nil)
	}
	old, known := u.owners[id]
	for _, t := range old {
		if !slices.Contains(tokens, t) {
			u.tokens.Delete(t)
		}
	}
	if u.owners == nil {
		u.owners = make(map[procid.ID][]uint64)
	}
	if u.owners[id] = tokens; known || u.over {
		return
	}
	time.AfterFunc(representTime, func() {
		fs.reapMu.Lock()
		defer fs.reapMu.Unlock()
		for _, t := range u.owners[id] {
			u.tokens.Delete(t)
		}
		delete(u.owners, id)
		if !u.over && (fs.table.Owns(id) || fs.cands.has(id)) {
			fs.carryOut(id, how)
		}
	})
}

// carryOutLater leaves all locks of a dead process to it for a while. The caller holds
// FS.reapMu.
func (fs *FS) carryOutLater(id procid.ID, how procid.Exit) {
	var tokens []uint64
	for _, l := range fs.table.Owned(id) {
		tokens = append(tokens, l.Token)
	}
	fs.representLater(id, how, tokens)
}

// stopRepresenting ends that, and waits for what is under way.
func (fs *FS) stopRepresenting() {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.unrepresented.over = true
}
