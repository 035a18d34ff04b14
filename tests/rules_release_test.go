//go:build linux

package tests

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestR1: a holder, whichever of its processes or threads, ends the existence
// lock by taking the lock file's name away.
func TestR1(t *testing.T) {
	m := mount(t)
	ways := map[string]func(lock string) [][]string{
		"unlink": func(l string) [][]string { return [][]string{{"creat", l, "wronly,creat,excl"}, {"unlink", l}} },
		"rmdir":  func(l string) [][]string { return [][]string{{"mkdir", l}, {"rmdir", l}} },
		"rename away": func(l string) [][]string {
			return [][]string{{"creat", l, "wronly,creat,excl"}, {"rename", l, l + ".gone"}}
		},
		"rename out": func(l string) [][]string {
			return [][]string{{"creat", l, "wronly,creat,excl"}, {"rename", l, m.At("gone")}}
		},
		"rename over": func(l string) [][]string {
			return [][]string{{"creat", l, "wronly,creat,excl"}, {"rename", l, filepath.Join(filepath.Dir(l), "index")}}
		},
	}
	for name, way := range ways {
		for _, who := range []string{"owner", "thread", "child", "grandchild"} {
			t.Run(name+" by "+who, func(t *testing.T) {
				m := m.on(t)
				dir := name + " " + who
				openDir(t, m.Back(dir))
				mustDo(t, os.WriteFile(m.Back(dir, "index"), nil, 0o666))
				a, b := agent(t), agent(t)
				releaser := a
				switch who {
				case "child":
					releaser = a.Child()
				case "grandchild":
					releaser = a.Child().Child()
				}
				calls := way(m.At(dir, "devserver"))
				a.must(calls[0]...)
				m.wantOwner(dir, a.Pid)
				if who == "thread" {
					calls[1] = append([]string{"thread"}, calls[1]...)
				}
				releaser.must(calls[1]...)
				m.wantFree(dir)
				b.must("creat", m.At(dir, "of-b"), "wronly,creat")
			})
		}
	}
}

// TestR3: a lock goes with its directory: removed with it, or renamed.
func TestR3(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	a.must("rename", m.At("D"), m.At("E"))
	m.wantFree("D")
	m.wantOwner("E", a.Pid)
	if now := m.Locks()["E"].Token; now != token {
		t.Errorf("token after the rename: %d, want %d as before", now, token)
	}
	b.want("EBUSY", "creat", m.At("E/new"), "wronly,creat")
	a.Child().must("rmdir", m.At("E"))
	m.wantFree("E")
	b.must("mkdir", m.At("E"))
	m.wantOwner("E", b.Pid)
	if now := m.Locks()["E"].Token; now <= token {
		t.Errorf("token of a later lock: %d, want more than %d", now, token)
	}

	openDir(t, m.Back("F"))
	a.must("mkdir", m.At("X"))
	a.must("rename", m.At("X"), m.At("F"), "exchange")
	m.wantOwner("F", a.Pid)
	m.wantFree("X")
	a.must("rmdir", m.At("X"))

	// A rename over D removes it.
	a.must("mkdir", m.At("Y"))
	a.must("mkdir", m.At("Z"))
	token = m.Locks()["Y"].Token
	a.must("rename", m.At("Y"), m.At("Z"))
	if rows := m.Listing().Locks; len(rows) != 3 || m.Locks()["Z"].Token != token {
		t.Errorf("rows after a rename over Z: %+v, want those of E and F, and of Z the one with token %d", rows, token)
	}
}

