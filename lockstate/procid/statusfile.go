//go:build linux

package procid

import (
	"os"
	"strings"
)

// A Status is the text of /proc/TID/status, see proc_pid_status(5), for those who
// want more of it than this package does.
type Status string

// ReadStatus reads that of a process or thread, also while it is in execve(2).
func ReadStatus(tid int) (Status, error) {
	b, err := os.ReadFile(procPath(tid, "status"))
	return Status(b), err
}

// Field returns what a line says, "" if there is none: several words have tabs or
// blanks in between. The kernel escapes newlines in the name of the program, so no
// line can be forged.
func (s Status) Field(name string) string {
	for line := range strings.Lines(string(s)) {
		if value, ok := strings.CutPrefix(line, name); ok && strings.HasPrefix(value, ":") {
			return strings.TrimSpace(value[1:])
		}
	}
	return ""
}
