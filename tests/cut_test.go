//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cutMounts runs do with a mount of each kind in which file data takes another way.
func cutMounts(t *testing.T, do func(m *Mount) error) {
	need(t, "root", "fuse")
	for _, opts := range [][]string{nil, {"--no-passthrough"}, {"--transport=threads"}, {"--compat"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			if err := do(mount(t, opts...)); err != nil {
				t.Error(err)
			}
		})
	}
}

// cutOff opens a file with O_TRUNC, like a shell's >.
func cutOff(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// TestM2AppendedWhileTruncated: what is appended while somebody else opens the file with
// O_TRUNC is at its end: with no hole before, and never over what was appended before it.
func TestM2AppendedWhileTruncated(t *testing.T) {
	for _, how := range []struct {
		name   string
		flags  int
		record int
	}{{"write only", os.O_WRONLY, 100}, {"read and write", os.O_RDWR, 100}, {"pages", os.O_RDWR, 4096}} {
		t.Run(how.name, func(t *testing.T) {
			cutMounts(t, func(m *Mount) error { return appendWhileCut(m, how.flags, how.record) })
		})
	}
}

func appendWhileCut(m *Mount, flags, size int) error {
	path := m.At("file")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return err
	}
	log, err := os.OpenFile(path, flags|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	record := func(k int) []byte { return bytes.Repeat([]byte{byte('a' + k)}, size) }
	for round, until := 0, seconds(1); time.Now().Before(until); round++ {
		const records = 8
		var all sync.WaitGroup
		failed := make([]error, 3)
		all.Go(func() {
			for k := range records {
				if _, err := log.Write(record(k)); err != nil {
					failed[0] = err
				}
			}
		})
		all.Go(func() {
			for range 2 {
				failed[1] = cutOff(path)
			}
		})
		all.Go(func() {
			for range records {
				_, failed[2] = os.Stat(path)
			}
		})
		all.Wait()
		for _, err := range failed {
			if err != nil {
				return err
			}
		}
		got, err := os.ReadFile(m.Back("file"))
		if err != nil {
			return err
		}
		var want []byte
		for k := records - 1; len(want) < len(got) && k >= 0; k-- {
			want = append(record(k), want...)
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("round %d: %s is there, want %s", round, letters(got, size), letters(want, size))
		}
		if err := seenAsIs(m, got); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := os.Truncate(path, 0); err != nil {
			return err
		}
	}
	return nil
}

// TestS1ReplaceCut: nor is it written over what was appended before the daemon was replaced,
// though the kernel does not know where the file ends.
func TestS1ReplaceCut(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mount(t, opts...)
		path := m.At("file")
		mustDo(t, os.WriteFile(path, nil, 0o644))
		log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		mustDo(t, err)
		defer log.Close()
		const size = 100
		add := func(letter rune) {
			if _, err := log.WriteString(strings.Repeat(string(letter), size)); err != nil {
				t.Error(err)
			}
		}
		for range 8 { // mostly it knows too little after the first
			mustDo(t, os.Truncate(path, 0))
			var all sync.WaitGroup
			all.Go(func() {
				for _, letter := range "abcdefgh" {
					add(letter)
				}
			})
			all.Go(func() {
				if err := cutOff(path); err != nil {
					t.Error(err)
				}
			})
			all.Wait()
			before, err := os.ReadFile(m.Back("file"))
			mustDo(t, err)
			m.replace()
			add('z')
			got, err := os.ReadFile(m.Back("file"))
			mustDo(t, err)
			if want := string(before) + strings.Repeat("z", size); string(got) != want {
				t.Fatalf("%s is there, want %s", letters(got, size), letters([]byte(want), size))
			}
		}
	})
}

// letters tells of data by one character for each record.
func letters(data []byte, size int) string {
	var short []byte
	for at := 0; at < len(data); at += size {
		short = append(short, data[at])
	}
	return fmt.Sprintf("%q of %d bytes", short, len(data))
}

