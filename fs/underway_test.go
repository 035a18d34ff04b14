package fs

import (
	"testing"
)

// What is remembered of changes of names goes with those who made them.
func TestUnderWayForgets(t *testing.T) {
	var c changesUnderWay
	n := &node{}
	for tid := range uint32(10_000) {
		c.began(&changeUnderWay{tid: tid + 1, nodes: [2]*node{n}})
		c.began(&changeUnderWay{tid: tid + 1})
	}
	if len(c.byTid) != 1 || len(c.byNode) != 1 {
		t.Errorf("%d threads and %d files are remembered, want the last of each", len(c.byTid), len(c.byNode))
	}
	for tid := range uint32(2 * maxUnderWay) {
		c.began(&changeUnderWay{tid: 1, nodes: [2]*node{{}}, token: uint64(tid)})
	}
	if len(c.byTid) != 2 || len(c.byNode) > maxUnderWay+1 {
		t.Errorf("%d threads and %d files are remembered, want 2 and at most %d", len(c.byTid), len(c.byNode), maxUnderWay+1)
	}
}
