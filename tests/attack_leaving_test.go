//go:build linux

package tests

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM2Leaving: who has found a file opens it and looks at it although it loses its
// name at that moment. The daemon stops in the middle of the removal: the backing has
// the name no more, and it does not know yet.
func TestM2Leaving(t *testing.T) {
	needInject(t)
	byTransport(t, func(t *testing.T, opts ...string) {
		m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
		var removal struct {
			sync.Mutex
			name         string
			gone, goesOn chan struct{}
		}
		m.inject(&fault{call: unix.SYS_UNLINKAT, times: 1000, is: func(a asked) bool {
			removal.Lock()
			defer removal.Unlock()
			if removal.name == "" || a.path(1) != removal.name {
				return false
			}
			os.Remove(m.Back("D", removal.name)) // and the call says that it has
			removal.name = ""
			close(removal.gone)
			<-removal.goesOn
			return true
		}})
		m.serve(opts...)
		openDir(t, m.Back("D"))
		for i, tt := range []struct {
			name string
			call []string // {} is the path
		}{
			{"file", []string{"open", "y", "{}", "rdwr"}},
			{"file", []string{"open", "y", "{}", "rdonly"}},
			{"file", []string{"open", "y", "{}", "rdwr,creat"}},
			{"file", []string{"open", "y", "{fd}", "rdwr,trunc"}},
			{"file", []string{"read", "{fd}"}},
			{"devserver", []string{"open", "y", "{fd}", "rdwr"}},
			{"devserver", []string{"fstat", "x"}},
			{"devserver", []string{"fgetxattr", "x", "user.test"}},
		} {
			t.Run(tt.name+"/"+strings.Join(tt.call, " "), func(t *testing.T) {
				name := tt.name
				if name == "file" {
					name += itoa(i)
				}
				openFile(t, m.Back("D", name), "content")
				if unix.Setxattr(m.Back("D", name), "user.test", []byte("v"), 0) != nil {
					t.Skip("no attributes in the backing")
				}
				a, b := agent(t), agent(t)
				b.must("open", "x", m.At("D", name), "rdonly")
				call := slices.Clone(tt.call)
				for i, w := range call {
					call[i] = strings.NewReplacer("{}", m.At("D", name), "{fd}", "/proc/self/fd/"+b.Get("fd", "x")).Replace(w)
				}
				gone, goesOn := make(chan struct{}), make(chan struct{})
				removal.Lock()
				removal.name, removal.gone, removal.goesOn = name, gone, goesOn
				removal.Unlock()
				unlinked := a.Start("unlink", m.At("D", name))
				<-gone
				got := b.Start(call...)
				time.Sleep(50 * time.Millisecond) // for it to be refused
				close(goesOn)
				if status := got(); status != "ok" {
					t.Errorf("= %s, want ok", status)
				}
				if status := unlinked(); status != "ok" {
					t.Errorf("unlink = %s", status)
				}
				if st := b.Get("fstat", "x"); !strings.Contains(st, "nlink=0 ") {
					t.Errorf("the file has %s, want nlink=0", st)
				}
				if !strings.Contains(tt.call[len(tt.call)-1], "creat") { // before Linux 6.12 that waits, and makes another file
					b.want("ENOENT", "stat", m.At("D", name))
				}
			})
		}
	})
}

// TestA10Leaving: who opens a lock file that loses its name at that moment, and that
// somebody else opens as the ordinary file which it is then, is not refused.
func TestA10Leaving(t *testing.T) {
	needInject(t)
	byTransport(t, func(t *testing.T, opts ...string) {
		m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
		var open struct {
			sync.Mutex
			looks        int // of the daemon at the file, until it stops
			stop, goesOn chan struct{}
		}
		m.inject(&fault{call: unix.SYS_STATX, until: func(a asked) <-chan struct{} {
			open.Lock()
			defer open.Unlock()
			if open.looks == 0 || a.path(1) != "devserver" {
				return nil
			}
			if open.looks--; open.looks > 0 {
				return nil
			}
			close(open.stop)
			return open.goesOn
		}})
		m.serve(opts...)
		openDir(t, m.Back("D"))
		for looks := 1; looks <= 2; looks++ {
			t.Run(itoa(looks), func(t *testing.T) {
				openFile(t, m.Back("D", "devserver"), "content")
				a, b, c := agent(t), agent(t), agent(t)
				for _, who := range []*Agent{b, c} {
					who.must("open", "x", m.At("D", "devserver"), "path")
				}
				path := func(who *Agent) string { return "/proc/self/fd/" + who.Get("fd", "x") }
				ofB, ofC := path(b), path(c)
				open.Lock()
				open.looks, open.stop, open.goesOn = looks, make(chan struct{}), make(chan struct{})
				stop, goesOn := open.stop, open.goesOn
				open.Unlock()
				got := b.Start("open", "y", ofB, "rdwr")
				opened := make(chan string, 1)
				go func() { opened <- got() }()
				select {
				case <-stop:
				case status := <-opened:
					if looks == 1 {
						t.Fatalf("= %s before the daemon looked at the file", status)
					}
					return // it looks less often
				}
				a.must("unlink", m.At("D", "devserver"))
				c.must("open", "y", ofC, "rdwr")
				close(goesOn)
				if status := <-opened; status != "ok" {
					t.Errorf("= %s, want ok", status)
				}
			})
		}
	})
}

