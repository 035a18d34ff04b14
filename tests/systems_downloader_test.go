//go:build linux

package tests

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// An archive has the builds that downloaders fetch.
type archive struct {
	t   *testing.T
	dir string
}

func newArchive(t *testing.T) archive { return archive{t, tempDir(t)} }

// stagedNames is what a build of [archive.build] looks like when it is staged.
const stagedNames = ".complete autotest debug image.bin staged.timestamp"

// tarRecord is what tar(1) reads at once, and as much as it ever waits for.
const tarRecord = 10240

// build makes a build with a file and two archives for tar(1).
func (a archive) build(tag string) {
	a.t.Helper()
	mustDo(a.t, os.MkdirAll(a.at(tag), 0o777))
	a.put(tag, "image.bin", []byte("image of "+tag))
	a.put(tag, "a.tar", tarOf(a.t, "autotest"))
	a.put(tag, "b.tar", tarOf(a.t, "debug"))
}

func (a archive) at(tag ...string) string { return filepath.Join(a.dir, filepath.Join(tag...)) }

func (a archive) put(tag, name string, content []byte) {
	a.t.Helper()
	mustDo(a.t, os.WriteFile(a.at(tag, name), content, 0o666))
	mustDo(a.t, os.Chmod(a.at(tag, name), 0o666)) // which its copy gets, too
}

// slow replaces a.tar by a pipe, whose other end decides how far tar(1) comes.
// It has the files "first", which is all of the first record, and "second",
// which begins with the second record and ends in the fifth.
func (a archive) slow(tag string) (feed func(records int), end func()) {
	a.t.Helper()
	content := tarOf(a.t, "first", "second")
	mustDo(a.t, os.RemoveAll(a.at(tag, "a.tar")))
	mustDo(a.t, syscall.Mkfifo(a.at(tag, "a.tar"), 0o666))
	pipe, err := os.OpenFile(a.at(tag, "a.tar"), os.O_RDWR, 0)
	mustDo(a.t, err)
	a.t.Cleanup(func() { pipe.Close() })
	feed = func(records int) {
		a.t.Helper()
		n := min(records*tarRecord, len(content))
		_, err := pipe.Write(content[:n])
		mustDo(a.t, err)
		content = content[n:]
	}
	return feed, func() { feed(100); pipe.Close() }
}

// tarOf makes a tar file. The content of "first" ends with the first record.
func tarOf(t *testing.T, names ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range names {
		size := len(name)
		switch name {
		case "first":
			size = tarRecord - 512
		case "second":
			size = 3 * tarRecord
		}
		mustDo(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o666, Size: int64(size)}))
		_, err := w.Write(bytes.Repeat([]byte{name[0]}, size))
		mustDo(t, err)
	}
	mustDo(t, w.Close())
	b.Write(make([]byte, tarRecord-b.Len()%tarRecord))
	return b.Bytes()
}

// unpacking waits until it has started tar(1), and tells its pid.
func (p *program) unpacking(tag string) int {
	p.t.Helper()
	pid, err := strconv.Atoi(strings.TrimPrefix(p.hear("unpacking "+tag), "unpacking "+tag+" "))
	mustDo(p.t, err)
	return pid
}

// staged waits until a download that has begun is there as a whole.
func (p *program) staged(tag string) {
	p.t.Helper()
	for line := ""; !strings.HasPrefix(line, "staged "+tag); {
		if line = p.line(); !strings.HasPrefix(line, "unpacking") && !strings.HasPrefix(line, "staged") {
			p.t.Fatalf("%s said %q, want staged", p.name, p.rest())
		}
	}
}

// TestDownloader: a build is staged in the foreground and in the background, by
// threads and subprocesses, and is its server's all the time; then it is there.
func TestDownloader(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		ar.build("board/v")
		feed, end := ar.slow("board/v")
		a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
		a.tell("pause foreground")
		a.tell("pause background")
		a.ask("download board/v", "at foreground")
		s.wantHeld("board/v", a)
		s.wantNames("board/v", "staged.timestamp")
		b.ask("download board/v", "refused board/v cannot acquire: FileExistsError")
		a.tell("go foreground")
		for range 2 { // the request is answered while the background thread begins
			if line := a.line(); line != "staging board/v" && line != "at background" {
				t.Fatalf("said %q", line)
			}
		}
		s.wantNames("board/v", "image.bin staged.timestamp")
		s.wantHeld("board/v", a)
		a.tell("go background")
		a.unpacking("board/v")
		feed(2)
		s.awaitSize("board/v/second", tarRecord-512)
		s.wantNames("board/v", "first image.bin second staged.timestamp")
		s.wantHeld("board/v", a)
		b.ask("download board/v", "refused board/v cannot acquire: FileExistsError")
		b.ask("download board/v force", "refused board/v cannot acquire: AlreadyLocked")
		end()
		a.staged("board/v")
		s.wantNames("board/v", ".complete debug first image.bin second staged.timestamp")
		b.ask("download board/v", "there board/v")
		s.wantFree()
	})
}

