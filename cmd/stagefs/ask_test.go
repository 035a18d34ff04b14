//go:build linux

package main

import (
	"slices"
	"sync"
	"testing"
)

// TestTogether: nobody waits for one daemon after the other that does not answer; what is
// seen comes in order, of many, too.
func TestTogether(t *testing.T) {
	var begun sync.WaitGroup
	begun.Add(3)
	got := together([]int{1, 2, 3}, func(n int) int {
		begun.Done()
		begun.Wait()
		return 2 * n
	})
	if !slices.Equal(got, []int{2, 4, 6}) {
		t.Errorf("together() = %v", got)
	}
	many := make([]int, 100)
	for i := range many {
		many[i] = i
	}
	if got := together(many, func(n int) int { return n }); !slices.Equal(got, many) {
		t.Errorf("together() of many = %v", got)
	}
}
