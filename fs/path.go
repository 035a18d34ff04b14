package fs

import "strings"

// Paths of the lock table: relative to the root, which is ".".

// split returns the names in a path of the table.
func split(path string) []string {
	if path == "." || path == "" {
		return nil
	}
	return strings.Split(path, "/")
}

// join is the opposite of split.
func join(dir, name string) string {
	if dir == "." || dir == "" {
		return name
	}
	if name == "" || name == "." {
		return dir
	}
	return dir + "/" + name
}

// cutLast splits a path of the table before its last name.
func cutLast(path string) (dir, name string) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return ".", path
	}
	return path[:i], path[i+1:]
}

// within reports whether a path is a directory's, or that of something in it.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
