//go:build linux

package tests

import (
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A startRound is what there is while a daemon starts, ends or is replaced.
type startRound struct {
	*killRound
	lives, client, dies *Agent
	token, lease        uint64
}

// set has one process hold directories that it has locked and renamed, another one a
// lease, and a third what is to be cleared away when it is dead.
func (k *startRound) set() {
	k.lives, k.client, k.dies = agent(k.t), agent(k.t), agent(k.t)
	k.lives.must("mkdir", k.at("D"))
	k.lives.must("put", k.at("D")+"/artifact", "A", "creat")
	k.lives.must("creat", k.at("D")+"/devserver", "creat,excl")
	k.lives.must("put", k.at("D")+"/"+candidateName(k.t, k.lives), "pid", "creat,excl")
	k.lives.must("mkdir", k.at("E"))
	k.lives.must("rename", k.at("E"), k.at("F"))
	k.token = k.row("D").Token
	k.client.must("mkdir", k.at("L"))
	k.client.mustCommand(k.m, "release %s", k.path("L"))
	k.lease = k.client.mustCommand(k.m, "acquire %s client=x ttl=1h", k.path("L")).Token
	k.dies.must("mkdir", k.at("G"))
	k.dies.must("put", k.at("G")+"/artifact", "A", "creat")
	k.dies.must("creat", k.at("G")+"/devserver", "creat,excl")
	k.dies.must("put", k.at("G")+"/"+candidateName(k.t, k.dies), "pid", "creat,excl")
}

// check looks at all of it, and ends it.
func (k *startRound) check() {
	k.t.Helper()
	k.wantHeld("D", k.lives, k.token)
	if row := k.row("F"); row.Pid != k.lives.Pid {
		k.errorf("F: %+v, want a lock of pid %d", row, k.lives.Pid)
	}
	if row := k.row("L"); row.Token != k.lease {
		k.errorf("L: %+v, want token %d", row, k.lease)
	}
	if s := k.stranger().Try("put", k.at("L")+"/x", "x", "creat"); s != "EBUSY" {
		k.errorf("a stranger in L: %s", s)
	}
	k.client.mustCommand(k.m, "renew %s client=x", k.path("L"))
	k.client.must("put", k.at("L")+"/more", "more", "creat")
	k.client.mustCommand(k.m, "release %s client=x", k.path("L"))
	if !running(k.dies.Pid) {
		k.m.awaitFree(k.path("G"))
		eventually(k.t, "nothing is left of the dead owner but its artifact", func() bool {
			return slices.Equal(tree(k.t, k.at("G")), []string{"artifact=A"})
		})
	} else {
		k.wantHeld("G", k.dies, 0)
		k.dies.Kill()
	}
	k.lives.Kill()
	k.client.Kill()
	eventually(k.t, "all locks end", func() bool { return len(k.m.Listing().Locks) == 0 })
	if token := k.next().mustCommand(k.m, "acquire %s", k.path("D")).Token; token <= k.token {
		k.errorf("token %d after %d", token, k.token)
	}
	wantContent(k.t, k.at("D")+"/artifact", "A")
	k.next().mustCommand(k.m, "release %s", k.path("D"))
	k.m.awaitFree(k.path("D"))
}

// start starts a daemon, which is killed before its nth step, and another one then.
func (k *startRound) start() {
	k.t.Helper()
	stopped := k.steps.arm(k.nth)
	k.m.start(k.opts)
	var over atomic.Bool
	serves := inBackground(func() string { // which may have to wait for a daemon that is stopped
		for !over.Load() && k.m.daemon() == 0 {
			time.Sleep(time.Millisecond)
		}
		return "ok"
	})
	select {
	case <-stopped:
		k.dead = true
	case <-serves:
		select { // what it does when it serves
		case <-stopped:
			k.dead = true
		case <-time.After(50 * time.Millisecond):
		}
	}
	k.steps.disarm()
	if k.dead {
		k.m.kill()
		over.Store(true)
		<-serves
		k.m.start(k.opts)
		k.m.awaitReady()
	}
}

// writtenDuring has this process, which holds nothing, try to write through the path all the
// time meanwhile, and returns how often it could. Each try finds what is there then.
func (m *Mount) writtenDuring(what func()) (wrote int) {
	var over atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !over.Load() {
			if fd, err := unix.Open(m.At("naked"), unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o666); err == nil {
				unix.Close(fd)
				wrote++
			}
		}
	}()
	defer over.Store(true) // where it ends the test, too
	what()
	over.Store(true)
	<-ended
	return wrote
}

// TestFaultKilledStart: a daemon that is killed before any of the steps by which it starts,
// ends or becomes another program leaves all to the next one, and the directory covered
// until it is unmounted.
func TestFaultKilledStart(t *testing.T) {
	needInject(t)
	for _, c := range []struct {
		name  string
		goes  func(k *startRound)
		ended bool // there is a time without a mount
	}{
		{name: "starts", goes: func(k *startRound) {
			k.m.kill()
			k.dies.Kill()
			k.start()
		}},
		{name: "ends", ended: true, goes: func(k *startRound) {
			stopped := k.steps.arm(k.nth)
			mustDo(k.t, k.m.cmd.Process.Signal(syscall.SIGTERM))
			select {
			case <-stopped:
				k.dead = true
				k.m.kill()
			case <-k.m.gone:
			}
			k.steps.disarm()
			k.m.start(k.opts)
			k.m.awaitReady()
		}},
		{name: "is replaced", goes: func(k *startRound) {
			k.during(func() string {
				if r := run(k.t, stagefsBin(), "mount", "--replace", k.m.Path); r.Status != 0 {
					return "ENOTCONN"
				}
				return "ok"
			})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			steps := m.stepper()
			opts := []string{"--unlocked", "deny"}
			m.serve(opts...)
			steps.each(t, func(nth int) *killRound {
				k := &startRound{killRound: &killRound{t: t, m: m, steps: steps, opts: opts, nth: nth}}
				k.set()
				if c.ended {
					c.goes(k)
				} else if wrote := m.writtenDuring(func() { c.goes(k) }); wrote > 0 {
					k.errorf("the stranger wrote %d times", wrote)
				}
				k.check()
				return k.killRound
			})
		})
	}

	t.Run("starts for the first time", func(t *testing.T) {
		dir := staticDir(t)
		m := newMount(t, dir, dir)
		steps := m.stepper()
		t.Cleanup(m.stop)
		steps.each(t, func(nth int) *killRound {
			k := &startRound{killRound: &killRound{t: t, m: m, steps: steps, nth: nth}}
			m.State = tempDir(t) + "/state"
			k.start()
			a, token := k.made("D")
			m.restart(nil)
			k.wantHeld("D", a, token)
			k.ends(a, "A", "D")
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Fatal(r)
			}
			<-m.gone
			return k.killRound
		})
		m.start(nil)
		m.awaitReady()
	})
}
