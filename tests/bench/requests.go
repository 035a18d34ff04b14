//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
)

// requestsIn are those of the kernel that a stagefs had by now, by kind, as it counts
// them in a file.
func requestsIn(file string) map[string]int64 {
	all := map[string]int64{}
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, `stagefs_requests_total{op="`); ok {
			kind, value, _ := strings.Cut(rest, `"} `)
			all[kind], _ = strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		}
	}
	return all
}

// requestsOf are a row's of one operation, the median of the rounds by kind.
// Forgets are left out: nobody waits for them.
func requestsOf(samples []Sample, row string, of side) map[string]float64 {
	rounds := map[string][]float64{}
	for _, s := range samples {
		if s.is(row, of) && s.Ops > 0 {
			for kind, n := range s.Requests {
				rounds[kind] = append(rounds[kind], float64(n)/float64(s.Ops))
			}
		}
	}
	all := map[string]float64{}
	for kind, v := range rounds {
		all[kind] = spreadOf(v).Median
	}
	delete(all, "forget")
	delete(all, "batch_forget")
	return all
}

// reportRequests tells what stands in the way of the goals of calls: as many
// requests that have nothing to do take so long.
func reportRequests(w io.Writer, r *Results) {
	for _, s := range r.Subjects {
		of := side{s.Name, stateFree}
		empty := spreadOf(perOp(r.Samples, "statfs", of)).Median
		if !r.ours(s) || empty == 0 {
			continue
		}
		lines := 0
		for _, row := range r.rows() {
			kinds := requestsOf(r.Samples, row, of)
			sum := total(kinds)
			bare := spreadOf(perOp(r.Samples, row, side{bareName, stateFree})).Median
			if sum < 0.5 || bare == 0 {
				continue
			}
			if lines++; lines == 1 {
				fmt.Fprintf(w, "\nRequests of the kernel for one operation on %s, and the time of as many empty ones (%s each) over that of the bare directory\n\nROW\tREQUESTS\tEMPTY\t%s\tGOAL\tKINDS\n",
					s.Name, seconds(empty), s.Name)
			}
			x, _ := r.ratio(row, s.Name, stateFree)
			fmt.Fprintf(w, "%s\t%.1f\t%s\t%s\t%s\t%s\n", row, sum, short(sum*empty/bare), short(x.Spread.Median), known(x.Limit), kindsText(kinds, sum))
		}
	}
}

// total adds up always in the same order, on which the last digit depends.
func total(kinds map[string]float64) (sum float64) {
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		sum += kinds[kind]
	}
	return sum
}

// kindsText names those that make up nearly all.
func kindsText(kinds map[string]float64, sum float64) string {
	names := slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
		return cmp.Or(cmp.Compare(kinds[b], kinds[a]), cmp.Compare(a, b))
	})
	var parts []string
	for _, kind := range names {
		if kinds[kind] >= 0.02*sum {
			parts = append(parts, fmt.Sprintf("%s %.1f", kind, kinds[kind]))
		}
	}
	return strings.Join(parts, ", ")
}