// TestR4: however the owner dies, its locks and the lock files that it made go;
// what else it made stays.
func TestR4(t *testing.T) {
	m := mount(t)
	ends := map[string]func(*Agent){
		"kill":   (*Agent).Kill,
		"exit 1": func(a *Agent) { a.Exit(1) },
		"exit 0": func(a *Agent) { a.Exit(0) },
	}
	for name, end := range ends {
		for way := range lockWays("") {
			t.Run(name+"/"+way, func(t *testing.T) {
				m := m.on(t)
				dir := name + " " + way
				openDir(t, m.Back(dir))
				mustDo(t, os.WriteFile(m.Back(dir, "devserver.tmp"), nil, 0o666))
				a, b := agent(t), agent(t)
				bystander := a.Child()
				lock := m.At(dir, "devserver")
				a.must(lockWays(lock)[way][0]...)
				a.must("put", m.At(dir, "result"), "data", "creat")
				a.must("mkdir", m.At(dir+" implicit"))
				a.must("put", m.At(dir+" implicit", "result"), "data", "creat")
				end(a)
				m.awaitFree(dir)
				m.awaitFree(dir + " implicit")
				if _, err := os.Lstat(m.Back(dir, "devserver")); err == nil {
					t.Errorf("the lock file is left")
				}
				for _, d := range []string{dir, dir + " implicit"} {
					if content, _ := os.ReadFile(m.Back(d, "result")); string(content) != "data" {
						t.Errorf("%s/result = %q, want what the dead owner wrote", d, content)
					}
				}
				b.must("creat", lock, "wronly,creat,excl")
				m.wantOwner(dir, b.Pid)
				bystander.want("EBUSY", "creat", m.At(dir, "orphan"), "wronly,creat")
			})
		}
	}
}

