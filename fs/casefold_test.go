package fs

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestFoldsCase: what is known to take names that differ in case alone for the same is told
// from what is not.
func TestFoldsCase(t *testing.T) {
	const immutable, indexed = 0x10, 0x1000 // FS_IMMUTABLE_FL, FS_INDEX_FL
	for _, tt := range []struct {
		what   string
		fstype int64
		flags  uint32
		want   bool
	}{
		{"ext4", unix.EXT4_SUPER_MAGIC, indexed | immutable, false},
		{"ext4, chattr +F", unix.EXT4_SUPER_MAGIC, indexed | casefoldFlag, true},
		{"tmpfs, chattr +F", unix.TMPFS_MAGIC, casefoldFlag, true},
		{"vfat", unix.MSDOS_SUPER_MAGIC, 0, true},
		{"exfat", unix.EXFAT_SUPER_MAGIC, 0, true},
	} {
		if got := folds(tt.fstype, tt.flags); got != tt.want {
			t.Errorf("%s: folds() = %t, want %t", tt.what, got, tt.want)
		}
	}
	if dir := t.TempDir(); FoldsCase(dir) {
		t.Errorf("FoldsCase(%s) = true", dir)
	}
}
