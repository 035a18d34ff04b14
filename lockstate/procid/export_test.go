//go:build linux

package procid

import "golang.org/x/sys/unix"

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
