//go:build linux

package procid

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rings are the buffers, one a processor, in which the kernel writes down each thread
// that is made, or ends: side-band records of perf_event_open(2), which take no
// sampling and no counter of the processor.
//
// The record of a thread is written by the one who makes it, before the thread may
// run (copy_process calls perf_event_fork before wake_up_new_task), and that of an end
// by the thread itself, before its number is free: so whatever a process does comes
// after its birth was written. The memory is there beforehand, so no record is lost
// but where a buffer is full, which can be seen; or where a processor was switched on,
// or off and on again, see whole. (The process events connector drops events
// without a word when the kernel is short of memory, and has each change of a user id
// cost something, those of our own threads too.)
//
// The time is that of CLOCK_BOOTTIME, which goes the same on all processors: who was
// caused to do something by another has the later time, or at least not the earlier.
type rings struct {
	cpus   string // which there are, as the kernel writes it
	online int    // a descriptor of the file with that
	epfd   int    // what tells when they fill up; -1: nothing
	all    []ring
}

type ring struct {
	fd  int
	mem []byte // a page that describes it, and the records
}

// A taskEvent is the making or the end of a thread, with numbers of the
// daemon's pid namespace, or 0.
type taskEvent struct {
	at       uint64 // CLOCK_BOOTTIME, ns
	pid, tid int
	maker    int // the pid of who made it
	exit     bool
}

const (
	recordLost = 2 // PERF_RECORD_LOST
	recordExit = 4 // PERF_RECORD_EXIT
	recordFork = 7 // PERF_RECORD_FORK
	recordSize = 32

	// All buffers together are to have some ringTotal bytes. One of them is no larger
	// than what every user may have for each processor (perf_event_mlock_kb), and has
	// room for 16384 records at the most.
	ringTotal = 8 << 20
	ringMost  = 512 << 10
	ringLeast = 32 << 10

	onlineFile = "/sys/devices/system/cpu/online"
)

// boottime is the clock of the records, in ns.
func boottime() uint64 {
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail
	return uint64(now.Nano())
}

var (
	errCoarse   = errors.New("the kernel's clock is too coarse")
	errNotSysfs = errors.New(onlineFile + " is not the kernel's")
)

// TryBirths reports why the kernel does not tell who makes which process, if that is
// so.
func TryBirths() error {
	s, err := openRings(-1)
	if err == nil {
		s.close()
	}
	return err
}

// openRings opens a buffer for each processor, and has epfd tell when they fill up.
func openRings(epfd int) (s *rings, err error) {
	var res unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_BOOTTIME, &res); err != nil || res.Nano() > 1000 {
		return nil, errCoarse
	}
	// Time namespaces may move what /proc says of a process's start.
	if ns, err := os.Readlink("/proc/self/ns/time"); err == nil && ns != "time:[4026531834]" {
		return nil, errors.New("in a time namespace of its own")
	}
	const tries = 4 // each but the first follows a change of the processors
	for range tries {
		if s, err = tryRings(epfd); err == nil || err != unix.ENODEV {
			break
		}
	}
	if err != nil && err != errNotSysfs {
		err = fmt.Errorf("perf_event_open(2): %w", err)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func tryRings(epfd int) (s *rings, err error) {
	s = &rings{online: -1, epfd: epfd}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.online, err = unix.Open(onlineFile, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return s, err
	}
	// In a container something else may be mounted there (lxcfs), which hides processors.
	var fs unix.Statfs_t
	if err = unix.Fstatfs(s.online, &fs); err != nil {
		return s, err
	}
	if fs.Type != unix.SYSFS_MAGIC {
		return s, errNotSysfs
	}
	if s.cpus, err = s.cpusNow(); err != nil {
		return s, err
	}
	cpus, err := parseCPUs(s.cpus)
	if err != nil {
		return s, err
	}
	size := min(max(ringTotal/len(cpus), ringLeast), ringMost)
	size = max(1<<(bits.Len(uint(size))-1), os.Getpagesize())
	for _, cpu := range cpus {
		if err = s.add(cpu, size); err != nil {
			return s, err
		}
	}
	if now, err := s.cpusNow(); err != nil || now != s.cpus {
		return s, cmp.Or(err, error(unix.ENODEV))
	}
	return s, nil
}

func (s *rings) add(cpu, size int) error {
	attr := unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_DUMMY,
		Size:        unix.PERF_ATTR_SIZE_VER5,
		Read_format: unix.PERF_FORMAT_TOTAL_TIME_ENABLED,
		Bits:        unix.PerfBitTask | unix.PerfBitUseClockID | unix.PerfBitWatermark,
		Clockid:     unix.CLOCK_BOOTTIME,
		Wakeup:      uint32(size / 4),
	}
	fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, os.Getpagesize()+size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return err
	}
	s.all = append(s.all, ring{fd, mem})
	if s.epfd < 0 {
		return nil
	}
	ev := event(serialBirths)
	return unix.EpollCtl(s.epfd, unix.EPOLL_CTL_ADD, fd, &ev)
}

func (s *rings) close() {
	for _, g := range s.all {
		if s.epfd >= 0 { // before it is unmapped, which passes for a hang-up
			unix.EpollCtl(s.epfd, unix.EPOLL_CTL_DEL, g.fd, nil)
		}
		unix.Munmap(g.mem)
		unix.Close(g.fd)
	}
	if s.online >= 0 {
		unix.Close(s.online)
	}
	s.all, s.online = nil, -1
}

