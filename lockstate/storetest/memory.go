package storetest

import (
	"bytes"
	"maps"
	"sync"

	"github.com/stagefs/stagefs/lockstate"
)

// A Memory is a store that lives as long as the process: the model of all
// others.
type Memory struct {
	mu      sync.Mutex
	mark    uint64
	records map[uint64][]byte
	loaded  map[uint64][]byte
}

var _ lockstate.Store = (*Memory)(nil)

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{records: make(map[uint64][]byte)} }

// Reopen returns what the next daemon would open.
func (m *Memory) Reopen() *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &Memory{mark: m.mark, records: maps.Clone(m.records), loaded: maps.Clone(m.records)}
}

// Tokens implements [lockstate.Store].
func (m *Memory) Tokens() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mark
}

// Reserve implements [lockstate.Store].
func (m *Memory) Reserve(upTo uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mark = max(m.mark, upTo)
	return nil
}

// Load implements [lockstate.Store].
func (m *Memory) Load() map[uint64][]byte { return m.loaded }

// Put implements [lockstate.Store].
func (m *Memory) Put(token uint64, record []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.records[token] = bytes.Clone(record)
}

// Delete implements [lockstate.Store].
func (m *Memory) Delete(token uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.records, token)
}

// Flush implements [lockstate.Store].
func (m *Memory) Flush() error { return nil }

// Sync implements [lockstate.Store].
func (m *Memory) Sync() error { return nil }

// Warnings implements [lockstate.Store].
func (m *Memory) Warnings() []string { return nil }

// Complete implements [lockstate.Store].
func (m *Memory) Complete() bool { return true }

// Close implements [lockstate.Store].
func (m *Memory) Close() error { return nil }
