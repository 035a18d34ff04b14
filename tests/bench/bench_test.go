//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// envMain makes the test binary the benchmark itself.
const envMain = "STAGEFS_BENCH_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(envJob)+os.Getenv(envJanitor)+os.Getenv(envMain) != "" {
		os.Unsetenv(envMain)
		main()
	}
	os.Exit(m.Run())
}

// tiny is a command line for a short run on a real mount: all but go build.
func tiny(t *testing.T, more ...string) (args []string, dir string) {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Getuid() != 0 {
		if os.Getenv("STAGEFS_REQUIRE") == "1" {
			t.Fatal("needs root and /dev/fuse")
		}
		t.Skip("needs root and /dev/fuse")
	}
	dir = t.TempDir()
	bin := os.Getenv("STAGEFS_BIN")
	if bin == "" {
		bin = filepath.Join(dir, "stagefs")
		if out, err := exec.Command("go", "build", "-o", bin, "../../cmd/stagefs").CombinedOutput(); err != nil {
			t.Fatalf("building cmd/stagefs: %v\n%s", err, out)
		}
	}
	if dir, err := filepath.EvalSymlinks(dir); err == nil {
		return append([]string{"--stagefs", bin, "--dir", dir, "--profile", "tiny", "--rounds", "1", "--subjects", "^stagefs$"}, more...), dir
	}
	return nil, dir
}

// benchmark runs one that has nothing to complain of. Samples and plot are in dir then.
func benchmark(t *testing.T, args []string, dir string) (res Results, report string) {
	t.Helper()
	file := filepath.Join(dir, "json")
	var out, errs bytes.Buffer
	if code := run(t.Context(), append(args, "--json", file, "--svg", filepath.Join(dir, "svg")), &out, &errs); code != 0 {
		t.Fatalf("bench = %d\n%s%s", code, errs.String(), out.String())
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &res); err != nil {
		t.Fatal(err)
	}
	if len(res.Notes) > 0 {
		t.Errorf("notes: %q", res.Notes)
	}
	return res, out.String()
}

// Every row but go build is measured on a real mount, in each state, and
// nothing is left behind.
func TestBench(t *testing.T) {
	args, dir := tiny(t, "--memory", "--rows", "^[^g]|^gr|^git")
	res, out := benchmark(t, args, dir)
	for _, w := range works() {
		for _, s := range w.steps {
			for _, row := range s.rows {
				if row == "go build" {
					continue
				}
				states := []string{stateFree}
				if s.states {
					states = append(states, stateHeld, stateParent, stateCrowd)
				}
				for _, state := range states {
					if x, ok := res.ratio(row, oursName, state); !ok || x.Spread.Median <= 0 {
						t.Errorf("%s, %s: no ratio", row, state)
					}
				}
			}
		}
	}
	for _, want := range []struct {
		row, kind string
	}{{"chmod", "setattr"}, {"create", "create"}, {"open+close", "open"}, {"rename", "rename"}} {
		per := requestsOf(res.Samples, want.row, side{oursName, stateFree})[want.kind]
		if per < 1 || per >= 2 { // some loops begin with a pass over all names
			t.Errorf("%s: %.2f requests %s for each, want 1", want.row, per, want.kind)
		}
	}
	if len(res.Memory) != 1 || res.Memory[0].Walked.RSS == 0 || res.Memory[0].Forgot.Descriptors == 0 {
		t.Errorf("memory: %+v", res.Memory)
	}
	drawn, err := os.ReadFile(filepath.Join(dir, "svg"))
	if err != nil {
		t.Fatal(err)
	}
	wellFormed(t, drawn)
	wantNothingLeft(t, dir)

	// The same report again, from the file.
	var again, errs bytes.Buffer
	if code := run(t.Context(), []string{"--from", filepath.Join(dir, "json")}, &again, &errs); code != 0 || again.String() != out {
		t.Errorf("bench --from = %d\n%s%s\nwant\n%s", code, errs.String(), again.String(), out)
	}
}

// TestFloor: what is compared to tell stagefs's own part does each single call, too.
func TestFloor(t *testing.T) {
	rows := map[bool][]string{}
	for _, w := range works() {
		for _, s := range w.steps {
			if w.name == "locks" || w.calls {
				rows[w.calls] = append(rows[w.calls], s.rows...)
			}
		}
	}
	args, dir := tiny(t, "--subjects", "^floor$", "--rows", "^("+strings.NewReplacer("+", `\+`).Replace(strings.Join(append(rows[true], rows[false]...), "|"))+")$")
	res, _ := benchmark(t, args, dir)
	for _, row := range rows[true] {
		if x, ok := res.ratio(row, "floor", stateFree); !ok || x.Spread.Median <= 0 {
			t.Errorf("%s: no ratio", row)
		}
	}
	for _, row := range rows[false] {
		if _, ok := res.ratio(row, "floor", stateFree); ok {
			t.Errorf("%s: a ratio, of what locks nothing", row)
		}
	}
}

// TestTotal: the same figures have one sum, and so one report.
func TestTotal(t *testing.T) {
	kinds := map[string]float64{"a": 1e16, "b": 1, "c": -1e16, "d": 1, "e": 0.1}
	want := total(kinds)
	for range 100 {
		if got := total(kinds); got != want {
			t.Fatalf("total = %v, then %v", want, got)
		}
	}
}

// left is what belongs to runs below a directory.
func left(dir string) []string {
	found, _ := filepath.Glob(filepath.Join(dir, "stagefs-bench-*"))
	return append(found, mountsBelow(dir)...)
}

func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	if l := left(dir); len(l) > 0 {
		t.Errorf("left over: %q", l)
	}
}

// Ended by a signal in the middle, it clears up, its image too; by kill -9, the janitor
// does.
func TestBenchInterrupted(t *testing.T) {
	for _, sig := range []os.Signal{os.Interrupt, os.Kill} {
		args, dir := tiny(t, "--rounds", "1000", "--rows", "create", "--image", imageAlways)
		cmd := exec.Command("/proc/self/exe", args...)
		cmd.Env = append(os.Environ(), envMain+"=1")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		awaits(ctx, t, "a mount", func() bool { return len(mountsBelow(dir)) > 1 })
		runs := left(dir)
		if run := runs[0]; !slices.Contains(runs[1:], run) || lacksJournal(run) {
			t.Errorf("%q: no image with a journal is mounted there", run)
		}
		cmd.Process.Signal(sig)
		<-ended
		if code := cmd.ProcessState.ExitCode(); sig == os.Interrupt && code != 130 {
			t.Errorf("exit status %d after ^C, want 130\n%s", code, out.String())
		}
		awaits(ctx, t, "the end of all that belonged to "+strings.Join(runs, " "), func() bool {
			return len(left(dir)) == 0 && !slices.ContainsFunc(runs, func(root string) bool { return len(markedPids(root)) > 0 })
		})
	}
}

func awaits(ctx context.Context, t *testing.T, what string, ok func() bool) {
	t.Helper()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain for %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
