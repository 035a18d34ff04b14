//go:build linux

package tests

import "testing"

// TestA8AttackMoved attacks A8: what somebody waits for does not end but goes
// elsewhere, with a directory that is renamed.
func TestA8AttackMoved(t *testing.T) {
	for name, c := range map[string]struct {
		open  string // by who is in the way: a file, or a lock file that is made
		with  string // what D/sub is renamed to
		flags []string
		dir   string // what is waited for
		there string // where that is afterwards
	}{
		"open file":     {"D/sub/x", "E/sub", nil, "D", "D"},
		"lock":          {"D/sub/devserver.lock", "E/sub", nil, "D", "D"},
		"out of a lock": {"D/devserver.lock", "E/sub", nil, "D/sub", "E/sub"},
		"exchanged":     {"D/sub/devserver.lock", "E/none", []string{"exchange"}, "D", "D"},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			for _, dir := range []string{"D/sub", "E/none"} {
				openDir(t, m.Back(dir))
			}
			for _, file := range []string{"D/sub/x", "D/devserver", "D/sub/devserver"} {
				openFile(t, m.Back(file), "")
			}
			mover, waiter := agent(t), agent(t)
			waiter.must("open", "h", m.At(c.dir, "devserver"), "rdwr")
			mover.must("open", "f", m.At(c.open), "rdwr,creat")
			got := waiter.Start("flockw", "h")
			m.awaitWaiters(c.dir, 1)
			mover.must(append([]string{"rename", m.At("D/sub"), m.At(c.with)}, c.flags...)...)
			m.wantWoken(got, waiter)
			m.wantOwner(c.there, waiter.Pid)
		})
	}
}

// wantWoken fails the test if somebody who waits for a directory does not get it.
func (m *Mount) wantWoken(got func() string, waiter *Agent) {
	m.t.Helper()
	eventually(m.t, "who waits is woken", func() bool {
		for _, w := range m.Listing().Waiters {
			if w.Pid == waiter.Pid {
				return false
			}
		}
		return true
	})
	if s := got(); s != "ok" {
		m.t.Errorf("who waited hears %s", s)
	}
}

// TestA8AttackRemoved attacks A8 and M2: who waits for a directory that is removed
// gets the lock on its file, as on any that has lost its name.
func TestA8AttackRemoved(t *testing.T) {
	m := mount(t)
	holder, waiter := agent(t), agent(t)
	holder.must("mkdir", m.At("D"))
	waiter.must("open", "h", m.At("D/devserver"), "rdwr,creat")
	got := waiter.Start("flockw", "h")
	m.awaitWaiters("D", 1)
	holder.must("rmdir", m.At("D"))
	m.wantWoken(got, waiter)
	waiter.must("close", "h")
	holder.must("mkdir", m.At("D"))
	m.wantOwner("D", holder.Pid)
}

// TestA8AttackRemovedTried attacks A8: who tries to lock such a file gets the lock, too.
func TestA8AttackRemovedTried(t *testing.T) {
	m := mount(t)
	holder, other := agent(t), agent(t)
	for _, try := range [][]string{{"flock", "h"}, {"setlk", "h", "wr"}, {"setlk", "h", "rd"}} {
		holder.must("mkdir", m.At("D"))
		other.must("open", "h", m.At("D/devserver"), "rdwr,creat")
		other.want("EAGAIN", try...)
		holder.must("rmdir", m.At("D"))
		other.must(try...)
		other.must("close", "h")
	}
}

// TestA8AttackHandedOver attacks A8 and R5: a lock passes to a process one of whose
// children waits for it, also behind others.
func TestA8AttackHandedOver(t *testing.T) {
	for name, ahead := range map[string]int{"first in line": 0, "behind a stranger": 1} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			script := agent(t)
			maker, waiter, stranger := script.Child(), script.Child(), agent(t)
			maker.must("mkdir", m.At("D"))
			if ahead > 0 {
				stranger.must("open", "h", m.At("D/devserver"), "rdwr,creat")
				stranger.Start("flockw", "h")
				m.awaitWaiters("D", 1)
			}
			waiter.must("open", "h", m.At("D/devserver"), "rdwr,creat")
			got := waiter.Start("flockw", "h")
			m.awaitWaiters("D", ahead+1)
			maker.Exit(0)
			m.wantWoken(got, waiter)
			stranger.Kill()
		})
	}
}

