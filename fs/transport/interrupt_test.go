package transport

import "testing"

// A Stop cancels what waits at once, however many do: nobody is looked for by its number.
func TestHalt(t *testing.T) {
	var f inflight
	var waits []<-chan struct{}
	for unique := range uint64(3) {
		s := f.add()
		s.unique.Store(unique + 1)
		waits = append(waits, s.begin())
	}
	f.add().unique.Store(4) // it has not begun
	for range 2 {
		if others := f.halt(); len(others) != 1 || others[0] != 4 {
			t.Errorf("halt() = %v, want 4", others)
		}
	}
	for i, cancel := range waits {
		select {
		case <-cancel:
		default:
			t.Errorf("request %d goes on", i+1)
		}
	}
}
