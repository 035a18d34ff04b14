//go:build linux

package procid

import "golang.org/x/sys/unix"

// Deafen has the connector lose events, as it would on a machine where a great
// many processes end while the daemon does not run, until listen is called.
func (r *Resolver) Deafen() (listen func()) {
	r.connector.mu.Lock()
	unix.SetsockoptInt(r.connector.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0) // the least there is
	return r.connector.mu.Unlock
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
