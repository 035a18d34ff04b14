//go:build linux

package tests

import (
	"bytes"
	"encoding/json"
	"os"
	"time"
)

// A lockRow is a row of locks.json.
type lockRow struct {
	Dir, Kind, Protocol, Cmd, Client, File string
	Scope, Why                             string
	TTL, Deadline                          float64
	DirBytes                               []byte `json:"dir_bytes"`
	Token                                  uint64
	Since                                  time.Time
	Pid                                    int
	Start                                  uint64
	UID                                    uint32
	Blockers                               []blocker
}

type blocker struct {
	Pid       int
	Start     uint64
	Cmd, Path string
}

type listing struct {
	Locks   []lockRow
	Waiters []struct {
		Dir string
		Pid int
	}
	Orphans  []struct{ Path string }
	Blockers []blocker
}

// Listing parses .stagefs/locks.json.
func (m *Mount) Listing() listing {
	m.t.Helper()
	b, err := os.ReadFile(m.control("locks.json"))
	mustDo(m.t, err)
	var l listing
	if err := json.Unmarshal(b, &l); err != nil {
		m.t.Fatalf("locks.json: %v\n%s", err, b)
	}
	return l
}

// Locks has the rows of locks.json by their directory.
func (m *Mount) Locks() map[string]lockRow {
	m.t.Helper()
	rows := map[string]lockRow{}
	for _, row := range m.Listing().Locks {
		if _, twice := rows[row.Dir]; twice && row.DirBytes == nil {
			// A child's explicit lock may stand in front of a row (A13).
			rows[row.Dir+" (behind)"] = row
			continue
		}
		rows[row.Dir] = row
	}
	return rows
}

// awaitFree waits until no lock stands on dir, as after its owner's death (R4).
func (m *Mount) awaitFree(dir string) {
	m.t.Helper()
	eventually(m.t, "no lock on "+dir, func() bool { _, held := m.Locks()[dir]; return !held })
}

// wantOwner reports an error unless pid holds an own row on dir.
func (m *Mount) wantOwner(dir string, pid int) {
	m.t.Helper()
	if row, held := m.Locks()[dir]; !held || row.Pid != pid {
		m.t.Errorf("lock on %s: pid %d (held: %v), want pid %d", dir, row.Pid, held, pid)
	}
}

// wantFree reports an error if dir has a row.
func (m *Mount) wantFree(dir string) {
	m.t.Helper()
	if row, held := m.Locks()[dir]; held {
		m.t.Errorf("lock on %s: %+v, want none", dir, row)
	}
}

// Ctl writes one line to the control file, as the test process (root, who
// mounted), and gives back the errno's name, "ok" for none.
func (m *Mount) Ctl(line string) string {
	m.t.Helper()
	f, err := os.OpenFile(m.control("ctl"), os.O_WRONLY, 0)
	mustDo(m.t, err)
	defer f.Close()
	_, err = f.Write([]byte(line))
	return errnoName(err)
}

// Denials parses .stagefs/denials.
func (m *Mount) Denials() []denial {
	m.t.Helper()
	b, err := os.ReadFile(m.control("denials"))
	mustDo(m.t, err)
	var all []denial
	for line := range bytes.Lines(b) {
		var d denial
		if err := json.Unmarshal(line, &d); err != nil {
			m.t.Fatalf("denials: %v in %q", err, line)
		}
		all = append(all, d)
	}
	return all
}

type denial struct {
	Time                               time.Time
	Op, Path, Cmd, Errno, Lock, Reason string
	Times, Pid                         int
	LockPid                            int `json:"lock_pid"`
	UID                                uint32
}
