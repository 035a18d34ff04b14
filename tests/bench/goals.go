//go:build linux

package main

import "fmt"

// A goal bounds the ratio of a row on stagefs to the bare directory. Zero
// limits bound nothing.
type goal struct {
	row     string
	ring    float64 // with FUSE over io_uring
	threads float64 // without
}

// goals are aims, told beside what was measured; no run fails for missing one.
func goals() []goal {
	return []goal{
		{"write", 1.03, 1.03},
		{"read cold", 1.03, 1.03},
		{"read warm", 1.03, 1.03},
		{"mmap read", 1.03, 1.03},
		{"mmap write", 1.03, 1.03},
		{"random read", 1.03, 1.03},
		{"random write", 1.03, 1.03},
		{"create", 4, 6.5},
		{"unlink", 3.5, 6},
		{"mkdir", 3, 4},
		{"rename", 4, 5},
		{"chmod", 4.5, 5},
		{"create+write 4K", 5, 0},
		{"open+read 4K", 5, 0},
		{"open+close", 8, 0},
		{"stat warm", 1.05, 1.05},
		{"missing again", 1.05, 1.05},
		{"untar", 3.5, 0},
		{"rm -rf", 2.8, 0},
		{"find+stat warm", 1.5, 0},
		{"ls -lR warm", 2, 0},
		{"find cold", 1.7, 0},
		{"grep -r warm", 7, 0},
		{"tar c warm", 5, 0},
		{"git clone", 3, 3},
		{"go build", 1.3, 1.3},
	}
}

const (
	// stateLimit bounds a row in any other state, relative to the free one.
	stateLimit = 1.05
	// memoryLimit bounds resident memory after walking a million files, in MiB.
	memoryLimit = 150
)

// aheadOf are the peers that a stagefs shall beat in every row: under the same
// conditions, which means that over io_uring it is measured by what uses that
// too, where there is such a one.
func aheadOf(transport string) [][]string {
	hp := []string{"passthrough_hp"}
	if transport == "uring" {
		hp = []string{"passthrough_hp ring", "passthrough_hp"}
	}
	return [][]string{{"loopback"}, hp}
}

// limit is the bound of a row, 0 if it has none.
func limit(row string, ring bool) float64 {
	for _, g := range goals() {
		if g.row == row && ring {
			return g.ring
		} else if g.row == row {
			return g.threads
		}
	}
	return 0
}

// verdict compares a measured value with a bound.
func verdict(value, limit float64) string {
	switch {
	case limit == 0 || value == 0:
		return ""
	case value <= limit:
		return fmt.Sprintf("<=%.3g met", limit)
	default:
		return fmt.Sprintf("<=%.3g missed", limit)
	}
}
