//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A Memory is what a daemon keeps of the files that were looked at.
type Memory struct {
	Subject  string `json:"subject"`
	Files    int    `json:"files"`
	Start    Usage  `json:"start"`    // after mounting
	Walked   Usage  `json:"walked"`   // after find -ls over all files
	Forgot   Usage  `json:"forgot"`   // after the kernel forgot them
	Peak     int64  `json:"peak_kib"` // VmHWM
	WalkTook string `json:"walk_took"`
}

// Usage is what a process uses.
type Usage struct {
	RSS         int64 `json:"rss_kib"`
	Descriptors int   `json:"descriptors"`
}

const filesPerDir = 1000

// memory walks very many files on each subject, one after the other.
func (r *runner) memory(ctx context.Context, subjects []subject) error {
	dir := filepath.Join(r.kit.root, "memory")
	in := &instance{subject: subjects[0], dir: dir, back: filepath.Join(dir, "back")}
	if err := makeFiles(ctx, in.back, r.kit.size.files); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, s := range subjects {
		if s.Command == nil {
			continue
		}
		in := &instance{subject: s, dir: dir, back: in.back}
		m, err := r.walk(ctx, in)
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), in.unmount())
		}
		if err = errors.Join(err, in.unmount()); err != nil {
			r.note("memory of %s: %v", s.Name, err)
			continue
		}
		fmt.Fprintf(r.talk, "memory: %s\n", s.Name)
		r.res.Memory = append(r.res.Memory, m)
	}
	return nil
}

func makeFiles(ctx context.Context, dir string, n int) error {
	for i := range n {
		sub := filepath.Join(dir, fmt.Sprintf("d%04d", i/filesPerDir))
		if i%filesPerDir == 0 {
			if err := errors.Join(ctx.Err(), os.MkdirAll(sub, 0o755)); err != nil {
				return err
			}
		}
		f, err := os.Create(filepath.Join(sub, fmt.Sprintf("f%04d", i%filesPerDir)))
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

func (r *runner) walk(ctx context.Context, in *instance) (Memory, error) {
	m := Memory{Subject: in.Name, Files: r.kit.size.files}
	if err := in.mount(ctx, r.kit.root); err != nil {
		return m, err
	}
	pid := in.cmd.Process.Pid
	var err error
	if m.Start, _, err = usage(pid); err != nil {
		return m, err
	}
	took, err := runTool(ctx, r.kit.root, job{Argv: []string{"find", ".", "-type", "f", "-size", "-1", "-printf", "x\n"}, Dir: in.mnt, Out: r.kit.out()})
	if err != nil {
		return m, err
	}
	m.WalkTook = took.Round(time.Millisecond).String()
	if got, err := saidBy(r.kit.out()); err != nil || got != m.Files {
		return m, fmt.Errorf("find saw %d files of %d, %v", got, m.Files, err)
	}
	if m.Walked, m.Peak, err = usage(pid); err != nil {
		return m, err
	}
	if err := dropCaches(); err != nil {
		return m, err
	}
	// The forgets come in the background, and a collector takes its time to
	// give memory back: until nothing has become less for a while.
	for least := time.Now(); time.Since(least) < r.kit.size.quiet && ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		u, _, err := usage(pid)
		if err != nil {
			return m, err
		}
		if m.Forgot.RSS == 0 || u.RSS < m.Forgot.RSS-512 || u.Descriptors < m.Forgot.Descriptors {
			least = time.Now()
			m.Forgot = u
		}
	}
	return m, ctx.Err()
}

// usage reads proc(5).
func usage(pid int) (u Usage, peak int64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, 0, err
	}
	kib := func(name string) int64 {
		_, rest, _ := strings.Cut(string(status), name+":")
		n, _ := strconv.ParseInt(strings.Fields(rest + " 0")[0], 10, 64)
		return n
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return Usage{kib("VmRSS"), len(fds)}, kib("VmHWM"), err
}
