// Package prefetch has something prepared on another processor, if there is one, while
// what was prepared before is used.
package prefetch

import "iter"

// depth is how many batches there are at a time: one in use, one being filled, and
// one ready for whichever side is faster for a moment.
const depth = 3

// Batches returns what fill puts into batches, one after the other, until it reports
// that there is no more. A batch is valid until the next one is asked for, and is
// then filled again: fill finds in it what it left there. Nothing calls fill any
// more when the loop over the batches has ended, however that was.
func Batches[T any](fill func(batch *T) (more bool)) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		full, free, stop := make(chan *T, depth), make(chan *T, depth), make(chan struct{})
		for range depth {
			free <- new(T)
		}
		go func() {
			defer close(full)
			for more := true; more; {
				select {
				case batch := <-free:
					more = fill(batch)
					full <- batch // there is room for all
				case <-stop:
					return
				}
			}
		}()
		defer func() {
			close(stop)
			for range full { // until it has ended
			}
		}()
		for batch := range full {
			if !yield(batch) {
				return
			}
			free <- batch
		}
	}
}
