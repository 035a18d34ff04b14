//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// An ext4 without a journal makes no use of an inode whose file was removed in the
// last minutes, and looks at all of these, one by one, whenever it makes a file:
// what a row takes then depends on what was measured before it. So it is measured
// in an image, which has a journal, unless that is not wanted.

// When it is measured in an image.
const (
	imageAuto   = "auto" // on an ext4 without a journal
	imageAlways = "always"
	imageNever  = "never"
)

// inImage mounts an image on root, if mode says so, and reports whether it did.
func inImage(ctx context.Context, root, mode string, z size) (bool, error) {
	if mode == imageNever || mode == imageAuto && !lacksJournal(root) {
		return false, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return false, err
	}
	// Nothing is taken from the disk before it is written.
	room := min(z.image, int64(st.Bavail)*st.Bsize/10*9)
	below, err := os.Open(root)
	if err != nil {
		return false, err
	}
	defer below.Close()
	// Once it is mounted, the device keeps it.
	defer unix.Unlinkat(int(below.Fd()), "image", 0)
	file := filepath.Join(root, "image")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, room)); err != nil {
		return false, err
	}
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-O", "has_journal", "-E", "lazy_itable_init=0,lazy_journal_init=0", file},
		{"mount", "-t", "ext4", "-o", "loop", file, root},
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return false, fmt.Errorf("an image to measure in: %s: %w: %s (--image never does without)", args[0], err, strings.TrimSpace(string(out)))
		}
	}
	// What is in the image is in the page cache once, not twice.
	if dev, err := deviceOf(root); err == nil {
		_ = exec.CommandContext(ctx, "losetup", "--direct-io=on", filepath.Join("/dev", dev)).Run()
	}
	return true, nil
}

// lacksJournal reports whether dir is on an ext4 without a journal.
func lacksJournal(dir string) bool {
	dev, err := deviceOf(dir)
	if err != nil {
		return false
	}
	task, err := os.ReadFile(filepath.Join("/sys/fs/ext4", dev, "journal_task"))
	return err == nil && strings.TrimSpace(string(task)) == "<none>"
}

// deviceOf returns the name of the block device that dir is on.
func deviceOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", err
	}
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	return filepath.Base(link), err
}
