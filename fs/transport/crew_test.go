package transport

import "testing"

// A crew of which all are busy grows as long as nothing is taken, but not without end where
// one request is taken now and then.
func TestCrewGrows(t *testing.T) {
	for _, test := range []struct {
		name          string
		every         int // so many ticks a request is taken; 0: none is
		least, utmost int
	}{
		{"nothing is taken", 0, 200, 500},
		{"taken now and then", 5, 10, 150},
		{"always taken", 1, 0, 0},
	} {
		var c crew
		n := 0
		c.grow = func() error { n++; return nil }
		for tick := range 2000 {
			if test.every > 0 && tick%test.every == 0 {
				c.taken.Add(1)
			}
			if !c.check() {
				t.Fatal("check() = false, want true")
			}
		}
		if n < test.least || n > test.utmost {
			t.Errorf("%s: %d threads were added, want %d to %d", test.name, n, test.least, test.utmost)
		}
	}
}