func (s *site) awaitSize(name string, size int64) {
	s.t.Helper()
	eventually(s.t, name+" grows", func() bool {
		st, err := os.Stat(s.under(name))
		return err == nil && st.Size() == size
	})
}

// awaitClosed waits until a process has no file of the site open for writing.
func (s *site) awaitClosed(pid int) {
	s.t.Helper()
	eventually(s.t, "all files are closed", func() bool { return len(writersBelow(s.t, pid, s.dir)) == 0 })
}

// TestDownloaderFails: a build that fails in the foreground, or in a subprocess
// of the background, is destroyed, so that the next try works.
func TestDownloaderFails(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		ar.build("board/v")
		a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
		a.tell("pause foreground")
		a.ask("download board/v", "at foreground")
		a.ask("fail foreground connection lost", "destroyed board/v connection lost")
		s.wantNames("board", "")
		s.wantFree()
		b.ask("download board/missing", "destroyed board/missing") // the archive has none
		s.wantNames("board", "")

		good := tarOf(t, "debug")
		ar.put("board/v", "b.tar", []byte("no tar file"))
		a.ask("download board/v", "staging")
		a.unpacking("board/v")
		a.unpacking("board/v")
		a.hear("destroyed board/v tar ended with status 2")
		s.wantNames("board", "")
		s.wantFree()

		ar.put("board/v", "b.tar", good)
		for _, p := range []*program{b, a} { // another server's try, and its own
			p.ask("download board/v force", "staging")
			s.wantHeldOrFree("board/v", p)
			p.staged("board/v")
			s.wantNames("board/v", stagedNames)
		}
		s.wantFree()
	})
}

// wantHeldOrFree expects that nobody else has it.
func (s *site) wantHeldOrFree(tag string, p *program) {
	s.t.Helper()
	if s.m == nil {
		return
	}
	if row, held := s.m.Locks()[tag]; held && row.Pid != p.Pid() {
		s.t.Errorf("%s is pid %d's, want %d's or nobody's", tag, row.Pid, p.Pid())
	}
}

// TestDownloaderForce: forced re-staging destroys what is there, and acquires a
// new lock on a new directory.
func TestDownloaderForce(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		ar.build("board/v")
		a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
		a.ask("download board/v force", "staging") // it need not be there
		a.staged("board/v")
		mustDo(t, os.WriteFile(s.under("board/v/junk"), nil, 0o666))
		b.tell("pause released")
		b.tell("pause foreground")
		b.ask("download board/v force", "at released")
		s.wantNames("board/v", ".complete autotest debug image.bin junk staged.timestamp")
		b.ask("go released", "at foreground")
		s.wantHeld("board/v", b)
		s.wantNames("board/v", "staged.timestamp")
		b.ask("go foreground", "staging")
		b.staged("board/v")
		s.wantNames("board/v", stagedNames)
		s.wantFree()
	})
}

// TestDownloaderTimestamp (W5): while a build is staged, everybody may touch
// its timestamp, and nothing else.
func TestDownloaderTimestamp(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		ar.build("board/v")
		a, b := s.start("downloader.py", s.dir, ar.dir), s.start("downloader.py", s.dir, ar.dir)
		a.tell("pause background")
		a.ask("download board/v", "")
		a.line() // "staging" and "at background", in any order
		for name, touch := range map[string]func(){
			"another server": func() { b.ask("touch board/v", "touched") },
			"the server":     func() { a.ask("touch board/v", "touched") },
			"touch(1)": func() {
				if got := stranger(t).Get("sh", "touch '"+s.at("board/v/staged.timestamp")+"' 2>&1"); got != "0 " {
					t.Errorf("touch said %q", got)
				}
			},
		} {
			s.makeOld("board/v")
			touch()
			if st, err := os.Stat(s.under("board/v/staged.timestamp")); err != nil || time.Since(st.ModTime()) > time.Minute*30 {
				t.Errorf("not touched by %s: %v", name, err)
			}
		}
		s.wantHeld("board/v", a)
		a.tell("go background")
		a.staged("board/v")
		s.wantNames("board/v", stagedNames)
		s.wantFree()
	})
}