// TestA8AttackHeldAgain attacks A8: what one of a script's children had locked is the script's
// again, and so its other children's, who wait behind a stranger: he waits for the script.
func TestA8AttackHeldAgain(t *testing.T) {
	for _, at := range []string{"D", "D/sub"} {
		t.Run(at, func(t *testing.T) {
			m := mount(t)
			script, stranger := agent(t), agent(t)
			script.must("mkdir", m.At("D"))
			if at != "D" {
				script.must("mkdir", m.At(at))
			}
			stranger.must("open", "h", m.At(at)+"/devserver", "rdwr,creat")
			var children []*Agent
			var got []func() string
			for i := range 5 {
				c := script.Child()
				c.must("open", "h", m.At(at)+"/devserver", "rdwr,creat")
				children = append(children, c)
				if i == 0 {
					c.must("flock", "h")
					got = append(got, stranger.Start("flockw", "h"))
				} else {
					got = append(got, c.Start("flockw", "h"))
				}
				m.awaitWaiters(at, i+1)
			}
			children[0].must("close", "h")
			m.wantWoken(got[1], children[1])
			children[2].Kill()
			m.awaitWaiters(at, 3)
			children[1].must("close", "h")
			m.wantWoken(got[3], children[3])
			children[3].Kill()
			m.wantWoken(got[4], children[4])
			children[4].must("close", "h")
			script.Exit(1)
			m.wantWoken(got[0], stranger)
		})
	}
}

// TestA8AttackRemovedBeneath attacks A8: what somebody waits for is removed by who
// holds the directory above, and holds on.
func TestA8AttackRemovedBeneath(t *testing.T) {
	m := mount(t)
	holder, waiter := agent(t), agent(t)
	holder.must("mkdir", m.At("D"))
	holder.must("mkdir", m.At("D/sub"))
	waiter.must("open", "h", m.At("D/sub/devserver"), "rdwr,creat")
	got := waiter.Start("flockw", "h")
	m.awaitWaiters("D/sub", 1)
	holder.must("rmdir", m.At("D/sub"))
	m.wantWoken(got, waiter)
	m.wantOwner("D", holder.Pid)
}

// TestA8AttackBeneath attacks A8: who waits for a lock file that its parent has locked
// is listed, sleeps, and has it in the order of arrival.
func TestA8AttackBeneath(t *testing.T) {
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/devserver"), "")
			script := agent(t)
			script.must("open", "h", m.At("D/devserver"), "rdwr")
			script.must("flock", "h")
			m.wantInTurn(script, func() { script.must("close", "h") })
			if n := m.metric("releases_total"); n > 100 {
				t.Errorf("%d acquisitions were begun, most of them to be given up", n)
			}
		})
	}
}

// TestA8AttackHandedOverInTurn attacks A8 and R5: of many who have come to hold what
// they wait for, the first in line has it first.
func TestA8AttackHandedOverInTurn(t *testing.T) {
	m := mount(t)
	script := agent(t)
	maker := script.Child()
	maker.must("mkdir", m.At("D"))
	m.wantInTurn(script, func() { maker.Exit(0) })
}

// wantInTurn fails the test if children of a script do not get D in the order in which
// they have come, once it is given up.
func (m *Mount) wantInTurn(script *Agent, giveUp func()) {
	m.t.Helper()
	var waiters []*Agent
	var got []func() string
	for i := range 6 {
		w := script.Child()
		w.must("open", "h", m.At("D/devserver"), "rdwr,creat")
		waiters, got = append(waiters, w), append(got, w.Start("flockw", "h"))
		m.awaitWaiters("D", i+1)
	}
	giveUp()
	for i, w := range waiters {
		m.wantWoken(got[i], w)
		w.must("close", "h")
	}
}