// needProtectedLinks skips a test where the kernel makes links without asking for the
// file's attributes.
func needProtectedLinks(t *testing.T) {
	t.Helper()
	if b, _ := os.ReadFile("/proc/sys/fs/protected_hardlinks"); strings.TrimSpace(string(b)) != "1" {
		t.Skip("needs fs.protected_hardlinks=1")
	}
}

// TestM2LinkLeaving: a file that has names can get another one, although somebody looked at
// it just when it lost one. The kernel counts the names down itself, from what it was told
// last.
func TestM2LinkLeaving(t *testing.T) {
	needInject(t)
	needProtectedLinks(t)
	byTransport(t, func(t *testing.T, opts ...string) {
		for _, more := range []string{"", "--disable-locking"} {
			m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
			var leaving, goesOn chan struct{}
			stop := func(at int, do func()) func(a asked) bool {
				return func(a asked) bool {
					if a.path(at) != "b" {
						return false
					}
					do() // and the call says that it has
					close(leaving)
					<-goesOn
					return true
				}
			}
			m.inject(&fault{call: unix.SYS_UNLINKAT, times: 1, is: stop(1, func() { os.Remove(m.Back("D/b")) })},
				&fault{call: unix.SYS_RENAMEAT2, times: 1, is: stop(3, func() { os.Rename(m.Back("D/other"), m.Back("D/b")) })})
			m.serve(append(opts, strings.Fields(more)...)...)
			openDir(t, m.Back("D"))
			for _, call := range [][]string{{"unlink", m.At("D/b")}, {"rename", m.At("D/other"), m.At("D/b")}} {
				t.Run(call[0]+more, func(t *testing.T) {
					os.Remove(m.Back("D/b"))
					leaving, goesOn = make(chan struct{}), make(chan struct{})
					a, b := agent(t), agent(t)
					for _, name := range []string{"D/" + call[0], "D/other"} {
						a.must("put", m.At(name), "content", "creat")
					}
					a.must("link", m.At("D", call[0]), m.At("D/b"))
					b.must("open", "x", m.At("D", call[0]), "rdonly")
					done := a.Start(call...)
					<-leaving
					b.must("pread", "x", "1", "0") // so that the kernel asks when it was read last
					b.must("stat", m.At("D", call[0]))
					close(goesOn)
					if status := done(); status != "ok" {
						t.Fatalf("%q = %s", call, status)
					}
					b.must("link", m.At("D", call[0]), m.At("D/c"))
					b.must("unlink", m.At("D/c"))
					if st := b.Get("fstat", "x"); !strings.Contains(st, "nlink=1 ") {
						t.Errorf("the file has %s, want nlink=1", st)
					}
				})
			}
		}
	})
}

// plainAnswers are those that a local file system gives to calls on one name that
// others make and remove meanwhile.
var plainAnswers = map[string]string{
	"open to create": "ok", "open": "ok|ENOENT", "fstat": "ok", "read": "ok", "reopen": "ok", "close": "ok",
	"unlink": "ok|ENOENT", "stat": "ok|ENOENT", "excl": "ok|EEXIST", "chmod": "ok|ENOENT", "truncate": "ok|ENOENT",
	"link": "ok|EEXIST", "rename over": "ok", "access": "ok|ENOENT", "getxattr": "ENODATA|ENOENT",
}