func (s *rings) cpusNow() (string, error) {
	var buf [4096]byte
	list, err := s.readCPUs(&buf)
	return string(list), err
}

func (s *rings) readCPUs(buf *[4096]byte) ([]byte, error) {
	n, err := unix.Pread(s.online, buf[:], 0)
	return bytes.TrimSpace(buf[:max(n, 0)]), err
}

// sameCPUs reports whether the processors that are switched on now are those with a buffer.
func (s *rings) sameCPUs() bool {
	var buf [4096]byte
	list, err := s.readCPUs(&buf)
	return err == nil && string(list) == s.cpus
}

// growth returns how much was written into the buffers so far, in bytes. It is not ok
// where some may not have been, as one is half full: it costs no system call.
func (s *rings) growth() (size uint64, ok bool) {
	ok = true
	for i := range s.all {
		g := &s.all[i]
		p := g.page()
		head, tail := atomic.LoadUint64(&p.Data_head), atomic.LoadUint64(&p.Data_tail)
		ok = ok && head-tail <= uint64(len(g.data()))/2
		size += head
	}
	return size, ok
}

// parseCPUs reads a list such as "0-3,8".
func parseCPUs(list string) (cpus []int, err error) {
	for part := range strings.SplitSeq(list, ",") {
		from, to, several := strings.Cut(part, "-")
		if !several {
			to = from
		}
		a, errA := strconv.Atoi(from)
		z, errZ := strconv.Atoi(to)
		if errA != nil || errZ != nil || a < 0 || z < a || z > 1<<16 {
			return nil, fmt.Errorf("%s says %q", onlineFile, list)
		}
		for c := a; c <= z; c++ {
			cpus = append(cpus, c)
		}
	}
	return cpus, nil
}

// whole reports whether all processors still write all down. Where one was switched
// off meanwhile, its buffer stays shut, so its time does not go on.
func (s *rings) whole() bool {
	if !s.sameCPUs() {
		return false
	}
	first := make([]uint64, len(s.all))
	for i := range s.all {
		first[i] = s.all[i].enabled()
	}
	for i := range s.all {
		if s.all[i].enabled() <= first[i] {
			return false
		}
	}
	return true
}

// shut reports whether a buffer is for good.
func (s *rings) shut() bool {
	for i := range s.all {
		p := []unix.PollFd{{Fd: int32(s.all[i].fd)}}
		if n, err := unix.Poll(p, 0); err == nil && n > 0 && p[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0 {
			return true
		}
	}
	return false
}

// enabled returns for how long the processor has written, in ns.
func (g *ring) enabled() uint64 {
	var v struct{ count, enabled uint64 }
	n, err := unix.Read(g.fd, unsafe.Slice((*byte)(unsafe.Pointer(&v)), unsafe.Sizeof(v)))
	if err != nil || n != int(unsafe.Sizeof(v)) {
		return 0
	}
	return v.enabled
}

func (g *ring) page() *unix.PerfEventMmapPage {
	return (*unix.PerfEventMmapPage)(unsafe.Pointer(&g.mem[0]))
}

func (g *ring) data() []byte { return g.mem[os.Getpagesize():] }

// read takes out all that has happened up to now, in the order of time. It is not ok
// where some of it may be lost.
//
// A record may be written late, with a time before now. Whatever comes of what it
// tells, comes after it was written, and so after now: that is left for the next time,
// too.
func (s *rings) read(batch []taskEvent) (_ []taskEvent, ok bool) {
	now, sources := boottime(), 0
	for i := range s.all {
		before := len(batch)
		if batch, ok = s.all[i].read(batch, now); !ok {
			return batch[:0], false
		}
		if len(batch) > before {
			sources++
		}
	}
	if sources > 1 {
		slices.SortStableFunc(batch, func(a, b taskEvent) int { return cmp.Compare(a.at, b.at) })
	}
	return batch, true
}

func (g *ring) read(batch []taskEvent, now uint64) (_ []taskEvent, ok bool) {
	p, data := g.page(), g.data()
	size := uint64(len(data))
	head, first := atomic.LoadUint64(&p.Data_head), atomic.LoadUint64(&p.Data_tail)
	// Where there was no room for a record, and one of their loss, there was none for
	// any since.
	const room = 4 * recordSize
	if head-first > size-room {
		return batch, false
	}
	var wrapped [recordSize]byte
	tail := first
	for tail < head {
		b := data[tail%size:]
		if len(b) < recordSize {
			n := copy(wrapped[:], b)
			copy(wrapped[n:], data)
			b = wrapped[:]
		}
		kind := u32(b, 0)
		if kind == recordLost || binary.NativeEndian.Uint16(b[6:]) != recordSize {
			return batch, false
		}
		number := func(off int) int { return int(int32(u32(b, off))) }
		ev := taskEvent{pid: number(8), maker: number(12), tid: number(16), exit: kind == recordExit, at: binary.NativeEndian.Uint64(b[24:])}
		if ev.at > now {
			break
		}
		if kind == recordFork || kind == recordExit {
			batch = append(batch, ev)
		}
		tail += recordSize
	}
	atomic.StoreUint64(&p.Data_tail, tail)
	// It may have been full before that, and the kernel says so no sooner than with the
	// next record there.
	return batch, atomic.LoadUint64(&p.Data_head)-first <= size-room
}