// TestR5: an owner that exits with 0, having changed nothing but the making of
// D or its lock file, hands the lock to its parent, again and again.
func TestR5(t *testing.T) {
	m := mount(t)
	mk := func(dir string) []string { return []string{"mkdir", dir} }
	lock := func(dir string) []string {
		return []string{"creat", filepath.Join(dir, "devserver"), "wronly,creat,excl"}
	}
	for name, acquire := range map[string]func(string) []string{"mkdir": mk, "lock file": lock} {
		fresh := func(t *testing.T, dir string) string {
			if name == "lock file" {
				openDir(t, m.Back(dir))
			}
			return m.At(dir)
		}
		t.Run(name+"/chain", func(t *testing.T) {
			m := m.on(t)
			a := agent(t)
			b := a.Child()
			c := b.Child()
			dir := name + " chain"
			path := fresh(t, dir)
			c.must(acquire(path)...)
			m.wantOwner(dir, c.Pid)
			c.Exit(0)
			eventually(t, "the parent has it", func() bool { return m.Locks()[dir].Pid == b.Pid })
			agent(t).want("EBUSY", "creat", filepath.Join(path, "of-rival"), "wronly,creat")
			b.Exit(0)
			eventually(t, "the grandparent has it", func() bool { return m.Locks()[dir].Pid == a.Pid })
			a.must("creat", filepath.Join(path, "of-a"), "wronly,creat")
			a.Exit(0) // it has changed something
			m.awaitFree(dir)
		})
		for _, status := range []int{0, 1, 75} {
			for _, changed := range []string{"nothing", "lock file's content", "own", "child's", "removed", "open before", "copy closed before", "closed before"} {
				t.Run(name+"/exit "+strconv.Itoa(status)+" changed "+changed, func(t *testing.T) {
					m := m.on(t)
					a := agent(t)
					b := a.Child()
					dir := name + strconv.Itoa(status) + changed
					path := fresh(t, dir)
					if oneOf(changed, "open before|copy closed before|closed before") {
						if name == "mkdir" {
							return // nothing is there
						}
						mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
						b.must("open", "h", filepath.Join(path, "old"), "wronly")
						switch changed {
						case "copy closed before":
							b.must("dup", "h", "copy")
							b.must("close", "copy")
						case "closed before": // of which the daemon hears late
							b.must("flight", "h")
						}
					}
					b.must(acquire(path)...)
					switch changed {
					case "open before", "copy closed before":
						b.must("write", "h", "new")
						b.must("close", "h")
					case "closed before":
						b.must("land")
					case "own":
						b.must("creat", filepath.Join(path, "new"), "wronly,creat")
					case "child's":
						b.Child().must("creat", filepath.Join(path, "new"), "wronly,creat")
					case "removed":
						if name == "mkdir" {
							return // nothing is there
						}
						mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
						b.must("unlink", filepath.Join(path, "old"))
					case "lock file's content":
						b.must("put", filepath.Join(path, "devserver"), itoa(b.Pid), "creat")
					}
					b.Exit(status)
					if status == 0 && oneOf(changed, "nothing|lock file's content|closed before") {
						eventually(t, "the parent has it", func() bool { return m.Locks()[dir].Pid == a.Pid })
						return
					}
					m.awaitFree(dir)
				})
			}
		}
		t.Run(name+"/killed", func(t *testing.T) {
			m := m.on(t)
			b := agent(t).Child()
			dir := name + " killed"
			b.must(acquire(fresh(t, dir))...)
			b.Kill()
			m.awaitFree(dir)
		})
		t.Run(name+"/dead parent", func(t *testing.T) {
			m := m.on(t)
			a := agent(t)
			b := a.Child()
			dir := name + " dead parent"
			b.must(acquire(fresh(t, dir))...)
			a.Kill()
			b.Exit(0)
			m.awaitFree(dir)
		})
		t.Run(name+"/init", func(t *testing.T) {
			m := m.on(t)
			a := agent(t)
			b := a.Child()
			a.Kill() // b is a child of init, or of a subreaper, now
			dir := name + " init"
			b.must(acquire(fresh(t, dir))...)
			b.Exit(0)
			m.awaitFree(dir)
		})
	}
	t.Run("lock file after content", func(t *testing.T) {
		m := m.on(t)
		b := agent(t).Child()
		b.must("mkdir", m.At("after"))
		b.must("creat", m.At("after/new"), "wronly,creat")
		b.must("creat", m.At("after/devserver"), "wronly,creat,excl")
		b.Exit(0)
		m.awaitFree("after")
	})
	t.Run("content becomes a lock file elsewhere", func(t *testing.T) {
		m := m.on(t)
		a := agent(t)
		b := a.Child()
		b.must("mkdir", m.At("from"))
		mustDo(t, os.WriteFile(m.Back("from/old"), nil, 0o666))
		openDir(t, m.Back("to"))
		b.must("rename", m.At("from/old"), m.At("to/devserver"))
		b.Exit(0)
		m.awaitFree("from")
		eventually(t, "the parent has the other one", func() bool { return m.Locks()["to"].Pid == a.Pid })
	})
	t.Run("linked", func(t *testing.T) {
		// As mutt_dotlock and mailutils' dotlock do: their temporary files fit no template.
		for _, how := range []string{"free", "parent's", "changed"} {
			m := m.on(t)
			a := agent(t)
			b := a.Child()
			dir := "linked " + how
			openDir(t, m.Back(dir))
			if how == "parent's" {
				a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
			}
			temp, lock := m.At(dir, "devserver.tmp"), m.At(dir, "devserver.lock")
			b.must("creat", temp, "wronly,creat,excl")
			b.must("link", temp, lock)
			b.must("unlink", temp)
			if how == "changed" {
				mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
				b.must("unlink", m.At(dir, "old"))
				b.Exit(0)
				m.awaitFree(dir)
				continue
			}
			b.Exit(0)
			eventually(t, "the parent has it", func() bool { return m.Locks()[dir].Pid == a.Pid })
			a.must("unlink", lock)
		}
	})
	t.Run("heir has it open", func(t *testing.T) {
		m := m.on(t)
		a := agent(t)
		b := a.Child()
		c := b.Child()
		b.must("mkdir", m.At("heir"))
		b.must("mkdir", m.At("heir/sub"))
		b.must("open", "h", m.At("heir/sub/file"), "wronly,creat")
		c.must("creat", m.At("heir/sub/devserver"), "wronly,creat,excl")
		c.Exit(0)
		eventually(t, "the parent has it", func() bool { return m.Locks()["heir/sub"].Pid == b.Pid })
		b.must("write", "h", "new")
		b.Exit(0)
		m.awaitFree("heir/sub")
	})
}

