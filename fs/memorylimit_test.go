package fs

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// TestMemoryLimit: the least limit of all cgroups that one is in counts.
func TestMemoryLimit(t *testing.T) {
	for want, files := range map[int64]map[string]string{
		math.MaxInt64: {"memory.max": "max\n", "in/memory.max": "max\n", "in/memory.high": "0\n"},
		1 << 20:       {"memory.max": "1048576\n", "in/memory.max": "max\n"},
		1 << 19:       {"memory.max": "1048576\n", "in/memory.max": "1048576\n", "in/memory.high": "524288\n"},
		1 << 18:       {"memory.limit_in_bytes": "9223372036854771712\n", "in/memory.limit_in_bytes": "262144\n"},
	} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "in"), 0o777); err != nil {
			t.Fatal(err)
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		if got := memoryLimit(filepath.Join(dir, "in")); got != want {
			t.Errorf("memoryLimit(%v) = %d, want %d", files, got, want)
		}
	}
	if got := memoryLimit(""); got != math.MaxInt64 {
		t.Errorf("memoryLimit of none = %d", got)
	}
}
