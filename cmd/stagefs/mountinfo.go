//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// fsType is what mount tables call a stagefs mount.
const fsType = "fuse.stagefs"

// A mountEntry is one line of /proc/self/mountinfo.
type mountEntry struct {
	id       int
	path     string
	options  string // of the mount
	fstype   string
	source   string
	fsOption string // of the file system
}

// readMountinfo reads the mount table: it knows dead and hanging mounts too,
// and touches none. Later entries cover earlier ones.
func readMountinfo() ([]mountEntry, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMountinfo(string(data)), nil
}

func parseMountinfo(text string) []mountEntry {
	var all []mountEntry
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(left), strings.Fields(right)
		if !ok || len(f) < 6 || len(g) < 3 {
			continue
		}
		id, err := strconv.Atoi(f[0])
		if err != nil {
			continue
		}
		all = append(all, mountEntry{
			id: id, path: unescapeMount(f[4]), options: f[5],
			fstype: g[0], source: unescapeMount(g[1]), fsOption: g[2],
		})
	}
	return all
}

// unescapeMount undoes \ooo, as the kernel writes blanks and line breaks.
func unescapeMount(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// topMount is what is mounted exactly at path, nil if nothing is.
func topMount(mounts []mountEntry, path string) *mountEntry {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].path == path {
			return &mounts[i]
		}
	}
	return nil
}

// covering is the mount that path is on.
func covering(mounts []mountEntry, path string) *mountEntry {
	for ; ; path = filepath.Dir(path) {
		if m := topMount(mounts, path); m != nil || path == "/" || path == "." {
			return m
		}
	}
}

// below reports whether path is dir or beneath it.
func below(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// lexical is path as an absolute one whose parents are no symlinks. The last
// element is left alone: it may be the root of a mount that is dead or hangs.
func lexical(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if parent, err := filepath.EvalSymlinks(filepath.Dir(abs)); err == nil {
		return filepath.Join(parent, filepath.Base(abs)), nil
	}
	return abs, nil
}
