//go:build linux

package procid

import (
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Self returns the ID of the calling process.
func Self() ID {
	id := ID{Pid: os.Getpid()}
	if st, err := readStat(id.Pid); err == nil {
		id.Start = st.start
	}
	return id
}

// Deafen has the connector lose events, as it would on a machine where a great
// many processes end while the daemon does not run, until listen is called.
func (r *Resolver) Deafen() (listen func()) {
	c := &r.connector
	c.mu.Lock()
	unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0) // the least there is
	return func() {
		setBacklog(c.fd)
		c.mu.Unlock()
	}
}

// An ExitListener hears of the ends of threads beside a resolver.
type ExitListener int

func ListenExits() (ExitListener, error) {
	fd, err := openConnector()
	return ExitListener(fd), err
}

func (l ExitListener) Close() { hangUp(int(l)) }

// Await waits until so many threads of a process have ended, its first one among
// them.
func (l ExitListener) Await(pid, threads int) error {
	var buf [256]byte
	for first := false; threads > 0 || !first; {
		b, err := receive(int(l), buf[:])
		switch {
		case err == unix.EAGAIN:
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(l), Events: unix.POLLIN}}, -1)
			if err != nil && err != unix.EINTR {
				return err
			}
		case err != nil:
			return err
		case b != nil && what(b) == procEventExit && parseExit(b).tgid == pid:
			threads--
			first = first || parseExit(b).pid == pid
		}
	}
	return nil
}

// Blind has the kernel not show how processes end.
func (r *Resolver) Blind() { r.kernel.blind = true }

// ParseStat is parseStat for the tests outside of the package.
func ParseStat(b []byte) (state byte, ppid int, start uint64, code int, err error) {
	st, err := parseStat(b)
	return st.state, st.ppid, st.start, st.code, err
}

// ParseStatus is parseStatus.
func ParseStatus(b []byte) (name string, tgid int, euid uint32, nsPid int, err error) {
	st, err := parseStatus(b)
	return st.name, st.tgid, st.euid, st.nsPid, err
}

// ParseCgroup is parseCgroup.
func ParseCgroup(b []byte) string { return parseCgroup(b) }

// IsReaperName is isReaperName.
func IsReaperName(name string) bool { return isReaperName(name) }

// FreshTime is freshTime.
const FreshTime = freshTime

// LookLate has a watched process not be looked at for an hour, unless it is suspected.
func (r *Resolver) LookLate(id ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.groups[id].look = monotonic() + time.Hour
}

// LookedNow has it that somebody has seen a moment ago that a process is no husk.
func (r *Resolver) LookedNow(id ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.groups[id]; g != nil {
		g.looked.Store(int64(monotonic()))
	}
}

// Deaf has the connector not be opened, whatever the kernel offers.
func (r *Resolver) Deaf() {
	c := &r.connector
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tried, c.failed = true, errDeaf
}

// OnlyZombies is onlyZombies.
func OnlyZombies(pid int) bool { return onlyZombies(pid) }

// IsZombie is isZombie for the first thread.
func IsZombie(pid int) bool { return isZombie(pid, strconv.Itoa(pid)) }

// Withhold has nobody find out for a while which process has a pid: whoever wants
// to know waits for that.
func (r *Resolver) Withhold(pid int) (tell func()) {
	f := &flight{done: make(chan struct{})}
	l := &r.looks
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flights = map[int]*flight{pid: f}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.flights, pid)
		close(f.done)
	}
}

// Keep has every look seem to wait in the kernel if it is not over soon. At most so
// many may do so.
func (r *Resolver) Keep(most int) {
	r.turns.state, r.turns.most = func(int) byte { return 'D' }, most
}

// Births is what a resolver knows of who made whom, without a kernel.
type Births struct{ b births }

// NewBirths begins at that time.
func NewBirths(since uint64) *Births {
	return &Births{births{since: since, latest: make(map[int]*birth), left: make(map[int]leaf), full: 1 << 30}}
}

// Note takes in that a thread was made, or has ended.
func (b *Births) Note(at uint64, pid, tid, maker int, exit bool) {
	b.b.note(taskEvent{at: at, pid: pid, tid: tid, maker: maker, exit: exit})
}

// See tells that p lives.
func (b *Births) See(p *Process) { b.b.known(p.id.Pid).is(p) }

