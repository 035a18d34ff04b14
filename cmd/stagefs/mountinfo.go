//go:build linux

package main

import (
	"path/filepath"
	"strings"

	"github.com/stagefs/stagefs/fs"
)

// pathInMount returns where a path is to be found in a mount whose static directory it is,
// or is beneath; "" if there is none elsewhere.
func pathInMount(path string) string {
	mounts, err := fs.Mounts()
	if err != nil {
		return ""
	}
	path, err = fs.AbsoluteOf(path)
	if err != nil {
		return ""
	}
	for _, m := range mounts {
		if m.Root != "/" {
			continue
		}
		if source, err := fs.AbsoluteOf(m.Source); err == nil && source != m.Path && below(path, source) {
			return filepath.Join(m.Path, strings.TrimPrefix(path, source))
		}
	}
	return ""
}

// below reports whether path is dir or beneath it.
func below(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
