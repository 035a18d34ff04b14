//go:build linux

package procid

import (
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"time"
)

// A husk is a dead process whose pidfd does not say so. A thread that a debugger
// traces stays in its group as a zombie until that one waits for it (ptrace(2)); if
// it is the first thread that does not, or another one, the group is not empty, and
// nobody is told: not the parent, and nobody who polls. A debugger that hangs waits
// for nobody.
//
// It is dead all the same: a thread of a process is made by another one of it, and
// none of them will run again.

const (
	// huskTime is when a watched process is looked at first, and then ever more
	// seldom, up to huskMost.
	huskTime = 250 * time.Millisecond
	huskMost = 2 * time.Second
	// huskEach is how often one of all is looked at, at the most, once they have been
	// for a while: a look takes some 15 µs of the processor.
	huskEach = 2 * time.Millisecond
	// suspectTime is when one is looked at that is likely to be dead in a moment.
	suspectTime = time.Millisecond
	// freshTime is for how long the answer to who asks is good: a refusal would cost
	// a third more if each looked.
	freshTime = 5 * time.Millisecond
)

// husks looks for those among the watched processes. It sleeps while there is none.
type husks struct {
	wake  chan struct{} // has room for one
	stop  chan struct{}
	until time.Duration // when it wakes by itself, by monotonic; 0: never. Guarded by Resolver.mu
}

// deadLocked reports whether a process whose descriptor is open is known to be dead.
func (g *group) deadLocked() bool { return g.husk || readable(g.fd) }

// isOver reports whether a process that is not in the cache is dead. fd is a pidfd of
// it.
func isOver(fd, pid int) bool { return readable(fd) || onlyZombies(pid) }

// isHuskLately is isHusk as it was within freshTime.
func (r *Resolver) isHuskLately(g *group) bool {
	now := monotonic()
	if last := g.looked.Load(); last != 0 && now-time.Duration(last) < freshTime {
		if g.asked.Swap(last) != last {
			r.lookBy(g, time.Duration(last)+freshTime) // whoever asks may wait for its death now
		}
		return false // or it would be known
	}
	if r.isHusk(g) {
		return true
	}
	g.looked.Store(int64(now))
	return false
}

// isHusk looks whether a process is one, whose pidfd was silent a moment ago.
// Nobody else can have its number but after its death, so that "yes" is right in
// any case.
func (r *Resolver) isHusk(g *group) bool {
	if !onlyZombies(g.proc.id.Pid) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.groups[g.proc.id] == g && !g.deadLocked() {
		// Still silent: it had its number all the time.
		g.husk = true
		r.diedLocked(g)
	}
	return true
}

// onlyZombies reports whether no thread of a process can run any more. It waits
// for nobody.
func onlyZombies(pid int) bool {
	if has, _ := HasMemory(pid); has || !isZombie(pid, strconv.Itoa(pid)) {
		return false // mostly
	}
	threads, err := threadsOf(pid)
	if err != nil || len(threads) == 0 {
		return false
	}
	// One that is gone by now may have made another before. The thread of an execve(2)
	// is alive, or gone since it is called the first one.
	for _, tid := range threads {
		if !isZombie(pid, tid) {
			return false
		}
	}
	// Nor was there another one, not listed and alive, when all these were dead. A list
	// ends early after one that is reaped meanwhile.
	again, err := threadsOf(pid)
	if err != nil || !slices.Equal(again, threads) {
		return false
	}
	st, err := readStatus(pid)
	return err == nil && st.threads == len(threads)
}

func threadsOf(pid int) ([]string, error) {
	fd, err := openProc(procPath(pid, "task"))
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "task")
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// isZombie reports whether a thread of a process has ended.
func isZombie(pid int, tid string) bool {
	var buf [4096]byte
	b, err := readProc(pid, "task/"+tid+"/status", buf[:])
	if err != nil {
		return false
	}
	st, err := parseStatus(b)
	return err == nil && st.tgid == pid && (st.state == 'Z' || st.state == 'X')
}

// Suspect has a watched process looked at in a moment: it is about to die, and may
// be a husk then. The pidfd tells of any other death sooner.
func (r *Resolver) Suspect(id ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.groups[id]; g != nil {
		r.suspectLocked(g, suspectTime)
	}
}

// suspectLocked has a process looked at after a time, and then after twice as long.
func (r *Resolver) suspectLocked(g *group, after time.Duration) {
	if g.serial == 0 {
		return
	}
	g.pause = max(after, suspectTime)
	g.look = monotonic() + after
	r.wakeLocked(g.look)
}

// lookBy has a watched process looked at no later than that.
func (r *Resolver) lookBy(g *group, at time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g.serial != 0 && at < g.look {
		g.look = at
		r.wakeLocked(at)
	}
}

// wakeLocked has the next look no later than that.
func (r *Resolver) wakeLocked(next time.Duration) {
	h := &r.husks
	if h.until != 0 && next >= h.until {
		return
	}
	h.until = next
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// lookForHusks looks at the watched processes, each when it is its time.
func (r *Resolver) lookForHusks() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		due, wait := r.dueForLook()
		for _, g := range due {
			r.isHusk(g)
			r.unpin(g)
		}
		if len(due) > 0 {
			continue // that took its time
		}
		if t.Stop(); wait > 0 {
			t.Reset(wait)
		}
		select {
		case <-r.husks.stop:
			return
		case <-r.husks.wake:
		case <-t.C:
		}
	}
}

// dueForLook returns whom to look at now, pinned, or else how long there is nobody;
// 0: until one is watched.
func (r *Resolver) dueForLook() (due []*group, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := &r.husks
	h.until = 0
	now, most := monotonic(), max(huskMost, time.Duration(len(r.watched))*huskEach)
	for _, g := range r.watched {
		if g.look <= now {
			due = append(due, g)
			g.pins++
			g.look = now + g.pause
			if g.pause >= huskTime {
				g.look -= g.look % g.pause // together with others
			}
			g.pause = min(2*g.pause, most)
		}
		if h.until == 0 || g.look < h.until {
			h.until = g.look
		}
	}
	if h.until != 0 {
		wait = max(h.until-now, suspectTime)
	}
	return due, wait
}
