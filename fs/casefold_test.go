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
	for name, want := range map[string]string{"Board-1_ä": "bOARD-1_ä", "@[`{1": "@[`{1"} {
		if got := otherCase(name); got != want {
			t.Errorf("otherCase(%q) = %q, want %q", name, got, want)
		}
	}
}

// TestStartsFolding: nobody makes a directory through the mount that takes names that differ
// in case alone for the same.
func TestStartsFolding(t *testing.T) {
	dir, err := unix.Open(t.TempDir(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dir)
	flags, err := unix.IoctlGetUint32(dir, unix.FS_IOC_GETFLAGS)
	if err != nil {
		t.Skip(err)
	}
	if startsFolding(dir, flags) || !startsFolding(dir, flags|casefoldFlag) {
		t.Error("startsFolding() does not tell chattr +F from what changes nothing")
	}
}
