//go:build linux

package main

import (
	"path/filepath"
	"strings"

	"github.com/stagefs/stagefs/fs"
)

// fsType is what mount tables call a stagefs mount.
const fsType = "fuse.stagefs"

// topMount is what is mounted exactly at path, nil if nothing is.
func topMount(mounts []fs.MountEntry, path string) *fs.MountEntry {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].Path == path {
			return &mounts[i]
		}
	}
	return nil
}

// covering is the mount that path is on.
func covering(mounts []fs.MountEntry, path string) *fs.MountEntry {
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
