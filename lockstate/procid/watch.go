//go:build linux

package procid

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Watch has fn called once as soon as the process is dead, also when it is dead
// already. Each death has a goroutine of its own, so fn may take its time; it may
// call the resolver, but not Close. Any number of watches on a process
// share a descriptor. Watch itself waits for nothing: on a process that is not in
// the cache, the watch begins as soon as that one can be looked at.
func (r *Resolver) Watch(id ID, fn func(ID, Exit)) error {
	if id.Pid <= 0 {
		return fmt.Errorf("watch %v: %w", id, ErrUnknown)
	}
	if !r.kernel.exits {
		r.listen() // without it, some statuses stay unknown: see KnowsExits
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return os.ErrClosed
	}
	if g := r.groups[id]; g != nil {
		return r.watchLocked(g, fn)
	}
	// It has to be looked at, which waits if it is in execve(2).
	if r.late[id] = append(r.late[id], fn); len(r.late[id]) == 1 {
		go r.watchLate(id)
	}
	return nil
}

// lateTime is how often a process is looked at whose watch can't begin yet: it or
// an ancestor is in execve(2), or there are no descriptors.
const lateTime = 100 * time.Millisecond

// watchLate begins watches on a process that is not in the cache. That it is dead
// can be seen without its ancestors.
func (r *Resolver) watchLate(id ID) {
	fd, err := -1, error(nil)
	defer func() {
		if fd >= 0 {
			unix.Close(fd)
		}
	}()
	for {
		g := r.pin(id)
		if g == nil && fd < 0 {
			fd, err = ask(r, id.Pid, impatient, nil, func() (int, error) { return openExact(id) }, nil)
		}
		dead := g == nil && (fd < 0 && isGone(err) || fd >= 0 && isOver(fd, id.Pid))
		done := r.beginLate(id, g, dead)
		if g != nil {
			r.unpin(g)
		}
		if done {
			return
		}
		again := time.After(lateTime)
		f := r.flight(id.Pid)
		select {
		case <-f.done:
			if g == nil && r.Process(id) != nil {
				continue
			}
		case <-again:
			continue
		}
		<-again
	}
}

// pin returns a process of the cache pinned, or nil.
func (r *Resolver) pin(id ID) *group {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.groups[id]
	if g != nil {
		g.pins++
	}
	return g
}

// beginLate begins the watches on a process that is pinned, or dead, and reports
// whether there is nothing left to do.
func (r *Resolver) beginLate(id ID, g *group, dead bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	fns := r.late[id]
	if r.closed || len(fns) == 0 {
		delete(r.late, id)
		return true
	}
	if dead {
		delete(r.late, id)
		r.wg.Go(func() {
			how := r.ExitOf(id)
			for _, fn := range fns {
				fn(id, how)
			}
		})
		return true
	}
	for g != nil && len(fns) > 0 && r.watchLocked(g, fns[0]) == nil {
		fns = fns[1:]
	}
	if r.late[id] = fns; len(fns) == 0 {
		delete(r.late, id)
	}
	return len(fns) == 0
}

func (r *Resolver) watchLocked(g *group, fn func(ID, Exit)) error {
	g.watches = append(g.watches, fn)
	if g.serial != 0 {
		return nil
	}
	r.serial++
	ev := event(r.serial)
	if err := unix.EpollCtl(r.epfd, unix.EPOLL_CTL_ADD, g.fd, &ev); err != nil {
		g.watches = g.watches[:len(g.watches)-1]
		return fmt.Errorf("watch %v: %w", g.proc.id, err)
	}
	g.serial = r.serial
	r.watched[g.serial] = g
	r.shelveLocked(g)
	if g.husk {
		r.diedLocked(g)
	}
	r.suspectLocked(g, huskTime)
	return nil
}

// Unwatch drops all watches of a process. A call that is under way already is
// not waited for.
func (r *Resolver) Unwatch(id ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.late[id] != nil {
		r.late[id] = []func(ID, Exit){} // watchLate finds out
	}
	if g := r.groups[id]; g != nil {
		r.unwatchLocked(g)
	}
}

func (r *Resolver) unwatchLocked(g *group) {
	g.watches = nil
	if g.serial == 0 {
		return
	}
	r.disarmLocked(g)
	r.freeLocked(g)
}

// disarmLocked ends the interest in the group's pidfd.
func (r *Resolver) disarmLocked(g *group) {
	unix.EpollCtl(r.epfd, unix.EPOLL_CTL_DEL, g.fd, nil) // cannot fail: it was added
	delete(r.watched, g.serial)
	g.serial = 0
}

func (r *Resolver) startWatcher() (err error) {
	if r.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create(2): %w", err)
	}
	if r.wakefd, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		unix.Close(r.epfd)
		return fmt.Errorf("eventfd(2): %w", err)
	}
	ev := event(0)
	if err = unix.EpollCtl(r.epfd, unix.EPOLL_CTL_ADD, r.wakefd, &ev); err != nil {
		unix.Close(r.epfd)
		unix.Close(r.wakefd)
		return fmt.Errorf("epoll_ctl(2): %w", err)
	}
	r.wg.Go(r.watch)
	r.wg.Go(r.lookForHusks)
	return nil
}

// stopWatcher ends all goroutines and closes what they used.
func (r *Resolver) stopWatcher() error {
	close(r.husks.stop)
	one := binary.NativeEndian.AppendUint64(nil, 1)
	if _, err := unix.Write(r.wakefd, one); err != nil {
		return fmt.Errorf("waking the watcher: %w", err)
	}
	r.wg.Wait()
	r.closeConnector()
	r.closeBirths()
	unix.Close(r.epfd)
	unix.Close(r.wakefd)
	return nil
}

// event carries a serial number, not a descriptor: an event may be delivered
// after its descriptor was closed and the number used for another.
func event(serial uint64) unix.EpollEvent {
	return unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(uint32(serial)), Pad: int32(uint32(serial >> 32))}
}

func serialOf(ev unix.EpollEvent) uint64 {
	return uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32
}

// watch waits for deaths. All that may take time happens on a goroutine a
// death, so that no exit delays another.
func (r *Resolver) watch() {
	var events [64]unix.EpollEvent
	for {
		n, err := unix.EpollWait(r.epfd, events[:], -1)
		if err != nil && err != unix.EINTR {
			panic(fmt.Sprintf("epoll_wait(2) on our own descriptor: %v", err))
		}
		for _, ev := range events[:max(n, 0)] {
			serial := serialOf(ev)
			switch serial {
			case 0:
				return
			case serialExits:
				r.hear()
			case serialBirths:
				r.hearBirths(ev.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0)
			default:
				r.died(serial)
			}
		}
	}
}

// died starts the end of a watch. The pidfd stays readable for ever, so the
// interest in it ends here.
func (r *Resolver) died(serial uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.watched[serial]; g != nil { // or it was unwatched since
		r.diedLocked(g)
	}
}

// diedLocked is died for a process that may not be watched.
func (r *Resolver) diedLocked(g *group) {
	if g.serial == 0 {
		return
	}
	r.disarmLocked(g)
	g.pins++
	r.wg.Go(func() { r.finish(g) })
}

// finish finds out how a process ended and calls its watches.
func (r *Resolver) finish(g *group) {
	e := r.exitStatus(g.proc.id, g.fd, g)
	r.mu.Lock()
	fns := g.watches // not before: an Unwatch meanwhile still counts
	g.watches = nil
	if r.closed {
		fns = nil
	}
	r.mu.Unlock()
	for _, fn := range fns {
		fn(g.proc.id, e)
	}
	r.unpin(g)
}
