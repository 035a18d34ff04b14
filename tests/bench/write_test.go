//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   Spread
	}{
		{nil, Spread{}},
		{[]float64{3}, Spread{1, 3, 3, 3, 3, 3}},
		{[]float64{4, 1}, Spread{2, 1, 1.75, 2.5, 3.25, 4}},
		{[]float64{5, 1, 4, 2, 3}, Spread{5, 1, 2, 3, 4, 5}},
	} {
		if got := spreadOf(c.values); got != c.want {
			t.Errorf("spreadOf(%v) = %+v, want %+v", c.values, got, c.want)
		}
	}
}

// The turns of the rounds are compared one by one: what was slow for all is not in the ratio.
func TestRatios(t *testing.T) {
	r := example()
	got := ratios(r.Samples, "create", side{oursName, stateFree}, side{bareName, stateFree})
	if want := []float64{4, 3, 3.5}; !slices.Equal(got, want) {
		t.Errorf("ratios = %v, want %v: the round without the bare directory is left out", got, want)
	}
	got = ratios(r.Samples, "create", side{oursName, stateHeld}, side{oursName, stateFree})
	if want := []float64{1.5}; !slices.Equal(got, want) {
		t.Errorf("ratios of states = %v, want %v", got, want)
	}
}

// example has two finished rounds, and a slow one.
func example() *Results {
	r := &Results{
		Profile: "tiny", Rounds: 2, Version: "stagefs <&>", Began: time.Unix(1_800_000_000, 0).UTC(),
		Subjects: []subject{{Name: bareName}, {Name: oursName, Command: []string{"stagefs"}, Transport: "uring"}, {Name: "loopback", Command: []string{"loopback"}}},
		Samples: []Sample{
			{"create", bareName, stateFree, 0, 0, 1, 10, 0.001, Spent{}},
			{"create", oursName, stateFree, 0, 0, 4, 10, 0.004, Spent{Own: 1, System: 2}},
			{"create", "loopback", stateFree, 0, 0, 2, 10, 0, Spent{}},
			{"create", bareName, stateFree, 1, 0, 10, 10, 0, Spent{}},
			{"create", oursName, stateFree, 1, 0, 30, 10, 0.002, Spent{}},
			{"create", "loopback", stateFree, 1, 0, 20, 10, 0, Spent{}},
			{"create", bareName, stateFree, 1, 1, 2, 10, 0, Spent{}},
			{"create", oursName, stateFree, 1, 1, 7, 10, 0, Spent{}},
			{"create", oursName, stateHeld, 1, 2, 1, 10, 0, Spent{}},
			{"create", oursName, stateFree, 2, 0, 9, 10, 0, Spent{}},
			{"create", oursName, stateHeld, 1, 0, 45, 10, 0.006, Spent{}},
			{"go build", bareName, stateFree, 0, 0, 10, 1, 0, Spent{}},
			{"go build", oursName, stateFree, 0, 0, 11, 1, 0, Spent{}},
		},
		Memory: []Memory{{Subject: oursName, Files: 3, Walked: Usage{RSS: 200 << 10, Descriptors: 7}}},
		Notes:  []string{"bindfs is left out"},
	}
	r.finish()
	return r
}

func TestReport(t *testing.T) {
	var out bytes.Buffer
	if err := report(&out, example()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"3.50 (3.00–4.00)  <=4 met    behind loopback",
		"1.10 (1.10–1.10)  <=1.3 met",
		"create  1.50 (1.50–1.50)  <=1.05 missed",
		"create  1.0 ms  2.00     <=4 met  3.00",
		"create  100.0 ms + 200.0 ms  3.50     4.00",
		"<=150 missed",
		"2 of 3 goals met",
		"bindfs is left out",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
}

func TestJSON(t *testing.T) {
	r := example()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	back := new(Results)
	if err := json.Unmarshal(text, back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, back, cmp.AllowUnexported(subject{})); diff != "" {
		t.Errorf("read back (-was +is):\n%s", diff)
	}
}

func TestPlot(t *testing.T) {
	svg := plot(example())
	wellFormed(t, svg)
	for _, want := range []string{"prefers-color-scheme: dark", "create, stagefs: 3.50 (3.00–4.00)", "go build", "stagefs &lt;&amp;&gt;", `class="goal"`} {
		if !bytes.Contains(svg, []byte(want)) {
			t.Errorf("the plot lacks %q:\n%s", want, svg)
		}
	}
	wellFormed(t, plot(new(Results)))
}

func wellFormed(t *testing.T, text []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(text)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
}

// Each goal is about a row that is measured.
func TestGoals(t *testing.T) {
	var rows []string
	for _, w := range works() {
		for _, s := range w.steps {
			rows = append(rows, s.rows...)
		}
	}
	for _, g := range goals() {
		if !slices.Contains(rows, g.row) {
			t.Errorf("a goal is about %q, which is no row", g.row)
		}
	}
	if got := len(rows); got != len(slices.Compact(slices.Sorted(slices.Values(rows)))) {
		t.Errorf("two of the %d rows have the same name", got)
	}
}

// A row brings the steps that it builds on, and those that clear up, not more.
func TestNeeded(t *testing.T) {
	for _, c := range []struct {
		row  string
		want []string
	}{
		{"rename", []string{"create", "rename"}},
		{"open+read 4K", []string{"create", "rename", "unlink", "create+write 4K", "open+read 4K"}},
		{"read cold", []string{"write", "read cold", "mmap write"}},
		{"rm -rf", []string{"untar", "rm -rf"}},
		{"lock link", []string{"lock link"}},
	} {
		var got []string
		for _, w := range works() {
			for _, s := range w.needed(func(row string) bool { return row == c.row }) {
				got = append(got, strings.Join(s.rows, "+"))
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("steps for %s (-want +got):\n%s", c.row, diff)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, args := range [][]string{
		{"--rows", "("}, {"--profile", "huge"}, {"--image", "perhaps"}, {"--rounds", "-1"}, {"--peer", "x=y"}, {"extra"}, {"--nonsense"},
	} {
		var errs bytes.Buffer
		if code := run(t.Context(), args, io.Discard, &errs); code != 2 || errs.Len() == 0 {
			t.Errorf("bench %q = %d, %q; want 2 and a message", args, code, errs.String())
		}
	}
}
