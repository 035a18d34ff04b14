//go:build linux

package tests

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// manyLocks makes the listings longer than many pages.
func manyLocks(t *testing.T, m *Mount) *Agent {
	t.Helper()
	a := agent(t)
	for i := range 300 {
		a.must("mkdir", m.At("D"+strconv.Itoa(i)))
	}
	return a
}

// sent is what sendfile(2) copies of a file in one go, as busybox's cat does, or in steps.
func sent(t *testing.T, f *os.File, step int) ([]byte, error) {
	t.Helper()
	fd, err := unix.MemfdCreate("sent", unix.MFD_CLOEXEC)
	mustDo(t, err)
	out := os.NewFile(uintptr(fd), "sent")
	defer out.Close()
	for {
		n, err := unix.Sendfile(fd, int(f.Fd()), nil, step)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
	}
	_, err = out.Seek(0, io.SeekStart)
	mustDo(t, err)
	all, err := io.ReadAll(out)
	mustDo(t, err)
	return all, nil
}

// spliced is what splice(2) moves of a file into a pipe.
func spliced(t *testing.T, f *os.File) (all []byte, err error) {
	t.Helper()
	r, w, err := os.Pipe()
	mustDo(t, err)
	defer r.Close()
	defer w.Close()
	buf := make([]byte, 1<<16)
	for {
		n, err := unix.Splice(int(f.Fd()), nil, int(w.Fd()), nil, len(buf), 0)
		if err != nil || n == 0 {
			return all, err
		}
		_, err = io.ReadFull(r, buf[:n])
		mustDo(t, err)
		all = append(all, buf[:n]...)
	}
}

// TestControlSendfile: whoever copies a listing with sendfile(2), splice(2) or mmap(2)
// gets what read(2) gives, whatever others have read or read meanwhile.
func TestControlSendfile(t *testing.T) {
	m := mount(t)
	holder := manyLocks(t, m)
	agent(t).want("EBUSY", "creat", m.At("D0/file"), "wronly,creat,excl")
	stat := func(t *testing.T, f *os.File) int {
		st, err := f.Stat()
		mustDo(t, err)
		return int(st.Size())
	}
	for name, how := range map[string]func(t *testing.T, f *os.File) []byte{
		"sendfile": func(t *testing.T, f *os.File) []byte {
			all, err := sent(t, f, 1<<24)
			mustDo(t, err)
			return all
		},
		"in steps, beside other readers of other texts": func(t *testing.T, f *os.File) []byte {
			for range 3 {
				holder.must("mkdir", m.At("E"+strconv.Itoa(int(monotonic()))))
				other, err := os.Open(f.Name())
				mustDo(t, err)
				defer other.Close()
				_, err = sent(t, other, 1<<24)
				mustDo(t, err)
				_, err = os.Stat(f.Name())
				mustDo(t, err)
			}
			all, err := sent(t, f, 1000)
			mustDo(t, err)
			return all
		},
		"after fstat": func(t *testing.T, f *os.File) []byte {
			stat(t, f)
			all, err := sent(t, f, 1<<24)
			mustDo(t, err)
			return all
		},
		"splice": func(t *testing.T, f *os.File) []byte {
			all, err := spliced(t, f)
			mustDo(t, err)
			return all
		},
		"mmap": func(t *testing.T, f *os.File) []byte {
			size := stat(t, f)
			if size == 0 {
				return nil
			}
			all, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
			mustDo(t, err)
			defer unix.Munmap(all)
			return bytes.Clone(all)
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, file := range []string{"locks", "locks.json", "denials", "metrics", "quarantine", "version"} {
				f, err := os.Open(m.control(file))
				mustDo(t, err)
				defer f.Close()
				got := how(t, f)
				want, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<30))
				mustDo(t, err)
				if !bytes.Equal(got, want) || len(want) == 0 && file != "quarantine" {
					t.Errorf("%s: %d bytes, read(2) gives %d", file, len(got), len(want))
				}
				if size := stat(t, f); size != len(want) {
					t.Errorf("%s: st_size %d of %d bytes that are open", file, size, len(want))
				}
				if hole, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_HOLE); len(want) > 0 && (err != nil || hole != int64(len(want))) {
					t.Errorf("%s: a hole at %d of %d bytes, %v", file, hole, len(want), err)
				}
				if _, err := unix.Seek(int(f.Fd()), int64(len(want)), unix.SEEK_DATA); err != unix.ENXIO {
					t.Errorf("%s: SEEK_DATA at the end: %v, want ENXIO", file, err)
				}
				if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != unix.EOPNOTSUPP {
					t.Errorf("%s: flock: %v, want EOPNOTSUPP", file, err)
				}
			}
		})
	}
	if st, err := os.Stat(m.control("locks")); err != nil || st.Size() != 0 {
		t.Errorf("nobody has it open: %d bytes, %v; want none", st.Size(), err)
	}
}

