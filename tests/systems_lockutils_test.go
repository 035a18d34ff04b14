//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// onLockutils runs a test on both kinds of site, with the lock directory "build".
func onLockutils(t *testing.T, f func(s *site, which string)) {
	onSites(t, novaLocks(), func(s *site) { f(s.withBuild(), "ours") })
}

// onBothLockutils runs it on a mount through OpenStack's lockutils, too.
func onBothLockutils(t *testing.T, f func(s *site, which string)) {
	onLockutils(t, f)
	t.Run("oslo", func(t *testing.T) { f(mountSite(t, novaLocks()...).withBuild(), "oslo") })
}

func novaLocks() []string { return []string{"--lock-name", "nova-*"} }

func (s *site) withBuild() *site {
	s.t.Helper()
	s.lock = "nova-of-a-rival"
	openDir(s.t, s.under("build"))
	return s
}

// workers starts services that lock in the directory "build".
func (s *site) workers(count int, which string, options ...string) []*program {
	s.t.Helper()
	var all []*program
	for range count {
		all = append(all, startProgram(s.t, []string{"OSLO_LOCK_PATH=" + s.at("build")}, "worker.py", append([]string{which}, options...)...))
	}
	for _, p := range all {
		p.hear("serving")
	}
	return all
}

func (s *site) worker(which string, options ...string) *program {
	s.t.Helper()
	return s.workers(1, which, options...)[0]
}

// awaitOpen waits until a program has a file of the lock directory open: next
// it tries to lock it.
func (s *site) awaitOpen(p *program, name string) {
	s.t.Helper()
	eventually(s.t, "the lock file is open", func() bool {
		for _, file := range writersBelow(s.t, p.Pid(), s.at("build")) {
			if filepath.Base(file) == name {
				return true
			}
		}
		return false
	})
}

// TestLockutils: the context manager and the decorator hold the same lock,
// whose file has the prefix and stays.
func TestLockutils(t *testing.T) {
	onBothLockutils(t, func(s *site, which string) {
		all := s.workers(2, which)
		a, b := all[0], all[1]
		for _, how := range []string{"lock", "synchronized"} {
			for _, name := range []string{"disk", "a/b"} {
				file := "nova-" + strings.ReplaceAll(name, "/", "_")
				a.tell("pause %s", name)
				a.ask(how+" "+name, "locked")
				a.hear("at")
				s.wantHeld("build", a)
				a.ask("put content x", "put")
				b.tell("%s %s", how, name)
				s.awaitOpen(b, file)
				s.wantHeld("build", a)
				a.ask("go "+name, "unlocked")
				b.hear("locked")
				b.hear("unlocked")
				if st, err := os.Stat(s.under("build", file)); err != nil || st.Size() != 0 {
					s.t.Errorf("the lock file afterwards: %v, want it empty", err)
				}
				s.wantFree()
			}
		}
	})
}

// TestLockutilsNames: a service that has locks of two names at once, by two of its threads,
// shuts out the others until it has given up both, and is in nobody's way then.
func TestLockutilsNames(t *testing.T) {
	onBothLockutils(t, func(s *site, which string) {
		all := s.workers(2, which)
		a, b := all[0], all[1]
		for _, first := range []string{"disk", "net"} {
			last := map[string]string{"disk": "net", "net": "disk"}[first]
			for _, name := range []string{"disk", "net"} {
				a.tell("pause %s", name)
				a.ask("lock "+name, "locked")
				a.hear("at")
			}
			s.wantHeld("build", a)
			a.ask("go "+first, "unlocked")
			s.wantHeld("build", a)
			b.tell("lock %s", last)
			s.awaitOpen(b, "nova-"+last)
			a.ask("go "+last, "unlocked")
			b.hear("locked")
			b.hear("unlocked")
			s.wantFree()
			for _, name := range []string{"disk", "net"} { // to be made anew
				agent(s.t).must("unlink", s.at("build", "nova-"+name))
			}
		}
	})
}

