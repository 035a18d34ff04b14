//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// A size says how much work a profile is.
type size struct {
	Rounds int
	turns  int           // of single calls, in each of them
	long   int           // in how many of them the steps are done that take long
	data   int64         // bytes of the large file
	image  int64         // bytes that an image has room for, at the most
	random int           // pages read or written at random
	calls  int           // of each kind of single call
	cycles int           // of each lock protocol
	crowd  int           // other locks
	files  int           // of the memory rows
	quiet  time.Duration // how long memory must not have become less to be what is kept
	tree   []string      // parts of Go's sources that are unpacked
	repo   []string      // parts that are cloned
}

func profiles() map[string]size {
	return map[string]size{
		"full": {
			Rounds: 5, turns: 3, long: 3, data: 1 << 30, image: 64 << 30, random: 32768, calls: 3000, cycles: 600, crowd: 100_000, files: 1_000_000, quiet: 20 * time.Second,
			tree: []string{"src"}, repo: []string{"src/net", "src/crypto", "src/encoding", "src/go", "src/runtime"},
		},
		"quick": {
			Rounds: 3, turns: 1, long: 1, data: 256 << 20, image: 16 << 30, random: 8192, calls: 1000, cycles: 200, crowd: 20_000, files: 100_000, quiet: 5 * time.Second,
			tree: []string{"src/net", "src/crypto", "src/encoding"}, repo: []string{"src/net"},
		},
		"tiny": {
			Rounds: 2, turns: 2, long: 2, data: 2 << 20, image: 2 << 30, random: 64, calls: 40, cycles: 5, crowd: 100, files: 300, quiet: 500 * time.Millisecond,
			tree: []string{"src/sort", "src/bufio"}, repo: []string{"src/sort"},
		},
	}
}

// A kit is what all steps work with, on the same filesystem but outside of what
// is measured.
type kit struct {
	root     string
	size     size
	env      []string // of tools: where they keep what is not in the mount
	tarball  string
	tree     count          // what is in it
	said     map[string]int // how much the looks say about it
	repo     string
	repoTree count
}

// out is where the tools' output goes.
func (k *kit) out() string { return filepath.Join(k.root, "out") }

// prepare makes the tar file and the repository of Go's sources.
func prepare(ctx context.Context, root string, size size) (*kit, error) {
	k := &kit{root: root, size: size, tarball: filepath.Join(root, "src.tar"), repo: filepath.Join(root, "repo.git"), said: map[string]int{}}
	tmp := filepath.Join(root, "tmp")
	for _, d := range []string{tmp, filepath.Join(root, "first"), filepath.Join(root, "cloned")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, err
		}
	}
	k.env = []string{"TMPDIR=" + tmp, "GOTMPDIR=" + tmp, "GOMODCACHE=" + tmp, "GOENV=off", "GOPROXY=off", "GOTELEMETRY=off"}
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	from, err := filepath.EvalSymlinks(filepath.Join(strings.TrimSpace(string(goroot)), "src"))
	if err != nil {
		return nil, err
	}
	script := `set -e
		tar cf src.tar -C "$1" $2
		tar xf src.tar -C first
		tar cf - -C "$1" $3 | tar xf - -C cloned
		git init -q --bare repo.git
		g="git --git-dir=repo.git --work-tree=cloned -c core.bare=false -c gc.auto=0 -c user.name=bench -c user.email=bench@localhost"
		$g add -Af .
		$g commit -qm sources
		$g repack -adq`
	cmd := exec.CommandContext(ctx, "sh", "-c", script, "sh", filepath.Dir(from), strings.Join(size.tree, " "), strings.Join(size.repo, " "))
	cmd.Dir, cmd.Env = root, environ(root)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("preparing the sources: %w: %s", err, out)
	}
	if k.tree, err = countTree(filepath.Join(root, "first", "src")); err != nil {
		return nil, err
	}
	if k.repoTree, err = countTree(filepath.Join(root, "cloned", "src")); err != nil {
		return nil, err
	}
	for what, argv := range looks() {
		if _, err := runTool(ctx, root, job{Argv: argv, Dir: filepath.Join(root, "first"), Out: k.out()}); err != nil {
			return nil, err
		}
		if k.said[what], err = saidBy(k.out()); err != nil {
			return nil, err
		}
		if k.said[what] == 0 {
			return nil, fmt.Errorf("%q says nothing about the sources", argv)
		}
	}
	for _, d := range []string{"first", "cloned"} {
		if err := os.RemoveAll(filepath.Join(root, d)); err != nil {
			return nil, err
		}
	}
	return k, nil
}
