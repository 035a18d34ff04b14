//go:build linux

package main

import "slices"

// A Spread tells of several values what is typical, and how far they lie apart.
type Spread struct {
	N      int     `json:"n"`
	Min    float64 `json:"min"`
	Q1     float64 `json:"q1"`
	Median float64 `json:"median"`
	Q3     float64 `json:"q3"`
	Max    float64 `json:"max"`
}

// spreadOf describes values, in any order. That of none is zero.
func spreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	v := slices.Sorted(slices.Values(values))
	return Spread{
		N: len(v), Min: v[0], Max: v[len(v)-1],
		Q1: quantile(v, 0.25), Median: quantile(v, 0.5), Q3: quantile(v, 0.75),
	}
}

// quantile interpolates between the neighbours of a place in sorted values.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// A Sample is one timing: of a row, on a subject in a state, in a turn of a round.
type Sample struct {
	Row     string  `json:"row"`
	Subject string  `json:"subject"`
	State   string  `json:"state"`
	Round   int     `json:"round"`
	Turn    int     `json:"turn,omitempty"` // which of the round's, where a work is done more than once
	Seconds float64 `json:"seconds"`
	Ops     int64   `json:"ops"` // how many operations it was; 1 for a whole tool

	// Best is what one operation took in the fastest stretch of a loop, which
	// tells something also where others use the machine; 0 if there is none.
	Best float64 `json:"best_seconds,omitempty"`

	Spent
}

// A side is one half of a comparison.
type side struct{ Subject, State string }

// is reports whether s is of a row on a side.
func (s Sample) is(row string, of side) bool {
	return s.Row == row && s.Subject == of.Subject && s.State == of.State
}

// ratios divides the times of a row on one side by those on the other, turn by
// turn. Turns that lack either are left out.
func ratios(samples []Sample, row string, of, to side) []float64 {
	type turn struct{ round, turn int }
	base := map[turn]float64{}
	for _, s := range samples {
		if s.is(row, to) && s.Seconds > 0 {
			base[turn{s.Round, s.Turn}] = s.Seconds
		}
	}
	var out []float64
	for _, s := range samples {
		if b := base[turn{s.Round, s.Turn}]; b > 0 && s.is(row, of) {
			out = append(out, s.Seconds/b)
		}
	}
	return out
}

// perOp has the seconds that one operation of a row took on a side, turn by turn.
func perOp(samples []Sample, row string, of side) []float64 {
	var out []float64
	for _, s := range samples {
		if s.is(row, of) && s.Ops > 0 {
			out = append(out, s.Seconds/float64(s.Ops))
		}
	}
	return out
}

// bestOp is what one operation of a row took in the fastest stretch of all
// turns; 0 if that is not known.
func bestOp(samples []Sample, row string, of side) float64 {
	best := 0.0
	for _, s := range samples {
		if s.is(row, of) && s.Best > 0 && (best == 0 || s.Best < best) {
			best = s.Best
		}
	}
	return best
}
