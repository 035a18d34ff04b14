package lockstate_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// closed is the cancel channel of an acquisition that must not wait.
var closed = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// newProc returns a process whose start time makes it a process of its own
// even if the pid was used before (H1).
func newProc(pid int, start uint64, parent *procid.Process) *procid.Process {
	return procid.Fake(procid.ID{Pid: pid, Start: start}, parent)
}

// family is what most tests need: init, a stager with a child and a
// grandchild, and a stranger.
type family struct {
	init, parent, child, grandchild, stranger *procid.Process
}

func newFamily() family {
	f := family{init: procid.FakeReaper(procid.ID{Pid: 1, Start: 1}, nil)}
	f.parent = newProc(100, 10, f.init)
	f.child = newProc(101, 11, f.parent)
	f.grandchild = newProc(102, 12, f.child)
	f.stranger = newProc(200, 20, f.init)
	return f
}

// fixture is a table with the shorthands that the tests are written in. Paths
// are relative to the root.
type fixture struct {
	*testing.T
	family
	*lockstate.Table
}

func newFixture(t *testing.T, o lockstate.Options) *fixture {
	f := &fixture{T: t, family: newFamily(), Table: lockstate.New(o)}
	t.Cleanup(func() {
		if err := f.Check(); err != nil {
			t.Errorf("Check() = %v, want nil", err)
		}
	})
	return f
}

// dir returns the directory at path and keeps the reference for ever.
func (f *fixture) dir(path string) *lockstate.Dir { return dirAt(f.Table, path) }

func dirAt(t *lockstate.Table, path string) *lockstate.Dir {
	d := t.Root()
	if path == "." {
		return d
	}
	for name := range strings.SplitSeq(path, "/") {
		d = t.Dir(d, name)
	}
	return d
}

// request asks for path, with the lock file "devserver" if that is explicit.
func (f *fixture) request(p *procid.Process, path string, k lockstate.Kind) lockstate.Request {
	q := lockstate.Request{Process: p, Dir: f.dir(path), Kind: k, Protocol: "mkdir"}
	if k == lockstate.Explicit {
		q.Protocol, q.File = "create", "devserver"
	}
	return q
}

// try acquires path and commits.
func (f *fixture) try(p *procid.Process, path string, k lockstate.Kind) (lockstate.Lock, error) {
	g, err := f.Acquire(closed, f.request(p, path, k))
	if err != nil {
		return lockstate.Lock{}, err
	}
	l, ok := g.Commit()
	if !ok {
		f.Helper()
		f.Fatalf("Commit() on %s = false, want true", path)
	}
	return l, nil
}

// take is try that must succeed.
func (f *fixture) take(p *procid.Process, path string, k lockstate.Kind) lockstate.Lock {
	f.Helper()
	l, err := f.try(p, path, k)
	if err != nil {
		f.Fatalf("Acquire(%v, %s, %v) = %v, want a grant", p.ID(), path, k, err)
	}
	return l
}

// refused wants an acquisition to fail with sentinel, because of the lock
// with that token.
func (f *fixture) refused(p *procid.Process, path string, k lockstate.Kind, sentinel error, token uint64) {
	f.Helper()
	_, err := f.try(p, path, k)
	f.wantError("Acquire", path, err, sentinel, token)
}

func (f *fixture) wantError(call, path string, err, sentinel error, token uint64) {
	f.Helper()
	if !errors.Is(err, sentinel) {
		f.Errorf("%s(%s) = %v, want %v", call, path, err, sentinel)
		return
	}
	var held *lockstate.HeldError
	if errors.As(err, &held) && held.Lock.Token != token {
		f.Errorf("%s(%s) was refused because of token %d, want %d", call, path, held.Lock.Token, token)
	}
}

// change carries out a change in path.
func (f *fixture) change(p *procid.Process, path string) error {
	op, err := f.Begin(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{f.dir(path)}})
	op.End()
	return err
}

func (f *fixture) mayChange(p *procid.Process, path string) {
	f.Helper()
	if err := f.change(p, path); err != nil {
		f.Errorf("Begin(%v, %s) = %v, want nil", p.ID(), path, err)
	}
}

func (f *fixture) mayNotChange(p *procid.Process, path string, token uint64) {
	f.Helper()
	f.wantError("Begin", path, f.change(p, path), lockstate.ErrHeld, token)
}

// open opens the file f in path for writing.
func (f *fixture) open(p *procid.Process, path string) *lockstate.Handle {
	f.Helper()
	h, err := f.OpenHandle(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{f.dir(path)}}, "f")
	if err != nil {
		f.Fatalf("OpenHandle(%v, %s) = %v, want nil", p.ID(), path, err)
	}
	return h
}

// governs wants the lock with that token to govern path; 0: path is free.
func (f *fixture) governs(path string, token uint64) {
	f.Helper()
	if l, _ := f.Governing(f.dir(path)); l.Token != token {
		f.Errorf("Governing(%s) = token %d, want %d", path, l.Token, token)
	}
}

// owner returns who owns the lock with that token.
func (f *fixture) owner(token uint64) procid.ID {
	l, _ := f.Table.Lock(token)
	return l.Owner
}

func (f *fixture) end(token uint64) {
	f.Helper()
	if err := f.Table.End(token, lockstate.Given); err != nil {
		f.Fatalf("End(%d) = %v, want nil", token, err)
	}
}

// succeeded is the exit of a process that did what it was asked for.
var succeeded = procid.Exit{Known: true}

// alive resolves ids to the given processes.
func alive(ps ...*procid.Process) func(procid.ID) *procid.Process {
	return func(id procid.ID) *procid.Process {
		for _, p := range ps {
			if p.ID() == id {
				return p
			}
		}
		return nil
	}
}