// TestR5AtOnce: so does a line of them, where the daemon hears of all at once, in whatever
// order.
func TestR5AtOnce(t *testing.T) {
	m := mount(t)
	top, other := agent(t), agent(t)
	fifo := filepath.Join(tempDir(t), "fifo")
	mustDo(t, syscall.Mkfifo(fifo, 0o600))
	script := fifo + ".sh"
	mustDo(t, os.WriteFile(script, []byte(`
		if [ $1 = 0 ]; then mkdir "$2" && read x <"$3"; else /bin/sh "$0" $(($1 - 1)) "$2" "$3"; fi
		exit $?`), 0o644))
	for round := range 4 {
		dir := "D" + itoa(round)
		over := top.StartGet("sh", "/bin/sh "+script+" 9 "+m.At(dir)+" "+fifo)
		goOn, err := os.OpenFile(fifo, os.O_WRONLY, 0) // once it reads
		mustDo(t, err)
		halt(t, m.cmd.Process.Pid)
		goOn.WriteString("\n")
		goOn.Close()
		if out := over(); out != "0 " {
			t.Fatalf("the script: %q", out)
		}
		mustDo(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGCONT))
		other.want("EBUSY", "creat", m.At(dir, "f"), "wronly,creat")
		top.must("rmdir", m.At(dir))
	}
}

// TestR5Outlives: how a file was closed that was open before the lock is known when the
// daemon was replaced, or killed, as well.
func TestR5Outlives(t *testing.T) {
	for name, next := range map[string]func(*Mount){
		"replaced": func(m *Mount) { m.replace() },
		"killed":   func(m *Mount) { m.restart(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			for _, dir := range []string{"late", "copy"} {
				openDir(t, m.Back(dir))
				mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
			}
			a := agent(t)
			b, c := a.Child(), a.Child()
			if name == "replaced" { // killed, the daemon has nothing open any more
				b.must("open", "h", m.At("late/old"), "wronly")
				b.must("flight", "h")
				next(m)
				b.must("creat", m.At("late/devserver"), "wronly,creat,excl")
				b.must("land")
				b.Exit(0)
				eventually(t, "the parent has it", func() bool { return m.Locks()["late"].Pid == a.Pid })
			}
			c.must("open", "h", m.At("copy/old"), "wronly")
			c.must("dup", "h", "copy")
			c.must("close", "copy")
			c.must("creat", m.At("copy/devserver"), "wronly,creat,excl")
			c.must("write", "h", "new")
			c.must("close", "h")
			next(m)
			c.Exit(0)
			m.awaitFree("copy")
		})
	}
}

// TestR5Reapers: nothing passes to what adopts or supervises others, or forks for each
// session or job: known by its name, as the first process of a pid namespace, or by
// the cgroup that it put its child into.
func TestR5Reapers(t *testing.T) {
	m := mount(t)
	sh, err := filepath.EvalSymlinks("/bin/sh")
	mustDo(t, err)
	bin := tempDir(t)
	for name, heir := range map[string]bool{
		"stager": true, "systemd": false, "tini": false, "supervisord": false, "s6-supervise": false, "runsv": false, "containerd-shim-runc-v2": false,
		"sshd-session": false, "cron": false, "smbd": false, "init of a namespace": false, "manager": false,
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			argv := []string{filepath.Join(bin, name)}
			script := `mkdir "$1" && echo made && read line`
			switch name {
			case "init of a namespace":
				need(t, "unshare")
				argv = []string{"unshare", "--pid", "--fork", sh}
			case "manager":
				script = `(echo 0 >"$2/cgroup.procs" && exec mkdir "$1") && echo made && read line`
				fallthrough
			default:
				mustDo(t, copyFile(sh, argv[0], 0o755))
			}
			dir := strings.ReplaceAll(name, " ", "-")
			args := append(argv, "-c", script, "sh", m.At(dir))
			if name == "manager" {
				args = append(args, cgroup(t))
			}
			p := startLines(t, nil, args...)
			p.hear("made")
			if !heir {
				m.awaitFree(dir)
				agent(t).must("rmdir", m.At(dir))
				return
			}
			eventually(t, "the parent has it", func() bool { return m.Locks()[dir].Pid == p.Pid() })
		})
	}
}

