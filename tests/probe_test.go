//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A probe is what one process sees of a directory. It is run in a plain
// directory and in a mount, and has to note the same (M2): what differs anyway,
// such as inode numbers and the present time, is not noted.
type probe struct {
	dir string
	log strings.Builder
}

// A probeCase is one subject of a family. What it needs is in its probe's
// directory, which everyone may write to.
type probeCase struct {
	name string
	run  func(*probe)
}

// probeCases are all families.
func probeCases() []probeCase {
	return slices.Concat(
		limitProbes(), errnoProbes(), timeProbes(), ownerProbes(), aclProbes(), flagProbes(), nameProbes(), dataProbes(), asyncProbes(),
	)
}

// TestM2Probes runs each probe in a plain directory and in a mount of the same
// file system.
func TestM2Probes(t *testing.T) {
	m := mount(t)
	plain := tempDir(t)
	for _, c := range probeCases() {
		t.Run(c.name, func(t *testing.T) {
			if long := strings.HasPrefix(c.name, "as many") || strings.HasPrefix(c.name, "8000 "); long && testing.Short() {
				t.Skip("takes many seconds")
			}
			sideBySide(t, m, plain, c.name)
		})
	}
}

// sideBySide runs a probe at both places and compares what it notes, and the
// trees that it leaves.
func sideBySide(t *testing.T, m *Mount, plain, name string) {
	t.Helper()
	base := strings.ReplaceAll(name, " ", "-")
	want := playProbe(t, name, plain, filepath.Join(plain, base))
	got := playProbe(t, name, m.Dir, m.At(base))
	if want != got {
		t.Errorf("noted differently from a plain directory (-want, +got):\n%s", diff(want, got))
	}
	if want, got := shape(t, filepath.Join(plain, base)), shape(t, m.Back(base)); want != got {
		t.Errorf("tree differs from the plain directory's (-want, +got):\n%s", diff(want, got))
	}
	for _, line := range strings.Split(got, "\n") {
		if strings.HasPrefix(line, "BROKEN") {
			t.Error(line)
		}
	}
	if testing.Verbose() {
		t.Logf("both noted:\n%s", want)
	}
}

// playProbe runs a probe in dir, which it makes below back.
func playProbe(t *testing.T, name, back, dir string) string {
	t.Helper()
	base := filepath.Join(back, filepath.Base(dir))
	mustDo(t, os.Mkdir(base, 0o777))
	mustDo(t, os.Chmod(base, 0o777))
	if name == linksProbe {
		makeLinks(t, base)
	}
	a := agent(t)
	defer a.Exit(1)
	return a.Get("probe", name, dir)
}

// runProbe is the agent's side.
func runProbe(name, dir string) (string, error) {
	for _, c := range slices.Concat(probeCases(), smallProbes()) {
		if c.name == name {
			p := &probe{dir: dir}
			c.run(p)
			return p.log.String(), nil
		}
	}
	return "", fmt.Errorf("no probe %q", name)
}

func (p *probe) at(rel ...string) string { return filepath.Join(p.dir, filepath.Join(rel...)) }

// note writes a line, without the directory's own name.
func (p *probe) note(format string, args ...any) {
	p.log.WriteString(strings.ReplaceAll(fmt.Sprintf(format, args...), p.dir, "{}") + "\n")
}

// try notes how a call ended, and reports whether well.
func (p *probe) try(what string, err error) bool {
	p.note("%s: %s", what, errnoName(err))
	return err == nil
}

// must is for what the probe stands on.
func (p *probe) must(err error) {
	if err != nil {
		_, file, line, _ := runtime.Caller(1)
		p.note("BROKEN %s:%d: %v", filepath.Base(file), line, err)
	}
}

// open opens a file that has to be there, or is made.
func (p *probe) open(name string, flags int) int {
	fd, err := unix.Open(p.at(name), flags|unix.O_CLOEXEC, 0o666)
	if err != nil {
		_, file, line, _ := runtime.Caller(1)
		p.note("BROKEN %s:%d: open %s: %v", filepath.Base(file), line, name, err)
	}
	return fd
}

// file makes one with a content and exactly this mode.
func (p *probe) file(name, content string, mode uint32) string {
	path := p.at(name)
	p.must(os.WriteFile(path, []byte(content), 0o600))
	p.must(unix.Chmod(path, mode))
	return path
}

// mkdir makes a directory with exactly this mode.
func (p *probe) mkdir(name string, mode uint32) string {
	path := p.at(name)
	p.must(unix.Mkdir(path, 0o700))
	p.must(unix.Chmod(path, mode))
	return path
}

// as runs f on a thread that is another user, with these groups besides. The
// thread ends with it.
func (p *probe) as(uid, gid int, groups []int, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		p.must(threadUser(uid, gid, groups))
		f()
	}()
	<-done
}

// stat notes what stat(2) says that does not differ anyway.
func (p *probe) stat(name string) {
	var st unix.Stat_t
	if err := unix.Lstat(p.at(name), &st); err != nil {
		p.note("stat %s: %s", name, errnoName(err))
		return
	}
	size := fmt.Sprint(st.Size)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		size = "dir"
	}
	p.note("stat %s: mode %o owner %d:%d links %d size %s rdev %d", name, st.Mode, st.Uid, st.Gid, st.Nlink, size, st.Rdev)
}

// content notes what a file holds, as a digest if that is long.
func (p *probe) content(name string) {
	b, err := os.ReadFile(p.at(name))
	if err != nil {
		p.note("read %s: %s", name, errnoName(err))
		return
	}
	p.note("content of %s: %s", name, brief(b))
}
