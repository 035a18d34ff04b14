//go:build linux

package tests

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// TestDevserverKilled: a server is killed with -9 in each phase of a request.
// The next one gets the directory; on a plain one it hears of a stale lock for
// ever, if there was one.
func TestDevserverKilled(t *testing.T) {
	for _, phase := range []struct {
		name  string
		reach func(p *program)
		stale bool // in a plain directory
	}{
		{"between mkdir and lock", func(p *program) {
			p.tell("pause made")
			p.ask("acquire board/v", "at made")
		}, false},
		{"locked", func(p *program) { p.ask("acquire board/v", "acquired") }, true},
		{"staging", func(p *program) {
			p.ask("acquire board/v", "acquired")
			p.ask("put board/v half x", "put")
		}, true},
		{"between release and removal", func(p *program) {
			p.ask("acquire board/v", "acquired")
			p.tell("pause released")
			p.ask("release board/v destroy", "at released")
		}, false},
	} {
		t.Run(phase.name, func(t *testing.T) {
			onSites(t, boards(), func(s *site) {
				a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
				phase.reach(a)
				if phase.name != "between release and removal" {
					s.wantHeld("board/v", a)
				}
				a.Kill()
				s.awaitFree("board/v")
				b.ask("acquire board/v", "refused board/v cannot acquire: FileExistsError")
				if s.m == nil && phase.stale {
					b.ask("acquire board/v revisit", "refused board/v cannot acquire: AlreadyLocked")
					return
				}
				b.ask("acquire board/v revisit", "acquired")
				s.wantHeld("board/v", b)
				b.ask("put board/v image x", "put")
				b.ask("release board/v destroy", "released")
				s.wantNames("board", "")
				s.wantFree()
			})
		})
	}
}

// TestDownloaderKilled: a downloader is killed with -9 in each phase, with and
// without the subprocess that works for it; the next one's forced download
// succeeds. On a plain directory the stale lock stands in its way for ever.
func TestDownloaderKilled(t *testing.T) {
	for _, phase := range []string{"between mkdir and lock", "foreground", "background", "subprocess", "with its subprocess", "between release and removal"} {
		t.Run(phase, func(t *testing.T) {
			onSites(t, boards(), func(s *site) {
				ar := newArchive(t)
				ar.build("board/v")
				feed, _ := ar.slow("board/v")
				a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
				stale, held := true, true
				switch phase {
				case "between mkdir and lock":
					a.tell("pause made")
					a.ask("download board/v", "at made")
					stale = false
				case "between release and removal":
					a.tell("pause foreground")
					a.ask("download board/v", "at foreground")
					a.tell("pause released")
					a.ask("fail foreground connection lost", "at released")
					stale, held = false, false
				case "foreground":
					a.tell("pause foreground")
					a.ask("download board/v", "at foreground")
				case "background":
					a.tell("pause background")
					a.ask("download board/v", "")
					a.line() // "staging" and "at background", in any order
				default:
					a.ask("download board/v", "staging")
					tar := a.unpacking("board/v")
					feed(1)
					s.awaitSize("board/v/first", tarRecord-512)
					s.awaitClosed(tar) // it sets modes and times last
				}
				if held {
					s.wantHeld("board/v", a)
				}
				if phase == "with its subprocess" {
					mustDo(t, a.group.signal(syscall.SIGKILL))
				}
				a.Kill()
				s.awaitFree("board/v")
				ar.build("board/v2")
				mustDo(t, os.Rename(ar.at("board/v2/a.tar"), ar.at("board/v/a.tar")))
				if s.m == nil && stale {
					b.ask("download board/v force", "refused board/v cannot acquire: AlreadyLocked")
					return
				}
				b.ask("download board/v force", "staging")
				b.staged("board/v")
				s.wantNames("board/v", stagedNames)
				s.wantFree()
			})
		})
	}
}

