//go:build linux

package procid

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
