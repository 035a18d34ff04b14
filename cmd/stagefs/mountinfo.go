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
