package storetest_test

import (
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/storetest"
)

// memory is a backend whose stores are forgotten with the test.
type memory struct{ last *storetest.Memory }

func (m *memory) Open(*testing.T) lockstate.Store {
	m.last = m.last.Reopen()
	return m.last
}

func (m *memory) Killed(*testing.T) lockstate.Store { return m.last.Reopen() }

func TestMemory(t *testing.T) {
	storetest.Run(t, func(*testing.T) storetest.Backend { return &memory{storetest.NewMemory()} })
}
