//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// looks are commands that read the tree src in the working directory. The
// words that grep looks for are in some thousand lines.
func looks() map[string][]string {
	return map[string][]string{
		"find":      {"find", "src", "-type", "f"},
		"find+stat": {"find", "src", "-ls"},
		"ls -lR":    {"ls", "-lR", "src"},
		"grep -r":   {"grep", "-rF", "func Benchmark", "src"},
		"tar c":     {"sh", "-c", "tar cf - src | wc -c"},
	}
}

// treeSteps are what one does with a tree of sources.
func treeSteps() []step {
	look := func(what, cache string, states bool) step {
		before := func(context.Context, *bout) error { return dropCaches() }
		if cache == "warm" {
			before = func(ctx context.Context, b *bout) error { _, err := b.look(ctx, what); return err }
		}
		return step{rows: []string{what + " " + cache}, states: states, before: before, run: func(ctx context.Context, b *bout) ([]timing, error) {
			return one(b.look(ctx, what))
		}}
	}
	return []step{
		{rows: []string{"untar"}, states: true, prepares: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
			t, err := one(b.tool(ctx, "tree", "tar", "xf", b.kit.tarball))
			return t, errorOr(err, b.wantTree("src"))
		}},
		look("find", "cold", false),
		look("find+stat", "cold", false),
		look("find+stat", "warm", true),
		look("ls -lR", "warm", true),
		look("grep -r", "warm", true),
		look("tar c", "warm", true),
		{rows: []string{"cp -a"}, long: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
			t, err := one(b.tool(ctx, "tree", "cp", "-a", "src", "copy"))
			return t, errorOr(err, b.wantTree("copy"))
		}},
		{rows: []string{"rm -rf"}, states: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
			t, err := one(b.tool(ctx, "tree", "rm", "-rf", "src"))
			if _, there := os.Lstat(filepath.Join(b.under(b.state, "tree"), "src")); err == nil && there == nil {
				err = fmt.Errorf("rm left the tree")
			}
			return t, err
		}},
	}
}

func errorOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// tool runs a tool in a place of the bout's state.
func (b *bout) tool(ctx context.Context, place string, argv ...string) (time.Duration, error) {
	return runTool(ctx, b.kit.root, job{Argv: argv, Dir: b.path(b.state, place), Out: b.kit.out(), Hold: b.hold()}, b.kit.env...)
}

// look runs a tool that reads the tree, and compares how much it said with
// what it said about the tree that was unpacked first.
func (b *bout) look(ctx context.Context, what string) (time.Duration, error) {
	argv := looks()[what]
	took, err := b.tool(ctx, "tree", argv...)
	if err != nil {
		return 0, err
	}
	got, err := saidBy(b.kit.out())
	if want := b.kit.said[what]; err == nil && got != want {
		err = fmt.Errorf("%q said %d, not %d", argv, got, want)
	}
	return took, err
}

// saidBy is the number that an output consists of, or else of its lines.
func saidBy(path string) (int, error) {
	out, err := os.ReadFile(path)
	if n, notNumber := strconv.Atoi(strings.TrimSpace(string(out))); notNumber == nil {
		return n, err
	}
	return bytes.Count(out, []byte("\n")), err
}

// wantTree counts what is below the subject.
func (b *bout) wantTree(name string) error {
	got, err := countTree(filepath.Join(b.under(b.state, "tree"), name))
	if err == nil && got != b.kit.tree {
		err = fmt.Errorf("%s has %+v, not %+v", name, got, b.kit.tree)
	}
	return err
}

// A count says how large a tree is.
type count struct {
	Entries int
	Bytes   int64
}

func countTree(dir string) (count, error) {
	var c count
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		c.Entries++
		if e.Type().IsRegular() {
			info, err := e.Info()
			if err != nil {
				return err
			}
			c.Bytes += info.Size()
		}
		return nil
	})
	return c, err
}
