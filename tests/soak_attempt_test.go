//go:build linux

package tests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// envBuild marks all processes that work on a build.
const envBuild = "STAGEFS_SOAK_BUILD"

// An attempt is one stager at work, killed or not.
type attempt struct {
	s       *soak
	kind    stagerKind
	id, dir string
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the leader is dead
	mark    *os.File

	killed    bool
	published bool // before it was killed
}

// run stages the build, and kills the stager after a time unless 0. It returns
// when no process of the build is left, no rival works on it, and it is free.
func (a *attempt) run(killAfter time.Duration) (finished bool) {
	s := a.s
	s.mark(a.id, a.dir)
	var err error
	a.mark, err = os.Open(s.path("live", a.id))
	mustDo(s.t, err)
	defer a.mark.Close()
	log, err := os.Create(s.path(a.id + ".log"))
	mustDo(s.t, err)
	defer func() {
		log.Close()
		for _, suffix := range []string{".log", ".list", ".list.files"} {
			os.Remove(s.path(a.id + suffix))
		}
	}()
	a.start(log)

	var kill <-chan time.Time
	if killAfter > 0 {
		kill = time.After(killAfter)
	}
	hung, stop := a.stands()
	select {
	case <-a.ended:
	case <-kill:
		a.kill()
	case <-hung:
		s.violate("%s: nothing in its build has changed for %v: %s", a.id, hungTime, a.show())
		a.killAll()
	case <-s.ctx.Done():
		a.killed, a.published = true, a.done()
		a.killAll()
	}
	stop()
	a.killAll() // what a killed leader has left running
	<-a.ended
	err = a.cmd.Wait()
	a.awaitRivals()
	finished = a.done()
	if a.killed {
		// A leader that dies alone may leave its publish.sh behind, which waits
		// for a rival: that one may do as it likes from then on.
		finished = a.published
	}
	a.awaitFree()
	switch {
	case finished:
		if err != nil && !a.killed {
			s.violate("%s: %v after it had published\n%s", a.id, err, tailOf(log.Name()))
		}
		s.keep(build{a.kind.name, a.dir})
	case !a.killed:
		s.violate("%s (%s) failed although nobody killed it: %v\n%s", a.id, a.dir, err, tailOf(log.Name()))
	}
	return finished
}

// hungTime is how long a stager may leave its build as it is. How long it takes as
// a whole is the machine's business.
const hungTime = 90 * time.Second

// stands closes hung when the stager hangs, until it is stopped.
func (a *attempt) stands() (hung <-chan struct{}, stop func()) {
	ch, ctx := make(chan struct{}), a.s.ctx
	ctx, stop = context.WithCancel(ctx)
	go func() {
		look := time.NewTicker(hungTime / 30)
		defer look.Stop()
		for seen, since := "", time.Now(); time.Since(since) < hungTime; {
			select {
			case <-ctx.Done():
				return
			case <-look.C:
			}
			if now := extent(a.s.m.Back(a.dir)); now != seen {
				seen, since = now, time.Now()
			}
		}
		close(ch)
	}()
	return ch, stop
}

// extent is how much there is in a tree that somebody works on, and when it was
// changed: a stager's last step is to set modes.
func extent(dir string) string {
	var entries, size, changed int64
	filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil {
			entries++
			if info, err := d.Info(); err == nil {
				size += info.Size()
				changed = max(changed, info.Sys().(*syscall.Stat_t).Ctim.Nano())
			}
		}
		return nil
	})
	return fmt.Sprint(entries, size, changed)
}

// name is the attempt's among all soaks of the machine.
func (a *attempt) name() string { return a.s.path(a.id) }

// done tells whether the stager has published the build.
func (a *attempt) done() bool {
	_, err := os.Stat(a.s.path("done", a.id))
	return err == nil
}

func (a *attempt) start(log *os.File) {
	s := a.s
	argv := a.kind.argv
	a.cmd = exec.Command(argv[0], append(slices.Clone(argv[1:len(argv)-1]), strings.ReplaceAll(argv[len(argv)-1], "@", s.dir))...)
	a.cmd.Dir = "/"
	a.cmd.Env = append(os.Environ(), envBuild+"="+a.name(), "LC_ALL=C", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"SRC="+s.src.dir, "D="+s.m.At(a.dir), "ZIP="+s.path("src.zip"), "REPO="+s.path("repo"), "LIST="+s.path(a.id+".list"),
		"PUBLISH="+s.path("publish.sh"), "MARK="+s.path("live", a.id), "DONE="+s.path("done", a.id))
	a.cmd.Stdout, a.cmd.Stderr = log, log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	mustDo(s.t, a.cmd.Start())
	a.ended = make(chan struct{})
	go func() {
		defer close(a.ended)
		// Not reaped yet, the leader keeps its group's number from reuse.
		for unix.Waitid(unix.P_PID, a.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		}
	}()
}

