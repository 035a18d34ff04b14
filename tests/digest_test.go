//go:build linux

package tests

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// digest describes everything beneath dir that a refused operation must not
// change, one line an entry: name, mode, owner, link count, size, mtime,
// xattrs (ACLs among them) and content.
func digest(t *testing.T, dir string) string { t.Helper(); return digestTree(t, dir, true) }

// shape is the digest without what differs from one run to the next: times.
func shape(t *testing.T, dir string) string { t.Helper(); return digestTree(t, dir, false) }

func digestTree(t *testing.T, dir string, times bool) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		line, err := digestEntry(path, times)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&out, "%q %s\n", rel, line)
		return nil
	})
	mustDo(t, err)
	return out.String()
}

func digestEntry(path string, times bool) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", err
	}
	line := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
	if times {
		line += fmt.Sprintf(" nlink %d mtime %d.%09d", st.Nlink, st.Mtim.Sec, st.Mtim.Nsec)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" size %d sha %x", st.Size, sha256.Sum256(content))
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" -> %q", target)
	}
	xattrs, err := xattrsOf(path)
	return line + xattrs, err
}

func xattrsOf(path string) (string, error) {
	buf := make([]byte, 4096)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return "", err
	}
	names := strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	var out string
	for _, name := range names {
		if name == "" {
			continue
		}
		n, err := unix.Lgetxattr(path, name, buf)
		if err != nil {
			return "", err
		}
		out += fmt.Sprintf(" %s=%q", name, buf[:n])
	}
	return out, nil
}