// TestLockutilsPath: the lock is in the directory of the option, or in another
// one that the caller names; without either it is an error.
func TestLockutilsPath(t *testing.T) {
	onLockutils(t, func(s *site, which string) {
		openDir(s.t, s.under("other"))
		all := s.workers(2, which)
		a, b := all[0], all[1]
		a.tell("pause disk")
		a.ask("lock disk '"+s.at("other")+"'", "locked")
		a.hear("at")
		s.wantHeld("other", a)
		b.ask("lock disk", "locked") // of the same name, elsewhere
		b.hear("unlocked")
		a.ask("go disk", "unlocked")
		for dir, want := range map[string]string{"build": "nova-disk", "other": "nova-disk"} {
			s.wantNames(dir, want)
		}
		p := startProgram(s.t, nil, "worker.py", which)
		p.hear("serving")
		p.ask("lock disk", "refused disk")
		s.wantFree()
	})
}

// TestLockutilsPolling: waiters try again every 10 ms, hear the same as ever,
// and get the lock one after the other, in whatever order.
func TestLockutilsPolling(t *testing.T) {
	const waiters = 5
	onLockutils(t, func(s *site, which string) {
		holder := s.worker(which)
		holder.tell("pause disk")
		holder.ask("lock disk", "locked")
		holder.hear("at")
		said := make(chan *program)
		for range waiters {
			p := s.worker(which, "tell=20")
			p.tell("pause disk")
			p.ask("lock disk", "refused 20")
			go func() {
				if line, err := p.out.ReadString('\n'); line != "locked disk\n" {
					s.t.Errorf("a waiter said %q, %v", line, err)
				}
				said <- p
			}()
		}
		s.wantHeld("build", holder)
		holder.ask("go disk", "unlocked")
		for range waiters {
			p := <-said
			p.hear("at disk")
			s.wantHeld("build", p)
			select {
			case other := <-said:
				s.t.Fatalf("%d has the lock beside %d", other.Pid(), p.Pid())
			default:
			}
			p.ask("go disk", "unlocked")
		}
		s.wantFree()
	})
}

// TestLockutilsExcludes: nothing is lost between threads and processes that
// count under one lock.
func TestLockutilsExcludes(t *testing.T) {
	const workers, threads, times = 4, 3, 20
	onBothLockutils(t, func(s *site, which string) {
		mustDo(s.t, os.WriteFile(s.under("build/count"), []byte("0"), 0o666))
		mustDo(s.t, os.Chmod(s.under("build/count"), 0o666))
		all := s.workers(workers, which)
		each(all, func(p *program) {
			for range threads {
				p.tell("count disk %d", times)
			}
			for range threads {
				p.hear("counted disk")
			}
		})
		if n, _ := os.ReadFile(s.under("build/count")); string(n) != strconv.Itoa(workers*threads*times) {
			s.t.Errorf("counted to %s, want %d", n, workers*threads*times)
		}
		s.wantFree()
	})
}

// TestLockutilsCrash: the holder is killed with -9 while others wait: one of them
// gets the lock, and then the next one; the dead one's children hold nothing.
func TestLockutilsCrash(t *testing.T) {
	onBothLockutils(t, func(s *site, which string) {
		all := s.workers(2, which)
		a, b := all[0], all[1]
		a.tell("pause disk")
		a.ask("lock disk", "locked")
		a.hear("at")
		b.tell("pause disk")
		b.tell("lock disk")
		s.awaitOpen(b, "nova-disk")
		s.wantHeld("build", a)
		a.Kill()
		b.hear("locked")
		b.hear("at")
		s.wantHeld("build", b)
		b.Kill()
		s.awaitFree("build")
		c := s.worker(which)
		c.ask("lock disk", "locked")
		c.hear("unlocked")
		s.wantFree()
	})
}

// TestLockutilsOff: with locking switched off, all go on at once and no lock
// file is made. It does not switch off what others hold.
func TestLockutilsOff(t *testing.T) {
	onBothLockutils(t, func(s *site, which string) {
		all := s.workers(2, which, "off")
		a, b := all[0], all[1]
		for _, p := range []*program{a, b} {
			p.tell("pause disk")
			p.ask("lock disk", "locked")
			p.hear("at")
		}
		s.wantNames("build", "")
		s.wantFree()
		stranger(s.t).must("put", s.at("build/of-a-stranger"), "x", "creat")
		for _, p := range []*program{a, b} {
			p.ask("put content x", "put")
			p.ask("go disk", "unlocked")
		}

		holder := s.worker(which)
		holder.tell("pause disk")
		holder.ask("lock disk", "locked")
		holder.hear("at")
		a.ask("lock disk", "locked")
		a.hear("unlocked")
		if s.m != nil {
			a.ask("put content y", "refused content Device or resource busy")
		}
		s.wantHeld("build", holder)
		holder.ask("go disk", "unlocked")
		s.wantFree()
	})
}