// makeOld sets a build's timestamp back by an hour.
func (s *site) makeOld(tag string) {
	s.t.Helper()
	hourAgo := time.Now().Add(-time.Hour)
	mustDo(s.t, os.Chtimes(s.at(tag, "staged.timestamp"), hourAgo, hourAgo))
}

// TestDownloaderCleaner: the cleaner removes old builds, and spares new ones and
// those in use. On a mount it spares as well what is being staged anew.
func TestDownloaderCleaner(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		a := s.start("downloader.py", s.dir, ar.dir)
		for _, v := range []string{"new", "old", "used", "held"} {
			ar.build("board/" + v)
			a.ask("download board/"+v, "staging")
			a.staged("board/" + v)
		}
		a.tell("pause foreground")
		a.ask("download board/held force", "at foreground")
		for _, v := range []string{"old", "used", "held"} {
			s.makeOld("board/" + v)
		}
		a.ask("touch board/used", "touched")
		var before string
		if s.m != nil {
			before = digest(t, s.under("board/held"))
		}
		got := startProgram(t, nil, "cleaner.py", s.dir, "60").end()
		if s.m == nil {
			if want := "exit 0: removed board/held; removed board/old"; got != want {
				t.Errorf("the cleaner: %q, want %q", got, want)
			}
			return
		}
		if want := "exit 0: kept board/held Device or resource busy; removed board/old"; got != want {
			t.Errorf("the cleaner: %q, want %q", got, want)
		}
		if after := digest(t, s.under("board/held")); after != before {
			t.Errorf("refused, but changed:\n%s", diff(before, after))
		}
		a.ask("go foreground", "staging")
		a.staged("board/held")
		for _, v := range []string{"new", "used", "held"} {
			s.wantNames("board/"+v, stagedNames)
		}
		s.wantNames("board/old", "")
		s.wantFree()
	})
}

// each runs f for all programs at once.
func each(all []*program, f func(p *program)) {
	var wg sync.WaitGroup
	for _, p := range all {
		wg.Go(func() { f(p) })
	}
	wg.Wait()
}

// TestDownloaderOneBuild: downloaders that race for one build stage it once; those
// that try until it is there all find it whole.
func TestDownloaderOneBuild(t *testing.T) {
	const servers, rounds = 6, 4
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		var all []*program
		for range servers {
			all = append(all, s.start("downloader.py", s.dir, ar.dir))
		}
		for round := range rounds {
			tag := fmt.Sprintf("board%d/v", round)
			ar.build(tag)
			var staged atomic.Int32
			each(all, func(p *program) {
				for {
					p.tell("download %s", tag)
					switch line := p.line(); {
					case strings.HasPrefix(line, "there"):
						return
					case strings.HasPrefix(line, "staging"):
						staged.Add(1)
						p.staged(tag)
					case !strings.HasPrefix(line, "refused"):
						p.t.Errorf("said %q", line)
						return
					}
				}
			})
			if staged.Load() != 1 {
				t.Errorf("staged %d times", staged.Load())
			}
			s.wantNames(tag, stagedNames)
		}
		s.wantFree()
	})
}

// TestDownloaderBoard (A12): downloaders that stage different versions of a
// brand-new board at once all succeed.
func TestDownloaderBoard(t *testing.T) {
	const servers, rounds = 8, 4
	onSites(t, boards(), func(s *site) {
		ar := newArchive(t)
		var all []*program
		for range servers {
			all = append(all, s.start("downloader.py", s.dir, ar.dir))
		}
		for round := range rounds {
			tag := func(p *program) string { return fmt.Sprintf("board%d/v%d", round, p.Pid()) }
			for _, p := range all {
				ar.build(tag(p))
			}
			each(all, func(p *program) {
				p.ask("download "+tag(p), "staging")
				p.staged(tag(p))
			})
			for _, p := range all {
				s.wantNames(tag(p), stagedNames)
			}
		}
		s.wantFree()
	})
}