// TestAttackNames attacks M2: processes make, open, replace and remove one name as
// fast as they can. They hear what they hear in a bare directory, and of a lock
// file's name what the lock has to say besides.
func TestAttackNames(t *testing.T) {
	const crowd, duration = 4, time.Second
	for name, besides := range map[string]string{
		"file":      "",
		"devserver": "unlink EBUSY|truncate EBUSY|chmod EBUSY|rename over EEXIST|rename over EBUSY",
	} {
		t.Run(name, func(t *testing.T) {
			byTransport(t, func(t *testing.T, opts ...string) {
				m := mount(t, opts...)
				openDir(t, m.Back("D"))
				openDir(t, m.Back("bare"))
				for _, where := range []string{m.Back("bare", name), m.At("D", name)} {
					var answers []func() string
					for range crowd {
						answers = append(answers, agent(t).StartGet("names", where, duration.String()))
					}
					all := map[string]bool{}
					for _, a := range answers {
						for _, one := range strings.Split(a(), ", ") {
							all[one] = true
						}
					}
					for _, one := range slices.Sorted(maps.Keys(all)) {
						i := strings.LastIndexByte(one, ' ')
						call, status := one[:i], one[i+1:]
						if !oneOf(status, plainAnswers[call]) && (where == m.Back("bare", name) || !oneOf(one, besides)) {
							t.Errorf("%s: %s = %s, want %s", where, call, status, plainAnswers[call])
						}
					}
					t.Logf("%s: %s", where, slices.Sorted(maps.Keys(all)))
				}
			})
		})
	}
}

// names is one of those processes. It returns which calls heard what.
func names(path string, d time.Duration) (string, error) {
	heard := map[string]bool{}
	own := path + "." + itoa(os.Getpid())
	note := func(call string, err error) bool {
		heard[call+" "+errnoName(err)] = true
		return err == nil
	}
	use := func(fd int) {
		var st unix.Stat_t
		note("fstat", unix.Fstat(fd, &st))
		_, err := unix.Pread(fd, make([]byte, 8), 0)
		note("read", err)
		again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR, 0)
		if note("reopen", err) {
			unix.Close(again)
		}
		note("close", unix.Close(fd))
	}
	for end, turn := time.Now().Add(d), os.Getpid(); time.Now().Before(end); turn++ {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT, 0o666)
		if note("open to create", err) {
			use(fd)
		}
		switch turn % 8 {
		case 0, 1, 2:
			note("unlink", unix.Unlink(path))
		case 3:
			if fd, err = unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o666); note("excl", err) {
				use(fd)
			}
		case 4:
			note("chmod", unix.Chmod(path, 0o666))
			note("truncate", unix.Truncate(path, 3))
		case 5:
			var st unix.Stat_t
			note("stat", unix.Stat(path, &st))
			note("access", unix.Access(path, unix.R_OK))
			_, err = unix.Getxattr(path, "user.none", make([]byte, 8))
			note("getxattr", err)
		default:
			if fd, err = unix.Open(own, unix.O_RDWR|unix.O_CREAT, 0o666); err != nil {
				continue // somebody has the lock
			}
			unix.Close(fd)
			if turn%8 == 6 {
				note("link", unix.Link(own, path))
			} else {
				note("rename over", unix.Rename(own, path))
			}
			unix.Unlink(own)
		}
		if fd, err = unix.Open(path, unix.O_RDWR, 0); note("open", err) {
			use(fd)
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(heard)), ", "), nil
}

// TestAttackDying attacks M2: who opens a lock file by its name, or asks for it, while its
// owners die one after the other, finds it or does not, as in a bare directory: of the
// kernel's second look, at a file that is gone as well, nobody hears.
func TestAttackDying(t *testing.T) {
	const crowd, duration = 4, 2 * time.Second
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		openDir(t, m.Back("D"))
		var answers []func() string
		for range crowd {
			answers = append(answers, agent(t).StartGet("looks", m.At("D", "devserver"), duration.String()))
		}
		deaths := 0
		for end := time.Now().Add(duration); time.Now().Before(end); deaths++ {
			a := agent(t)
			temp := m.At("D", "t."+itoa(a.Pid))
			for a.Try("creat", temp, "wronly,creat,excl") != "ok" {
			}
			a.Try("rename", temp, m.At("D", "devserver"))
			a.Kill()
		}
		for _, answer := range answers {
			for _, one := range strings.Split(answer(), ", ") {
				if i := strings.LastIndexByte(one, ' '); !oneOf(one[i+1:], "ok|ENOENT") {
					t.Errorf("%s, after %d deaths; want ok or ENOENT", one, deaths)
				}
			}
		}
	})
}

// looks is one of those processes, as names is.
func looks(path string, d time.Duration) (string, error) {
	heard := map[string]bool{}
	for end := time.Now().Add(d); time.Now().Before(end); {
		for call, flags := range map[string]int{"open": unix.O_RDWR, "open to read": unix.O_RDONLY} {
			fd, err := unix.Open(path, flags, 0)
			if heard[call+" "+errnoName(err)] = true; err == nil {
				unix.Close(fd)
			}
		}
		var st unix.Stat_t
		heard["stat "+errnoName(unix.Stat(path, &st))] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(heard)), ", "), nil
}