// TestR5Subreaper: nor does anything pass to a subreaper from who was left behind and adopted
// by it before its first call; from its own children it does.
func TestR5Subreaper(t *testing.T) {
	needBirths(t)
	for _, opts := range [][]string{nil, {"--compat"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			m := mount(t, opts...)
			reaper := agent(t)
			reaper.must("subreaper")
			own := reaper.Child()
			own.must("mkdir", m.At("own"))
			own.Exit(0)
			eventually(t, "the parent has it", func() bool { return m.Locks()["own"].Pid == reaper.Pid })
			for i, through := range []string{leftOnce, leftTwice, `echo >'` + m.At("seen") + `'; ` + leftOnce} {
				dir := itoa(i)
				left, _ := reaper.Orphan(through)
				if got := parentOf(t, left.Pid); got != reaper.Pid {
					t.Fatalf("the parent of who was left behind is %d, want %d", got, reaper.Pid)
				}
				left.must("mkdir", m.At(dir))
				m.wantOwner(dir, left.Pid)
				left.Exit(0)
				m.awaitFree(dir)
				agent(t).must("rmdir", m.At(dir))
			}
		})
	}
}

// TestR8: a write handle that is left after a release is listed, and stands in
// the way of the next owner until it is closed.
func TestR8(t *testing.T) {
	m := mount(t)
	for _, how := range []string{"release", "kill"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(how))
			a, b := agent(t), agent(t)
			left := a.Child()
			lock := []string{"creat", m.At(how, "devserver"), "wronly,creat,excl"}
			a.must(lock...)
			left.must("open", "h", m.At(how, "file"), "wronly,creat")
			if how == "release" {
				a.must("unlink", m.At(how, "devserver"))
			} else {
				a.Kill()
			}
			m.awaitFree(how)
			b.want("EEXIST", lock...)
			var listed bool
			for _, blocker := range m.Listing().Blockers {
				listed = listed || blocker.Pid == left.Pid && blocker.Path == how+"/file"
			}
			if !listed {
				t.Errorf("blockers: %+v, want pid %d with %s/file", m.Listing().Blockers, left.Pid, how)
			}
			m.wantLine(how + "/file +left-open +" + itoa(left.Pid) + " ")
			left.must("write", "h", "late")
			left.must("close", "h")
			b.must(lock...)
			if n := len(m.Listing().Blockers); n != 0 {
				t.Errorf("%d blockers after the close, want 0", n)
			}
		})
	}
}

// wantLine expects a line in the locks file that begins so.
func (m *Mount) wantLine(pattern string) {
	m.t.Helper()
	if text, err := os.ReadFile(m.control("locks")); !regexp.MustCompile("(?m)^" + pattern).Match(text) {
		m.t.Errorf("no line %q among the locks: %q, %v", pattern, text, err)
	}
}

// TestR8Delegated: what who delegates keeps open (C3d) is listed with the lock of the child.
func TestR8Delegated(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	a.must("open", "h", m.At("D/sub/file"), "wronly,creat")
	a.Child().must("creat", m.At("D/sub/devserver"), "wronly,creat,excl")
	if b := m.Locks()["D/sub"].Blockers; len(b) != 1 || b[0].Pid != a.Pid || b[0].Path != "D/sub/file" {
		t.Errorf("blockers: %+v, want pid %d with D/sub/file", b, a.Pid)
	}
	m.wantLine("  open: D/sub/file +" + itoa(a.Pid) + " ")
	a.must("close", "h")
	eventually(t, "the close is known", func() bool { return len(m.Locks()["D/sub"].Blockers) == 0 })
}

