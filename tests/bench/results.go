//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Results are all that was found, as in the JSON file. Ratios follow from the
// samples; they are there for who reads the file without this program.
type Results struct {
	Machine  Machine   `json:"machine"`
	Profile  string    `json:"profile"`
	Version  string    `json:"version"` // of stagefs
	Began    time.Time `json:"began"`
	Ended    time.Time `json:"ended"`
	LoadThen string    `json:"load_at_start"`
	LoadNow  string    `json:"load_at_end"`
	Rounds   int       `json:"rounds"` // that were finished
	Subjects []subject `json:"subjects"`
	Samples  []Sample  `json:"samples"`
	Ratios   []Ratio   `json:"ratios"`
	Memory   []Memory  `json:"memory,omitempty"`
	Notes    []string  `json:"notes,omitempty"`
}

// A Machine is where it was measured.
type Machine struct {
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`
	MemoryMiB  uint64 `json:"memory_mib"`
	Filesystem string `json:"filesystem"`
	Go         string `json:"go"`
}

// A Ratio is a row's time on a subject in a state, over that on Base.
type Ratio struct {
	Row     string  `json:"row"`
	Subject string  `json:"subject"`
	State   string  `json:"state"`
	Base    string  `json:"base"` // bare, or free: the same subject in that state
	Limit   float64 `json:"limit,omitempty"`
	Spread  Spread  `json:"ratio"`
}

func newResults(o options, root string) *Results {
	version, _ := exec.Command(o.stagefs, "version").Output()
	return &Results{
		Machine: machine(root), Profile: o.profile, Began: time.Now().UTC().Truncate(time.Second), LoadThen: load(),
		Version: strings.TrimSpace(string(version)),
	}
}

func (r *Results) finish() {
	r.Ended, r.LoadNow = time.Now().UTC().Truncate(time.Second), load()
	for _, row := range r.rows() {
		for _, s := range r.Subjects {
			if s.Name == bareName {
				continue
			}
			of := side{s.Name, stateFree}
			if v := ratios(r.Samples, row, of, side{bareName, stateFree}); len(v) > 0 {
				r.Ratios = append(r.Ratios, Ratio{row, s.Name, stateFree, bareName, r.limit(row, s.Name), spreadOf(v)})
			}
			for _, state := range []string{stateHeld, stateParent, stateCrowd} {
				if v := ratios(r.Samples, row, side{s.Name, state}, of); len(v) > 0 {
					r.Ratios = append(r.Ratios, Ratio{row, s.Name, state, stateFree, stateLimit, spreadOf(v)})
				}
			}
		}
	}
}

// transport notes how a stagefs gets its requests.
func (r *Results) transport(name, how string) {
	for i := range r.Subjects {
		if r.Subjects[i].Name == name {
			r.Subjects[i].Transport = how
		}
	}
}

// ours tells whether a subject is a stagefs, also when it comes from a file.
func (*Results) ours(s subject) bool {
	return s.Name == oursName || strings.HasPrefix(s.Name, oursName+" ")
}

// limit is the goal of a row, if the subject is a stagefs.
func (r *Results) limit(row, name string) float64 {
	for _, s := range r.Subjects {
		if s.Name == name && r.ours(s) {
			return limit(row, s.Transport == "uring")
		}
	}
	return 0
}

// rows are those that have samples, in the order of the works.
func (r *Results) rows() []string {
	have := map[string]bool{}
	for _, s := range r.Samples {
		have[s.Row] = true
	}
	var out []string
	for _, w := range works() {
		for _, s := range w.steps {
			for _, row := range s.rows {
				if have[row] {
					out = append(out, row)
				}
			}
		}
	}
	return out
}

// ratio finds one; ok is false if there is none.
func (r *Results) ratio(row, subject, state string) (Ratio, bool) {
	for _, x := range r.Ratios {
		if x.Row == row && x.Subject == subject && x.State == state {
			return x, true
		}
	}
	return Ratio{}, false
}

func machine(dir string) Machine {
	var name unix.Utsname
	unix.Uname(&name)
	var info unix.Sysinfo_t
	unix.Sysinfo(&info)
	m := Machine{
		Kernel: unix.ByteSliceToString(name.Release[:]), Cores: runtime.NumCPU(), Go: runtime.Version(),
		MemoryMiB: uint64(info.Totalram) * uint64(info.Unit) >> 20,
	}
	cpus, _ := os.ReadFile("/proc/cpuinfo")
	if _, rest, ok := strings.Cut(string(cpus), "model name"); ok {
		line, _, _ := strings.Cut(rest, "\n")
		m.CPU = strings.Trim(line, "\t :")
	}
	var st unix.Statfs_t
	unix.Statfs(dir, &st)
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC:
		m.Filesystem = "ext4"
	case unix.XFS_SUPER_MAGIC:
		m.Filesystem = "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		m.Filesystem = "btrfs"
	case unix.TMPFS_MAGIC:
		m.Filesystem = "tmpfs"
	default:
		m.Filesystem = fmt.Sprintf("%#x", st.Type)
	}
	return m
}

// load is how many processes wanted a core lately.
func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