// wrapped runs a worker below the wrapper of ours or OpenStack's, which makes
// the lock directory in the site's.
func (s *site) wrapped(which string, command ...string) (p *program) {
	s.t.Helper()
	wrapper := "lockutils.py"
	if which == "oslo" {
		wrapper = "/usr/bin/lockutils-wrapper"
		need(s.t, wrapper)
	}
	if command == nil {
		command = []string{debianPython, "-W", "ignore", filepath.Join(systemsDir(s.t), "worker.py"), which}
	}
	return startProgram(s.t, []string{"TMPDIR=" + s.dir}, wrapper, command...)
}

// TestLockutilsWrapper: the wrapper makes a lock directory, which is its own and
// its command's, hands on the exit status, and removes the directory.
func TestLockutilsWrapper(t *testing.T) {
	onBothLockutils(t, func(s *site, which string) {
		p := s.wrapped(which)
		dir := filepath.Base(strings.TrimPrefix(p.hear("serving "+s.dir), "serving "))
		if s.m != nil {
			s.m.wantOwner(dir, p.Pid())
		}
		s.wantHeld(dir, p)
		p.tell("pause disk")
		p.ask("lock disk", "locked")
		p.hear("at")
		p.ask("put content x", "put")
		if s.m != nil {
			// The command's own lock is there beside the wrapper's (C2, A13).
			own := 0
			for _, row := range s.m.Listing().Locks {
				if row.Dir == dir && row.Protocol == "fcntl" && parentOf(s.t, row.Pid) == p.Pid() {
					own++
				}
			}
			if own != 1 {
				s.t.Errorf("listing: %+v, want a lock of the wrapper's child", s.m.Listing().Locks)
			}
			agent(s.t).want("EBUSY", "put", s.at(dir, "of-a-rival"), "x", "creat")
		}
		s.wantNames(dir, "content nova-disk")
		p.ask("go disk", "unlocked")
		if got := p.end(); got != "exit 0: " {
			s.t.Errorf("the wrapper: %q", got)
		}
		s.wantNames("", "build")
		if got := s.wrapped(which, "sh", "-c", "exit 3").end(); got != "exit 3: " {
			s.t.Errorf("the wrapper of exit 3: %q", got)
		}
		s.wantNames("", "build")
		s.wantFree()
	})
}

// TestLockutilsWrapperCrowd: the wrapper's command is a script whose children
// exclude one another in the wrapper's directory.
func TestLockutilsWrapperCrowd(t *testing.T) {
	const workers, times = 4, 15
	onLockutils(t, func(s *site, which string) {
		script := fmt.Sprintf(`echo 0 >"$OSLO_LOCK_PATH/count"
			for i in $(seq %d); do echo count disk %d | %s "$0" %s & done; wait; cat "$OSLO_LOCK_PATH/count"`, workers, times, debianPython, which)
		got := s.wrapped(which, "sh", "-c", script, filepath.Join(systemsDir(s.t), "worker.py")).end()
		if !strings.HasPrefix(got, "exit 0: ") || strings.Count(got, "counted disk") != workers || !strings.HasSuffix(got, strconv.Itoa(workers*times)) {
			s.t.Errorf("the wrapper: %q", got)
		}
		s.wantNames("", "build")
		s.wantFree()
	})
}

// TestLockutilsWrapperKilled: nobody removes the directory of a wrapper that is
// killed with its command; but nobody holds it.
func TestLockutilsWrapperKilled(t *testing.T) {
	onLockutils(t, func(s *site, which string) {
		p := s.wrapped(which)
		dir := filepath.Base(strings.TrimPrefix(p.hear("serving "+s.dir), "serving "))
		p.tell("pause disk")
		p.ask("lock disk", "locked")
		p.hear("at")
		killGroup(s.t, p.Proc)
		s.awaitFree(dir)
		s.wantNames(dir, "nova-disk")
		agent(s.t).must("unlink", s.at(dir, "nova-disk"))
		agent(s.t).must("rmdir", s.at(dir))
		s.wantFree()
	})
}
