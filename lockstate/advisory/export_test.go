package advisory

// SetLimit sets how many locks may be held at a time.
func (t *Table) SetLimit(n int) { t.limit = n }

// Waiters returns who waits for a lock on the file, in order of arrival.
func (t *Table) Waiters(key Key) []Lock {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Lock
	if f := t.files[key]; f != nil {
		for _, r := range f.waiters {
			all = append(all, r.Lock)
		}
	}
	return all
}