// seenAsIs says what is seen of the file through the mount but not below it, which holds
// data. Pages that were sent elsewhere than the kernel thought may be there for a moment
// longer.
func seenAsIs(m *Mount, data []byte) error {
	st, err := os.Stat(m.At("file"))
	if err != nil {
		return err
	}
	if st.Size() != int64(len(data)) {
		return fmt.Errorf("it has %d bytes, want %d", st.Size(), len(data))
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		got, err := os.ReadFile(m.At("file"))
		switch {
		case err != nil || bytes.Equal(got, data):
			return err
		case time.Now().After(end):
			return fmt.Errorf("%d bytes are read, and not the %d that are there", len(got), len(data))
		}
	}
}

// TestM2WrittenWhileTruncated: what is written while somebody else opens the file with
// O_TRUNC is seen from then on, if it is there.
func TestM2WrittenWhileTruncated(t *testing.T) {
	for _, flags := range []int{os.O_WRONLY, os.O_RDWR} {
		t.Run(itoa(flags), func(t *testing.T) {
			cutMounts(t, func(m *Mount) error { return writeWhileCut(m, flags) })
		})
	}
}

func writeWhileCut(m *Mount, flags int) error {
	path := m.At("file")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return err
	}
	writer, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return err
	}
	defer writer.Close()
	for round, until := 0, seconds(1); time.Now().Before(until); round++ {
		var all sync.WaitGroup
		failed := make([]error, 2)
		all.Go(func() {
			for range 3 {
				if _, err := writer.WriteAt(make([]byte, 100), 0); err != nil {
					failed[0] = err
				}
				writer.Stat()
			}
		})
		all.Go(func() {
			for range 2 {
				failed[1] = cutOff(path)
			}
		})
		all.Go(func() {
			for range 6 {
				os.Stat(path)
			}
		})
		all.Wait()
		for _, err := range failed {
			if err != nil {
				return err
			}
		}
		data, err := os.ReadFile(m.Back("file"))
		if err != nil {
			return err
		}
		if err := seenAsIs(m, data); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// TestM2MappedWhileTruncated: what was stored in a mapping does not come back when it is
// written out while somebody else opens the file with O_TRUNC.
func TestM2MappedWhileTruncated(t *testing.T) {
	cutMounts(t, mapWhileCut)
}

func mapWhileCut(m *Mount) error {
	path := m.At("file")
	const size = 3 * 4096
	for round, until := 0, seconds(1); time.Now().Before(until); round++ {
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), size), 0o644); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		mapped, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		f.Close()
		if err != nil {
			return err
		}
		for at := 0; at < size; at += 4096 {
			mapped[at] = 'm'
		}
		var all sync.WaitGroup
		all.Go(func() { unix.Msync(mapped, unix.MS_SYNC) })
		all.Go(func() { err = cutOff(path) })
		all.Wait()
		unix.Munmap(mapped)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(m.Back("file"))
		if err != nil {
			return err
		}
		if len(data) > 0 {
			return fmt.Errorf("round %d: %d bytes are there again", round, len(data))
		}
	}
	return nil
}

// TestM2AppendedBesideDead: what is appended through a mount goes behind what somebody
// writes meanwhile to a file that he has open past a dead daemon.
func TestM2AppendedBesideDead(t *testing.T) {
	m := mount(t)
	needPassthrough(m)
	openFile(t, m.Back("file"), "")
	old, appends := agent(t), agent(t)
	old.must("open", "x", m.At("file"), "wronly")
	old.must("write", "x", "before ")
	m.restart(nil)
	appends.must("open", "x", m.At("file"), "wronly,append")
	appends.must("write", "x", "one ")
	old.must("pwrite", "x", "p", "4", "11")
	appends.must("write", "x", "two")
	if data, err := os.ReadFile(m.Back("file")); err != nil || string(data) != "before one pppptwo" {
		t.Errorf("%q is there, %v", data, err)
	}
	if data, err := os.ReadFile(m.At("file")); err != nil || string(data) != "before one pppptwo" {
		t.Errorf("%q is read, %v", data, err)
	}
}