// TestControlSendfileClients: so do programs that copy in the kernel.
func TestControlSendfileClients(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	manyLocks(t, m)
	openDir(t, m.Back("into"))
	for _, call := range []string{
		"os.execlp('cp', 'cp', sys.argv[1], sys.argv[2])",
		"shutil.copyfile(sys.argv[1], sys.argv[2])",
		"i, o = open(sys.argv[1]), open(sys.argv[2], 'w')\nwhile os.sendfile(o.fileno(), i.fileno(), None, 1 << 20): pass",
		"i, o = open(sys.argv[1]), open(sys.argv[2], 'w')\nwhile os.copy_file_range(i.fileno(), o.fileno(), 1 << 20): pass",
	} {
		to := m.At("into/copy")
		if r := run(t, "python3", "-c", "import os, shutil, sys\n"+call, m.control("locks"), to); r.Status != 0 {
			t.Fatal(r)
		}
		want, err := os.ReadFile(m.control("locks"))
		mustDo(t, err)
		if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v; want %d", call, len(got), err, len(want))
		}
	}
}

// TestControlSendfileReplaced: so does who has opened one before another daemon goes on.
func TestControlSendfileReplaced(t *testing.T) {
	m := mountOver(t)
	manyLocks(t, m)
	f, err := os.Open(m.control("locks"))
	mustDo(t, err)
	defer f.Close()
	m.replace()
	st, err := f.Stat()
	mustDo(t, err)
	all, err := spliced(t, f)
	if want, _ := io.ReadAll(io.NewSectionReader(f, 0, 1<<30)); err != nil || len(want) == 0 || !bytes.Equal(all, want) || st.Size() != int64(len(want)) {
		t.Errorf("%d bytes, st_size %d, %v; read(2) gives %d", len(all), st.Size(), err, len(want))
	}
}

// TestControlSendfileEvents: events are no pages. splice(2) says so, and does not wait;
// a program goes on with read(2) then.
func TestControlSendfileEvents(t *testing.T) {
	m := mount(t)
	f, err := os.Open(m.control("events"))
	mustDo(t, err)
	defer f.Close()
	agent(t).must("mkdir", m.At("D"))
	if all, err := spliced(t, f); err != unix.EINVAL {
		t.Errorf("splice: %q, %v; want EINVAL", all, err)
	}
	buf := make([]byte, 1<<16)
	if n, err := f.Read(buf); err != nil || !bytes.Contains(buf[:n], []byte(`"D"`)) {
		t.Errorf("then read: %q, %v", buf[:n], err)
	}
}

// TestControlSendfileAttack: who opens a listing again by its descriptor while pages of it
// are being read makes the daemon wait for nothing.
func TestControlSendfileAttack(t *testing.T) {
	m := mount(t)
	manyLocks(t, m)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 6 {
				path, err := unix.Open(m.control("locks"), unix.O_PATH, 0)
				if err != nil {
					t.Error(err)
					return
				}
				again := "/proc/self/fd/" + strconv.Itoa(path)
				var opens sync.WaitGroup
				for range 4 {
					opens.Go(func() {
						for range 5 {
							f, err := os.Open(again)
							if err != nil {
								t.Error(err)
								return
							}
							if _, err := spliced(t, f); err != nil {
								t.Errorf("splice: %v", err)
							}
							if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
								t.Errorf("fadvise: %v", err)
							}
							f.Close()
						}
					})
				}
				opens.Wait()
				unix.Close(path)
			}
		})
	}
	all.Wait()
}