// TestR8Inherited: of a file that a process opened which is dead, who has its descriptor is
// named.
func TestR8Inherited(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	cmd := exec.Command("/bin/sh", "-c", "exec 9>file; sleep 60 >/dev/null 2>&1 & echo $!")
	cmd.Dir = m.At("D")
	out, err := cmd.Output()
	mustDo(t, err)
	pid := atoi(strings.TrimSpace(string(out)))
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	who := fmt.Sprintf("process %d (\"sleep 60\")", pid)
	m.wantStatus(75, who, "run", "-n", m.At("D"), "true")
}

// TestR6DestroyMeanwhile: an ordinary user's `release --destroy` removes a directory also
// while children remove things there.
func TestR6DestroyMeanwhile(t *testing.T) {
	m := mount(t)
	a := stranger(t)
	children := []*Agent{a.Child(), a.Child(), a.Child(), a.Child()}
	for i := range 4 {
		d := m.At("D" + itoa(i))
		a.must("mkdir", d)
		a.must("sh", "cd "+d+" && touch $(seq 2000)")
		var ends []func() string
		for j, c := range children {
			name := "k" + itoa(j) + "."
			ends = append(ends, c.Start("sh", "cd "+d+" && for n in $(seq 200); do for i in $(seq 20); do : >"+name+"$i || exit; done; rm "+name+"*; done 2>/dev/null"))
		}
		eventually(t, "the children work there", func() bool { _, err := os.Lstat(d + "/k3.1"); return err == nil })
		if out := runCmdAs(t, a, "release", "--destroy", d); out != "0 " {
			t.Fatalf("release --destroy, the %d-th: %q, want status 0", i, out)
		}
		for _, end := range ends {
			end()
		}
	}
}

// TestR6Destroy: who gives a directory back to be removed takes nothing from a
// child that holds it, or something in it (C2): that is refused, and says why.
func TestR6Destroy(t *testing.T) {
	m := mount(t)
	a := agent(t)
	child := a.Child("setsid")
	for _, at := range []string{"", "sub"} {
		dir := "D" + at
		openDir(t, m.Back(dir))
		a.mustCommand(m, "acquire %s client=x ttl=1h", dir)
		child.mustCommand(m, "join %s client=x", dir)
		child.must("put", m.At(dir, "kept"), "1", "wronly,creat")
		held := filepath.Join(dir, at)
		if at != "" {
			child.must("mkdir", m.At(held))
		}
		child.mustCommand(m, "acquire %s", held)
		before := m.Locks()
		out := a.Get("sh", stagefsBin()+" release --client x --destroy "+m.At(dir))
		if !strings.HasPrefix(out, "75 ") || !strings.Contains(out, "pid "+itoa(child.Pid)) || !strings.Contains(out, "nothing was removed") {
			t.Errorf("release --destroy %s while a child holds %s: %q", dir, held, out)
		}
		if after := m.Locks(); !maps.EqualFunc(before, after, func(x, y lockRow) bool { return x.Token == y.Token }) {
			t.Errorf("locks %+v, want %+v", after, before)
		}
		if _, err := os.Lstat(m.Back(dir, "kept")); err != nil {
			t.Error(err)
		}
		child.mustCommand(m, "release %s", held)
		a.must("sh", stagefsBin()+" release --client x --destroy "+m.At(dir))
		wantGone(t, m, dir)
	}
	openDir(t, m.Back("E"))
	a.mustCommand(m, "acquire E shared")
	if out := a.Get("sh", stagefsBin()+" release --destroy "+m.At("E")); !strings.HasPrefix(out, "77 ") || !strings.Contains(out, "shared") {
		t.Errorf("release --destroy of a shared lock: %q", out)
	}
	if m.Locks()["E"].Token == 0 {
		t.Error("the shared lock has ended")
	}
}