// TestDownloaderSubprocessLeft (R8): the tar of a killed downloader writes on to
// a file that it has open. Until it closes that, it stands in the way of the
// next owner, and the listing names it.
func TestDownloaderSubprocessLeft(t *testing.T) {
	s := mountSite(t, boards()...)
	ar := newArchive(t)
	ar.build("board/v")
	feed, end := ar.slow("board/v")
	a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
	a.ask("download board/v", "staging")
	tar := a.unpacking("board/v")
	feed(2)
	s.awaitSize("board/v/second", tarRecord-512)
	a.Kill()
	s.awaitFree("board/v")
	b.ask("download board/v force", "refused board/v cannot acquire: AlreadyLocked")
	named := false
	for _, l := range s.m.Listing().Blockers {
		named = named || l.Pid == tar && strings.HasSuffix(l.Path, "board/v/second")
	}
	if !named {
		t.Errorf("the listing's blockers: %+v, want tar (pid %d)", s.m.Listing().Blockers, tar)
	}
	end()
	awaitEnd(t, "tar ends", tar)
	s.awaitSize("board/v/second", 3*tarRecord)
	ar.build("board/v2")
	mustDo(t, os.Rename(ar.at("board/v2/a.tar"), ar.at("board/v/a.tar")))
	b.ask("download board/v force", "staging")
	b.staged("board/v")
	s.wantNames("board/v", stagedNames)
	s.wantFree()
}

// TestDownloaderSubprocessShutOut (W3): the tar of a killed downloader has no
// file open when another server acquires the directory. What it wants to write
// from then on is refused.
func TestDownloaderSubprocessShutOut(t *testing.T) {
	s := mountSite(t, boards()...)
	ar := newArchive(t)
	ar.build("board/v")
	feed, end := ar.slow("board/v")
	a, b := s.start("downloader.py", s.dir, ar.dir), s.start("devserver.py", s.dir)
	a.ask("download board/v", "staging")
	tar := a.unpacking("board/v")
	feed(1)
	s.awaitSize("board/v/first", tarRecord-512)
	s.awaitClosed(tar)
	a.Kill()
	s.awaitFree("board/v")
	b.ask("acquire board/v revisit", "acquired")
	b.ask("put board/v image.bin new", "put")
	before := digest(t, s.under("board/v"))
	end()
	awaitEnd(t, "tar ends", tar)
	if after := digest(t, s.under("board/v")); after != before {
		t.Errorf("the dead server's tar changed:\n%s", diff(before, after))
	}
	if said := a.rest(); !strings.Contains(said, "second: Cannot open: Device or resource busy") {
		t.Errorf("tar said %q", said)
	}
	s.wantHeld("board/v", b)
	b.ask("release board/v", "released")
	s.wantFree()
}

// writersBelow has the files beneath dir that a process has open for writing.
func writersBelow(t *testing.T, pid int, dir string) (files []string) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	mustDo(t, err)
	for _, fd := range fds {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		info, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name()))
		_, flags, _ := strings.Cut(string(info), "flags:")
		var n int
		fmt.Sscanf(flags, "%o", &n)
		if strings.HasPrefix(target, dir) && n&syscall.O_ACCMODE != syscall.O_RDONLY {
			files = append(files, target)
		}
	}
	return files
}

// TestDownloaderSubprocessKilled: a downloader whose tar is killed destroys the
// build, and the next try works.
func TestDownloaderSubprocessKilled(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		ar.build("board/v")
		feed, _ := ar.slow("board/v")
		a := s.start("downloader.py", s.dir, ar.dir)
		a.ask("download board/v", "staging")
		tar := a.unpacking("board/v")
		feed(2)
		s.awaitSize("board/v/second", tarRecord-512)
		s.wantHeld("board/v", a)
		mustDo(t, syscall.Kill(tar, syscall.SIGKILL))
		a.hear("destroyed board/v tar ended with status -9")
		s.wantNames("board", "")
		ar.build("board/v2")
		mustDo(t, os.Rename(ar.at("board/v2/a.tar"), ar.at("board/v/a.tar")))
		a.ask("download board/v", "staging")
		a.staged("board/v")
		s.wantNames("board/v", stagedNames)
		s.wantFree()
	})
}
