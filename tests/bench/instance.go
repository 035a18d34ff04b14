//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The states of the directory that is worked in.
const (
	stateFree   = "free"   // nobody has it
	stateHeld   = "held"   // the client has it
	stateParent = "parent" // the client's parent has it
	stateCrowd  = "crowd"  // nobody has it, but others have very many
)

// workers is how many processes do a row's work that says x4.
const (
	workers = 4
	atOnce  = " x4"
)

// An instance is a subject at work in one round.
type instance struct {
	subject
	dir  string // all that belongs to it
	back string // what it serves
	mnt  string // where; the same as back for the bare directory
	cmd  *exec.Cmd
	gone chan struct{}

	crowd *client // who has the other locks, in state crowd
}

// places are the directories of a state, one for each work and worker.
func places() []string {
	all := []string{"tree", "data", "git", "build", "locks", "many"}
	return slices.Concat(all, procPlaces(1), procPlaces(workers))
}

// serve makes fresh directories, and mounts. The directories are there before
// the mount is, so that nobody has a lock on them for having made them.
func (s subject) serve(ctx context.Context, root, dir string) (*instance, error) {
	in := &instance{subject: s, dir: dir, back: filepath.Join(dir, "back")}
	in.mnt = in.back
	if err := spread(dir); err != nil {
		return nil, err
	}
	for _, state := range []string{stateFree, stateHeld, stateParent, stateCrowd} {
		for _, p := range places() {
			if err := os.MkdirAll(filepath.Join(in.back, state, p), 0o755); err != nil {
				return nil, err
			}
		}
	}
	return in, in.mount(ctx, root)
}

func (in *instance) mount(ctx context.Context, root string) error {
	if in.Command == nil {
		return nil
	}
	in.mnt = filepath.Join(in.dir, "mnt")
	if err := os.MkdirAll(in.mnt, 0o755); err != nil {
		return err
	}
	fill := strings.NewReplacer("{src}", in.back, "{mnt}", in.mnt, "{state}", filepath.Join(in.dir, "state"))
	var argv []string
	for _, a := range in.Command {
		argv = append(argv, fill.Replace(a))
	}
	log, err := os.Create(filepath.Join(in.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	in.cmd = exec.Command(argv[0], argv[1:]...)
	in.cmd.Dir, in.cmd.Stdout, in.cmd.Stderr = "/", log, log
	in.cmd.Env = environ(root)
	// ^C at the benchmark is not the daemon's.
	in.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := in.cmd.Start(); err != nil {
		return err
	}
	in.gone = make(chan struct{})
	go func() { in.cmd.Wait(); close(in.gone) }()
	if err := in.await(ctx, time.Minute, in.mounted); err != nil {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%q does not mount: %w: %s", argv, err, strings.TrimSpace(string(said)))
	}
	return nil
}

// mounted tells whether the mount point leads to another device by now. A dead
// mount's can't be asked.
func (in *instance) mounted() bool {
	var mnt, dir unix.Stat_t
	return unix.Stat(in.mnt, &mnt) == nil && unix.Stat(in.dir, &dir) == nil && mnt.Dev != dir.Dev
}

var errEnded = errors.New("the daemon ended")

// await waits for a condition while the daemon lives.
func (in *instance) await(ctx context.Context, long time.Duration, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-in.gone:
			return errEnded
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// transport is what a stagefs says of itself.
func (in *instance) transport() string {
	text, _ := os.ReadFile(filepath.Join(in.mnt, ".stagefs", "version"))
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "transport "); ok {
			return strings.TrimSpace(name)
		}
	}
	return ""
}

// pull makes the crowd: other locks in the table, of one process.
func (in *instance) pull(root string, locks int) error {
	c, err := start(root, job{Kind: "crowd", Dir: in.path(stateCrowd, "many"), N: locks})
	if err != nil {
		return err
	}
	in.crowd = c
	return in.crowded(locks)
}

// crowded looks whether the crowd has its locks.
func (in *instance) crowded(locks int) error {
	list, err := os.ReadFile(filepath.Join(in.mnt, ".stagefs", "locks"))
	if err != nil {
		return err
	}
	if got := strings.Count(string(list), stateCrowd+"/many/"); got != locks {
		return fmt.Errorf("%d locks of %d are in the table", got, locks)
	}
	return nil
}

// path is a place of a state, through the subject.
func (in *instance) path(state, place string) string { return filepath.Join(in.mnt, state, place) }

// under is the same below the subject, where looking changes nothing for it.
func (in *instance) under(state, place string) string { return filepath.Join(in.back, state, place) }

// stop unmounts, and removes the directories.
func (in *instance) stop() error {
	err := in.unmount()
	if in.crowd != nil {
		in.crowd.end()
	}
	return errors.Join(err, os.RemoveAll(in.dir))
}

func (in *instance) ended() bool {
	select {
	case <-in.gone:
		return true
	default:
		return false
	}
}

// unmount also waits for the daemon.
func (in *instance) unmount() error {
	if in.gone == nil {
		return nil
	}
	var err error
	for range 1000 {
		gone := in.ended()
		if err = unix.Unmount(in.mnt, 0); err != unix.EBUSY && (err != unix.EINVAL || gone) { // EINVAL: not mounted, yet
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		unix.Unmount(in.mnt, unix.MNT_DETACH)
		err = fmt.Errorf("unmounting %s: %w", in.Name, err)
	}
	select {
	case <-in.gone:
	case <-time.After(time.Minute):
		in.cmd.Process.Kill()
		<-in.gone
		err = errors.Join(err, fmt.Errorf("%s did not end after it was unmounted", in.Name))
	}
	return err
}