// kill ends the whole group, or the leader alone, and measures how long its
// locks outlive it (R4).
func (a *attempt) kill() {
	a.killed = true
	pid := a.cmd.Process.Pid
	alone := rand.IntN(2) == 0
	var doomed []uint64
	for _, row := range a.s.m.Listing().Locks {
		if within(row.Dir, a.dir) && (!alone || row.Pid == pid) {
			doomed = append(doomed, row.Token)
		}
	}
	a.published = a.done()
	at := time.Now()
	if alone {
		a.s.leaderKills.Add(1)
		syscall.Kill(pid, syscall.SIGKILL)
	} else {
		a.s.kills.Add(1)
		syscall.Kill(-pid, syscall.SIGKILL)
	}
	<-a.ended
	if len(doomed) > 0 {
		a.awaitEnd(at, doomed)
	}
	if alone {
		// Its orphans go on for a while, as a free path allows.
		time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
	}
}

func (a *attempt) awaitEnd(killed time.Time, doomed []uint64) {
	var left []uint64
	for time.Since(killed) < patience {
		left = left[:0]
		for _, token := range a.s.tokens(a.dir, true) {
			if slices.Contains(doomed, token) {
				left = append(left, token)
			}
		}
		if len(left) == 0 {
			a.s.mu.Lock()
			defer a.s.mu.Unlock()
			a.s.freed = append(a.s.freed, time.Since(killed))
			return
		}
		time.Sleep(time.Millisecond)
	}
	a.s.violate("%s: locks %v on %s %v after kill -9 of their owner: %s", a.id, left, a.dir, patience, a.show())
}

// killAll ends every process of the build.
func (a *attempt) killAll() {
	syscall.Kill(-a.cmd.Process.Pid, syscall.SIGKILL)
	<-a.ended
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		left := pidsWithEnv(envBuild + "=" + a.name())
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			a.s.violate("%s: processes %v cannot be killed: %s", a.id, left, a.show())
			return
		}
		for _, pid := range left {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// awaitRivals keeps rivals off the build and waits for those at work on it.
func (a *attempt) awaitRivals() {
	os.Remove(a.mark.Name())
	for unix.Flock(int(a.mark.Fd()), unix.LOCK_EX) == unix.EINTR {
	}
}

// awaitFree finds no lock and no lock file in the build: its processes are
// dead, however they died (R4).
func (a *attempt) awaitFree() {
	end := time.Now().Add(patience)
	for len(a.s.tokens(a.dir, true)) > 0 {
		if time.Now().After(end) {
			a.s.violate("%s: stale lock: %s", a.id, a.show())
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	for _, path := range litterIn(a.s.m.Back(a.dir)) {
		a.s.violate("%s: left behind (killed: %v): %s", a.id, a.killed, path)
	}
}

// show tells what stands on the build, for failures.
func (a *attempt) show() string {
	var rows []string
	for _, row := range a.s.m.Listing().Locks {
		if within(row.Dir, a.dir) {
			rows = append(rows, fmt.Sprintf("%+v", row))
		}
	}
	return fmt.Sprintf("leader %d, locks %v", a.cmd.Process.Pid, rows)
}

func within(dir, top string) bool { return dir == top || strings.HasPrefix(dir, top+"/") }

// remove clears a build away through the mount, as anybody may: it is free.
func (a *attempt) remove(dir string) {
	if _, err := os.Lstat(a.s.m.Back(dir)); errors.Is(err, fs.ErrNotExist) || a.s.ctx.Err() != nil {
		return
	}
	if out, err := a.s.command(10*patience, "rm", "-rf", a.s.m.At(dir)); err != nil && a.s.ctx.Err() == nil {
		a.s.violate("%s: a free build can't be removed: %v\n%s", a.id, err, out)
	}
	if _, err := os.Lstat(a.s.m.Back(dir)); err == nil {
		a.s.violate("%s: %s is still there after rm -rf", a.id, filepath.Base(dir))
	}
}

func tailOf(path string) string {
	b, _ := os.ReadFile(path)
	return string(b[max(0, len(b)-2000):])
}