// Above returns the nearest of those from whom the process with a pid descends who
// was seen, or 0, and the pid of one that has to be.
func (b *Births) Above(pid int) (seen ID, unseen int) {
	x := b.b.known(pid)
	if x.proc != nil {
		return x.proc.id, 0
	}
	p, _, m := b.b.above(x)
	if p != nil {
		seen = p.id
	}
	if m != nil {
		unseen = m.pid
	}
	return seen, unseen
}

// Sweep forgets the dead, and returns how many it knows then.
func (b *Births) Sweep() int {
	b.b.full = 0
	b.b.sweep()
	return len(b.b.latest)
}

// Fits reports whether a process with that start time may be the latest with its pid.
func (b *Births) Fits(id ID) bool { return b.b.fits(b.b.known(id.Pid), id.Start) }

// Begin begins the births anew, as if some were lost, and reports how often it was
// done.
func (r *Resolver) Begin() int {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leave()
	r.openBirthsLocked()
	return b.epoch
}

// SwitchOff has a processor tell nothing any more, as one that was switched off and on.
func (r *Resolver) SwitchOff(number int) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	unix.IoctlSetInt(b.rings.all[number%len(b.rings.all)].fd, unix.PERF_EVENT_IOC_DISABLE, 0)
}

// A TestRing is the buffer of a processor.
type TestRing struct{ g ring }

// NewTestRing has room for that many records.
func NewTestRing(records int) *TestRing {
	return &TestRing{ring{mem: make([]byte, os.Getpagesize()+records*recordSize)}}
}

// Add has the kernel write something.
func (r *TestRing) Add(b []byte) {
	p, data := r.g.page(), r.g.data()
	for i := range b {
		data[(p.Data_head+uint64(i))%uint64(len(data))] = b[i]
	}
	p.Data_head += uint64(len(b))
}

// Read returns how many events there were up to a time.
func (r *TestRing) Read(now uint64) (pids []int, ok bool) {
	events, ok := r.g.read(nil, now)
	for _, ev := range events {
		pids = append(pids, ev.pid)
	}
	return pids, ok
}

// Growth returns how much the kernel has written, and whether that tells of all that it
// had to write.
func (r *TestRing) Growth() (size uint64, ok bool) {
	s := rings{all: []ring{r.g}}
	return s.growth()
}

// ParseCPUs is parseCPUs.
func ParseCPUs(list string) ([]int, error) { return parseCPUs(list) }

// Fill has the kernel write records until one is lost, and reports that to lost.
func (r *TestRing) Fill(record []byte, lost *atomic.Bool) {
	p, data := r.g.page(), r.g.data()
	size := uint64(len(data))
	for {
		head := p.Data_head // nobody else writes it
		if size-(head-atomic.LoadUint64(&p.Data_tail)) <= uint64(len(record)) {
			lost.Store(true)
			return
		}
		copy(data[head%size:], record)
		atomic.StoreUint64(&p.Data_head, head+uint64(len(record)))
	}
}

// Now returns the start time of a process that begins now.
func Now() uint64 { return ticks(boottime()) }

// See has a thread seen, of a process with a pid and a start time for which a pidfd stands,
// and returns the ID of that.
func (r *Resolver) See(tid uint32, id ID, pidfd int) (ID, error) {
	fd, err := unix.FcntlInt(uintptr(pidfd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return ID{}, err
	}
	s := &sighting{group: fd, thread: -1, id: id}
	r.tellApart(s)
	g, ok := r.attach(tid, s, nil)
	if !ok {
		g, _ = r.attach(tid, s, &Process{id: s.id, from: r})
	}
	return r.unpin(g).id, nil
}

// Moment returns a number that is the same only as long as no thread is made, or 0.
func (r *Resolver) Moment() uint64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.momentLocked()
}

// Renumber has the processors be others than those that are followed.
func (r *Resolver) Renumber() {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	b.rings.cpus = "none"
	r.numbers.read.Store(int64(time.Since(r.numbers.began) - listTime - 1))
}

// AskedTo is how often the moment is asked for after a pause until it can be said, and
// 0 where it never can: nobody tells which threads are made, or there are too many
// processors.
func (r *Resolver) AskedTo() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if s := r.numbers.rings; s != nil && len(s.all) <= numbersMost {
		return wholeWorth * len(s.all)
	}
	return 0
}

// Follows reports whether all processors tell which threads are made there.
func (r *Resolver) Follows() bool {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rings != nil && b.rings.whole()
}
