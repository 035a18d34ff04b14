//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Spent is what something took of a daemon.
type Spent struct {
	// Requests are those that the kernel made of a stagefs, by kind.
	Requests map[string]int64 `json:"requests,omitempty"`
	// Own and System are the seconds of processors' time that the daemon took, in its own
	// code and in the kernel, as proc_pid_stat(5) has them.
	Own    float64 `json:"daemon_own_seconds,omitempty"`
	System float64 `json:"daemon_system_seconds,omitempty"`
}

func (s Spent) since(earlier Spent) Spent {
	more := Spent{Own: s.Own - earlier.Own, System: s.System - earlier.System}
	for kind, n := range s.Requests {
		if n > earlier.Requests[kind] {
			if more.Requests == nil {
				more.Requests = map[string]int64{}
			}
			more.Requests[kind] = n - earlier.Requests[kind]
		}
	}
	return more
}

// A meter tells what a daemon has spent since it began.
type meter struct {
	Pid     int    // 0: there is none
	Metrics string // a stagefs's file, "" for others
}

func (in *instance) meter() meter {
	var m meter
	if in.cmd != nil {
		m.Pid = in.cmd.Process.Pid
	}
	if in.ours {
		m.Metrics = filepath.Join(in.mnt, ".stagefs", "metrics")
	}
	return m
}

// userHZ is the unit of times in /proc, the same on all machines that Go knows.
const userHZ = 100

func (m meter) read() Spent {
	var s Spent
	if m.Metrics != "" {
		s.Requests = requestsIn(m.Metrics)
	}
	if m.Pid == 0 {
		return s
	}
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.Pid))
	if f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:])); len(f) > 12 {
		own, _ := strconv.ParseUint(f[11], 10, 64)
		system, _ := strconv.ParseUint(f[12], 10, 64)
		s.Own, s.System = float64(own)/userHZ, float64(system)/userHZ
	}
	return s
}

// spentOf are the seconds that one operation of a row took of the daemon's
// processors, own and system, as medians of the turns.
func spentOf(samples []Sample, row string, of side) (own, system float64) {
	var owns, systems []float64
	for _, s := range samples {
		if s.is(row, of) && s.Ops > 0 && s.Own+s.System > 0 {
			owns = append(owns, s.Own/float64(s.Ops))
			systems = append(systems, s.System/float64(s.Ops))
		}
	}
	return spreadOf(owns).Median, spreadOf(systems).Median
}

// reportSpent tells what the daemons take of the processors, and what would be gained
// if a stagefs's own code took no time at all: as much at the most, where one process
// waits for each answer.
func reportSpent(w io.Writer, r *Results) {
	lines := 0
	for _, row := range r.rows() {
		var cells []string
		found := false
		bare := spreadOf(perOp(r.Samples, row, side{bareName, stateFree})).Median
		for _, s := range r.Subjects[1:] {
			of := side{s.Name, stateFree}
			own, system := spentOf(r.Samples, row, of)
			cell, without := "-", "-"
			if own+system > 0 {
				found = true
				cell = seconds(own) + " + " + seconds(system)
				if whole := spreadOf(perOp(r.Samples, row, of)).Median; bare > 0 && whole > own && !strings.HasSuffix(row, atOnce) {
					without = short((whole - own) / bare)
				}
			}
			cells = append(cells, cell)
			if r.ours(s) {
				cells = append(cells, without, known(r.limit(row, s.Name)))
			}
		}
		if !found {
			continue
		}
		if lines++; lines == 1 {
			fmt.Fprint(w, "\nProcessors' time of the daemon for one operation, in its own code + in the kernel; WITHOUT: the ratio if its own code took none\n\nROW")
			r.heads(w, "\tWITHOUT\tGOAL")
		}
		fmt.Fprintf(w, "%s\t%s\n", row, strings.Join(cells, "\t"))
	}
}
