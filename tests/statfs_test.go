//go:build linux

package tests

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2RoomAtOnce: what a removed file took is free as soon as the removal has
// returned; one that is still open keeps its room, and df(1) waits for nobody to close it.
func TestM2RoomAtOnce(t *testing.T) {
	disk := newImage(t, 128)
	m := disk.mount("--disable-locking")
	free := func() int64 {
		var st unix.Statfs_t
		mustDo(t, unix.Statfs(m.Path, &st))
		return int64(st.Bfree) * st.Bsize
	}
	const size, near = 64 << 20, 1 << 20
	content := bytes.Repeat([]byte("x"), size)
	mustDo(t, os.WriteFile(m.At("first"), nil, 0o644)) // what it costs the directory
	before := free()
	for range 5 {
		mustDo(t, os.WriteFile(m.At("file"), content, 0o644))
		mustDo(t, os.Remove(m.At("file")))
		if after := free(); after < before-near {
			t.Errorf("free after the removal: %d bytes, want about the %d of before", after, before)
		}
	}

	f, err := os.Create(m.At("open"))
	mustDo(t, err)
	defer f.Close()
	_, err = f.Write(content)
	mustDo(t, err)
	mustDo(t, os.Remove(m.At("open")))
	if after := free(); after > before-size+near {
		t.Errorf("free with a removed file open: %d bytes of %d, want that it keeps its %d", after, before, size)
	}
	mustDo(t, f.Close())
}

// TestM2RoomForTheNext: where the file system is full, what a removed file took can be
// written at once.
func TestM2RoomForTheNext(t *testing.T) {
	disk := newImage(t, 384)
	content := bytes.Repeat([]byte("x"), 256<<20)
	for _, opts := range [][]string{{"--disable-locking"}, {"--disable-locking", "--no-passthrough"}} {
		m := disk.mount(opts...)
		for i := range 3 {
			mustDo(t, os.WriteFile(m.At("file"), content, 0o644))
			disk.fill()
			mustDo(t, os.Remove(m.At("file")))
			if err := os.WriteFile(m.At("next"), content[:16<<20], 0o644); err != nil {
				t.Errorf("%v, removal no. %d: %v", opts, i, err)
			}
			mustDo(t, os.Remove(m.At("next")))
			disk.free()
		}
		m.stop()
	}
}
