//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// gitSteps clone a repository that is outside of the mount, as from a server.
func gitSteps() []step {
	return []step{{rows: []string{"git clone"}, states: true, long: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
		t, err := one(b.tool(ctx, "git", "git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "clone", "-q", "--no-local", b.kit.repo, "clone"))
		if err != nil {
			return nil, err
		}
		got, err := countTree(filepath.Join(b.under(b.state, "git"), "clone", "src"))
		if err == nil && got != b.kit.repoTree {
			err = fmt.Errorf("the clone has %+v, not %+v", got, b.kit.repoTree)
		}
		return t, err
	}}}
}

// buildSteps compile a program and the parts of the standard library that it
// needs: source, build cache and result are in the mount.
func buildSteps() []step {
	return []step{{rows: []string{"go build"}, long: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
		dir := b.path(b.state, "build")
		for name, text := range program() {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				return nil, err
			}
		}
		took, err := runTool(ctx, b.kit.root, job{Argv: []string{"go", "build", "-o", "program", "."}, Dir: dir, Out: b.kit.out()},
			append(b.kit.env, "GOCACHE="+filepath.Join(dir, "cache"), "CGO_ENABLED=0", "GOTOOLCHAIN=local")...)
		if err != nil {
			return nil, err
		}
		info, err := os.Stat(filepath.Join(b.under(b.state, "build"), "program"))
		if err == nil && info.Size() < 1<<20 {
			err = fmt.Errorf("the program has only %d bytes", info.Size())
		}
		return one(took, err)
	}}}
}

// program sorts words; it is small, and what it imports is not.
func program() map[string]string {
	return map[string]string{
		"go.mod": "module words\n\ngo 1.22\n",
		"main.go": `package main

import (
	"bufio"
	"encoding/json"
	"os"
	"sort"
	"strings"
)

func main() {
	count := map[string]int{}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		for _, w := range strings.Fields(in.Text()) {
			count[w]++
		}
	}
	var words []string
	for w := range count {
		words = append(words, w)
	}
	sort.Strings(words)
	json.NewEncoder(os.Stdout).Encode(words)
}
`,
	}
}
