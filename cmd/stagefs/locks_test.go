//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

const twoLocks = `{"locks":[
 {"dir":"board/v1","kind":"explicit","protocol":"link","token":7,"since":"2026-01-02T03:04:05Z","pid":41,"start":1,"uid":1000,"cmd":"tar xf x","client":"","file":"devserver.lock",
  "blockers":[{"pid":50,"start":2,"cmd":"cat","path":"board/v1/log"}]},
 {"dir":"odd\ufffd","dir_bytes":"b2Rk/w==","kind":"implicit","protocol":"mkdir","token":9,"since":"2026-01-02T03:04:05Z","pid":42,"start":1,"uid":0,"cmd":"evil\u001b[2J","client":"","blockers":[]}
],"waiters":[],"orphans":[{"path":"board/v2/devserver"}],"blockers":[{"pid":60,"start":3,"cmd":"dd","path":"board/v2/x"}],"later":{"a":1}}`

func TestLocks(t *testing.T) {
	m := newFakeMount(t, map[string]string{
		"locks":      "DIR  PID\nboard/v1  41\nevil\x1b[2J  42\n",
		"locks.json": twoLocks,
	})
	m.check(t, []string{"locks"}, 0, "DIR  PID\nboard/v1  41\nevil\\x1b[2J  42\n", "")
	m.check(t, []string{"locks", filepath.Join(m.dir, "not", "there")}, 0, "board/v1", "")
	m.check(t, []string{"locks", "/"}, 69, "", "no stagefs mount")

	m.check(t, []string{"locks", "--json"}, 0, "board/v1", "")
	var got struct {
		Mountpoint string
		Locks      []struct{ Dir string }
		Later      map[string]int
	}
	if err := json.Unmarshal(m.out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Mountpoint != m.dir || len(got.Locks) != 2 || got.Later["a"] != 1 {
		t.Errorf("locks --json = %+v", got)
	}
	if strings.Count(m.out.String(), "\n") != 1 {
		t.Errorf("locks --json is not one line: %q", m.out.String())
	}

	m = newFakeMount(t, nil)
	m.check(t, []string{"locks"}, 69, "", "no control directory")
	m = newFakeMount(t, map[string]string{"locks.json": "{"})
	m.check(t, []string{"locks", "--json"}, 70, "", "locks.json")
}

// syncBuffer is a buffer that may be read while it is written.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// eventually polls until the buffer holds want.
func (b *syncBuffer) eventually(t *testing.T, want string) {
	t.Helper()
	for range 1000 {
		if strings.Contains(b.String(), want) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("output %q, want %q in it", b.String(), want)
}

func TestWatch(t *testing.T) {
	m := newFakeMount(t, map[string]string{"locks": "one\n", "locks.json": "{}"})
	// A pipe stands for the events: a read of it waits.
	pipe := filepath.Join(m.dir, fs.ControlDir, "events")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	events, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	ctx, cancel := context.WithCancel(context.Background())
	var out syncBuffer
	c := &command{
		args: []string{"locks", "--watch"}, out: &out, err: &out,
		mounts: func() ([]fs.MountEntry, error) { return []fs.MountEntry{{Path: m.dir}}, nil },
		find:   func(string) (string, string, error) { return "", "", fs.ErrNoMount },
	}
	status := make(chan int, 1)
	go func() { status <- c.run(ctx) }()
	out.eventually(t, "one\n")
	for name, text := range map[string]string{"locks": "two\n", "locks.json": "{ }"} {
		if err := os.WriteFile(filepath.Join(m.dir, fs.ControlDir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := events.WriteString(`{"event":"acquired","dir":"board/v1"}` + "\n"); err != nil {
		t.Fatal(err)
	}
	out.eventually(t, "two\n")
	cancel()
	if got := <-status; got != 0 {
		t.Errorf("locks --watch = %d after an interrupt, want 0", got)
	}
	if got := out.String(); strings.Contains(got, "\x1b") {
		t.Errorf("locks --watch clears what is no terminal: %q", got)
	}
}
