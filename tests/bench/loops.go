//go:build linux

package main

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// loops are all that a client process can do but exec.
func loops() map[string]loop {
	return map[string]loop{
		"create":  overNames("f", dir.create),
		"open":    repeated(1, "f", dir.openClose),
		"stat":    statLoop,
		"missing": missingLoop,
		"statfs":  statfsLoop,
		"chmod":   chmodLoop,
		"rename":  renameLoop,
		"unlink":  overNames("g", dir.unlink),
		"mkdir":   mkdirLoop,
		"write4k": write4kLoop,
		"read4k":  read4kLoop,
		"excl":    cycle(lockExcl),
		"link":    cycle(lockLink),
		"lockdir": cycle(lockMkdir),
		"flock":   cycle(lockFlock),
		"fcntl":   cycle(lockFcntl),
		"crowd":   crowdLoop,

		"write":       writeLoop,
		"read":        readLoop,
		"mmapread":    mmapReadLoop,
		"mmapwrite":   mmapWriteLoop,
		"randomread":  randomLoop(unix.SYS_PREAD64),
		"randomwrite": randomLoop(unix.SYS_PWRITE64),
	}
}

// stretches are the parts of a loop, of which the fastest is kept.
const stretches = 20

// timed is one span over n calls of do.
func timed(n int, do func(i int) error) (result, error) {
	per := max(n/stretches, 1)
	best := math.Inf(1)
	began := now()
	for i, at := 0, began; i < n; {
		part := min(per, n-i)
		for end := i + part; i < end; i++ {
			if err := do(i); err != nil {
				return result{}, err
			}
		}
		t := now()
		best, at = min(best, float64(t-at)/float64(part)), t
	}
	return result{Spans: []span{{began, now()}}, Ops: []int64{int64(n)}, Best: []float64{best}}, nil
}

// overNames does something once to each of the job's names.
func overNames(prefix string, do func(dir, cname) error) loop {
	return func(j job) (func() (result, error), error) {
		d, err := openDir(j.Dir)
		all := names(prefix, j.N)
		return func() (result, error) {
			return timed(j.N, func(i int) error { return do(d, all[i]) })
		}, err
	}
}

// cachedFiles are the files that repeated calls go over.
const cachedFiles = 20

// repeated does something over and over to few names, so that all that can be
// remembered is; times as often as the job says.
func repeated(times int, prefix string, do func(dir, cname) error) loop {
	return func(j job) (func() (result, error), error) {
		d, err := openDir(j.Dir)
		all := names(prefix, min(cachedFiles, j.N))
		for _, n := range all {
			if err == nil {
				err = do(d, n)
			}
		}
		return func() (result, error) {
			return timed(j.N*times, func(i int) error { return do(d, all[i%len(all)]) })
		}, err
	}
}

// cachedTimes is for calls that no daemon hears of: so fast that there must be
// many of them.
const cachedTimes = 20

func statLoop(j job) (func() (result, error), error) {
	var buf unix.Statx_t
	return repeated(cachedTimes, "f", func(d dir, n cname) error { return d.stat(n, &buf) })(j)
}

func missingLoop(j job) (func() (result, error), error) {
	var buf unix.Statx_t
	return repeated(cachedTimes, "missing", func(d dir, n cname) error {
		if err := d.stat(n, &buf); !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s is there: %v", n, err)
		}
		return nil
	})(j)
}

// statfsLoop is what a request costs that has next to nothing to do.
func statfsLoop(j job) (func() (result, error), error) {
	var buf unix.Statfs_t
	d, err := openDir(j.Dir)
	return func() (result, error) {
		return timed(j.N, func(int) error { return d.statfs(&buf) })
	}, err
}

func chmodLoop(j job) (func() (result, error), error) {
	return overNames("f", func(d dir, n cname) error { return d.chmod(n, 0o600) })(j)
}

func renameLoop(j job) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	from, to := names("f", j.N), names("g", j.N)
	return func() (result, error) {
		return timed(j.N, func(i int) error { return d.rename(from[i], to[i]) })
	}, err
}

// mkdirLoop also removes the directories: on stagefs the locks on them would
// pass to the parent of a client that leaves them behind (R5).
func mkdirLoop(j job) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	all := names("d", j.N)
	return func() (result, error) {
		none := j.Meter.read()
		made, err := timed(j.N, func(i int) error { return d.mkdir(all[i]) })
		if err != nil {
			return made, err
		}
		there := j.Meter.read()
		gone, err := timed(j.N, func(i int) error { return d.rmdir(all[i]) })
		return result{
			append(made.Spans, gone.Spans...), append(made.Ops, gone.Ops...), append(made.Best, gone.Best...),
			[]Spent{there.since(none), j.Meter.read().since(there)},
		}, err
	}, err
}

func write4kLoop(j job) (func() (result, error), error) {
	buf := pattern(4096)
	return overNames("w", func(d dir, n cname) error {
		fd, err := d.open(n, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		if err := transfer(unix.SYS_PWRITE64, fd, buf, 0); err != nil {
			return err
		}
		return closeFD(n, fd)
	})(j)
}

func read4kLoop(j job) (func() (result, error), error) {
	buf, want := make([]byte, 4096), pattern(4096)
	return overNames("w", func(d dir, n cname) error {
		fd, err := d.open(n, unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		if err := transfer(unix.SYS_PREAD64, fd, buf, 0); err != nil {
			return err
		}
		if buf[4095] != want[4095] {
			return fmt.Errorf("%s has another content than was written", n)
		}
		return closeFD(n, fd)
	})(j)
}

// pattern is content in which no byte is zero, and all pages are equal.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i%page%251) + 1
	}
	return b
}

// crowdLoop makes directories, on stagefs a lock each (A1), and stays until its
// input ends: its loop is waiting.
func crowdLoop(j job) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	for _, n := range names("crowd", j.N) {
		if err == nil {
			err = d.mkdir(n)
		}
	}
	unix.Close(int(d.fd)) // it would keep the mount busy
	return func() (result, error) { return result{}, nil }, err
}
