//go:build linux

package tests

import (
	"maps"
	"os"
	"slices"
	"testing"
)

// wantOrphan reports an error unless a lock file is listed as an orphan, or is not.
func (m *Mount) wantOrphan(path string, want bool) {
	m.t.Helper()
	var all []string
	for _, o := range m.Listing().Orphans {
		all = append(all, o.Path)
	}
	if slices.Contains(all, path) != want {
		m.t.Errorf("orphans are %q; want %s among them: %v", all, path, want)
	}
}

// TestR4LockDirUsed: a lock directory goes with its owner, unless somebody who lives
// on has a lock in it or has staged something there. The owner's lock ends all the
// same, and what is left is listed.
func TestR4LockDirUsed(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		uses := map[string]func(m *Mount, dir string, owner, child *Agent){
			"locked": func(m *Mount, dir string, owner, child *Agent) {
				child.mustCommand(m, "acquire %s/devserver", dir)
				child.must("put", m.At(dir, "devserver/artifact"), "precious", "wronly,creat")
			},
			"staged": func(m *Mount, dir string, owner, child *Agent) {
				child.must("put", m.At(dir, "devserver/artifact"), "precious", "wronly,creat")
			},
			"locked, staged and released": func(m *Mount, dir string, owner, child *Agent) {
				child.mustCommand(m, "acquire %s/devserver", dir)
				child.must("put", m.At(dir, "devserver/artifact"), "precious", "wronly,creat")
				child.mustCommand(m, "release %s/devserver", dir)
			},
			"staged by its program": func(m *Mount, dir string, owner, child *Agent) {
				child.must("sh", "printf precious >"+m.At(dir, "devserver/artifact")+"; true")
			},
			"moved in": func(m *Mount, dir string, owner, child *Agent) {
				owner.must("put", m.At(dir, "artifact"), "precious", "wronly,creat")
				child.must("rename", m.At(dir, "artifact"), m.At(dir, "devserver/artifact"))
			},
			"open": func(m *Mount, dir string, owner, child *Agent) {
				child.must("open", "f", m.At(dir, "artifact"), "rdwr,creat")
				child.must("write", "f", "precious")
				owner.must("rename", m.At(dir, "artifact"), m.At(dir, "devserver/artifact"))
			},
			"beneath": func(m *Mount, dir string, owner, child *Agent) {
				child.must("mkdir", m.At(dir, "devserver/sub"))
				owner.must("put", m.At(dir, "devserver/artifact"), "precious", "wronly,creat")
			},
		}
		for _, when := range []string{"", "after a restart", "during a restart", "after a replacement", "broken"} {
			t.Run(when, func(t *testing.T) {
				m := mount(t, opts...)
				other := agent(t)
				type lockDir struct {
					dir, how     string
					owner, child *Agent
				}
				var all []lockDir
				for _, how := range slices.Sorted(maps.Keys(uses)) {
					if how == "open" && (when == "after a restart" || when == "during a restart") {
						continue // the descriptor dies with the mount, unless it passes: TestS1…
					}
					d := lockDir{dir: "D" + itoa(len(all)), how: how, owner: agent(t)}
					openDir(t, m.Back(d.dir))
					d.child = d.owner.Child("setsid")
					d.owner.must("mkdir", m.At(d.dir, "devserver"))
					uses[how](m, d.dir, d.owner, d.child)
					all = append(all, d)
				}
				kill := func() {
					for _, d := range all {
						d.owner.Kill()
					}
				}
				switch when {
				case "after a restart":
					m.restart(nil, opts...)
					kill()
				case "during a restart":
					m.restart(kill, opts...)
				case "after a replacement":
					m.replace()
					kill()
				case "broken":
					for _, d := range all {
						if s := m.Ctl("break " + d.dir + " attack"); s != "ok" {
							t.Errorf("%s: break = %s", d.how, s)
						}
					}
				default:
					kill()
				}
				for _, d := range all {
					t.Run(d.how, func(t *testing.T) {
						lock := m.At(d.dir, "devserver")
						m.awaitFree(d.dir)
						if b, err := os.ReadFile(m.Back(d.dir, "devserver/artifact")); string(b) != "precious" {
							t.Errorf("what was staged: %q, %v", b, err)
						}
						m.wantOrphan(d.dir+"/devserver", true)
						other.want("EEXIST", "mkdir", lock)
						if d.how == "locked" {
							m.wantOwner(d.dir+"/devserver", d.child.Pid)
							other.want("EBUSY", "put", lock+"/artifact", "evil", "wronly")
							d.child.must("put", lock+"/artifact", "precious", "wronly,trunc")
							if s := m.Ctl("break " + d.dir + " attack"); s != "EBUSY" {
								t.Errorf("break = %s, want EBUSY", s)
							}
						}
						d.child.Kill()
						eventually(t, "break removes the orphan", func() bool { return m.Ctl("break "+d.dir+" attack") == "ok" })
						m.wantOrphan(d.dir+"/devserver", false)
						other.must("mkdir", lock)
						m.wantOwner(d.dir, other.Pid)
					})
				}
				if s := m.Ctl("check"); s != "ok" {
					t.Errorf("the tables: %s", s)
				}
			})
		}
	})
}

// TestR4LockDirUnused: nothing stale is left of a lock directory in which nobody who
// lives has anything.
func TestR4LockDirUnused(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		uses := map[string]func(m *Mount, dir string, owner, child *Agent){
			"staged elsewhere": func(m *Mount, dir string, owner, child *Agent) {
				child.must("put", m.At(dir, "artifact"), "x", "wronly,creat")
			},
			"dead": func(m *Mount, dir string, owner, child *Agent) {
				child.must("put", m.At(dir, "devserver/of-child"), "x", "wronly,creat")
				child.Kill()
			},
			"locked, and dead with the owner": func(m *Mount, dir string, owner, child *Agent) {
				child.mustCommand(m, "acquire %s/devserver", dir)
				child.must("put", m.At(dir, "devserver/of-child"), "x", "wronly,creat")
				child.Kill()
			},
			"the owner's own lock": func(m *Mount, dir string, owner, child *Agent) {
				owner.mustCommand(m, "acquire %s/devserver", dir)
				owner.must("put", m.At(dir, "devserver/more"), "x", "wronly,creat")
			},
			"tidied up": func(m *Mount, dir string, owner, child *Agent) {
				child.must("put", m.At(dir, "devserver/of-child"), "x", "wronly,creat")
				child.must("unlink", m.At(dir, "devserver/of-child"))
				owner.must("unlink", m.At(dir, "devserver/pid"))
			},
		}
		for _, when := range []string{"", "restarted", "replaced"} {
			t.Run(when, func(t *testing.T) {
				m := mount(t, opts...)
				other := agent(t)
				type lockDir struct {
					dir, how string
					owner    *Agent
				}
				var all []lockDir
				for how, use := range uses {
					d := lockDir{"D" + itoa(len(all)), how, agent(t)}
					openDir(t, m.Back(d.dir))
					child := d.owner.Child("setsid")
					d.owner.must("mkdir", m.At(d.dir, "devserver"))
					d.owner.must("put", m.At(d.dir, "devserver/pid"), "x", "wronly,creat")
					use(m, d.dir, d.owner, child)
					all = append(all, d)
				}
				switch when {
				case "restarted":
					m.restart(nil, opts...)
				case "replaced":
					m.replace()
				}
				for _, d := range all {
					t.Run(d.how, func(t *testing.T) {
						d.owner.Kill()
						m.awaitFree(d.dir)
						if _, err := os.Lstat(m.Back(d.dir, "devserver")); !os.IsNotExist(err) {
							t.Errorf("the lock directory afterwards: %v, want nothing there", err)
						}
						m.awaitFree(d.dir + "/devserver")
						m.wantOrphan(d.dir+"/devserver", false)
						other.must("mkdir", m.At(d.dir, "devserver"))
						m.wantOwner(d.dir, other.Pid)
					})
				}
				if s := m.Ctl("check"); s != "ok" {
					t.Errorf("the tables: %s", s)
				}
			})
		}
	})
}

// TestR4LockDirContent: what is larger than a note of whose a lock is, or is more than a
// few of them, is content, though it is in a directory that is called like a lock file.
func TestR4LockDirContent(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("src"))
	mustDo(t, os.Mkdir(m.Back("src/devserver"), 0o777))
	mustDo(t, os.WriteFile(m.Back("src/devserver/artifact"), make([]byte, 1000), 0o666))
	mustDo(t, os.WriteFile(m.Back("src/devserver/note"), []byte("4711\n"), 0o666))
	for name, how := range map[string]string{
		"copied":  "mkdir D && cp -r " + m.Back("src/devserver") + " D/",
		"renamed": "mkdir D && cp -r " + m.Back("src/devserver") + " D/x && mv D/x D/devserver",
		"killed":  "mkdir D && cp -r " + m.Back("src/devserver") + " D/ && kill -9 $$",
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			cmd := command("setsid", "-w", "sh", "-c", "cd '"+m.Path+"' && "+how)
			_ = cmd.Run()
			m.awaitFree("D")
			for _, file := range []string{"artifact", "note"} {
				if _, err := os.Stat(m.Back("D/devserver", file)); err != nil {
					t.Error(err)
				}
			}
			m.wantOrphan("D/devserver", true)
			mustDo(t, os.RemoveAll(m.Back("D")))
		})
	}
}

// TestR5LockDir: a program that makes a lock directory, and notes in it whose that is,
// hands the lock over when it exits, as one does that writes into its lock file. Who
// brings something there from elsewhere, or changes something else, does not.
func TestR5LockDir(t *testing.T) {
	for how, c := range map[string]struct {
		script string
		passes bool
	}{
		"pid":           {"mkdir L && echo $$ >L/pid", true},
		"more notes":    {"mkdir L && mkdir L/on && hostname >L/on/host && date >>L/on/host && chmod 600 L/on/host && touch L/since && rm L/since", true},
		"atomic":        {"mkdir L && echo $$ >L/pid.tmp && mv L/pid.tmp L/pid", true},
		"from beneath":  {"mkdir L L/on && echo $$ >L/on/pid && ln L/on/pid L/pid && rm -r L/on", true},
		"content":       {"mkdir L && echo $$ >L/pid && echo 1 >artifact", false},
		"content first": {"mkdir L && echo 1 >artifact && echo $$ >L/pid", false},
		"renamed":       {"mkdir L && mv old L/pid", false},
		"linked":        {"mkdir L && ln old L/pid", false},
		"moved out":     {"mkdir L && echo $$ >L/pid && mv L/pid pid", false},
		"elsewhere":     {"mkdir L && echo 1 >sub/L/pid", false},
	} {
		t.Run(how, func(t *testing.T) {
			m := mount(t, "--lock-name", "L")
			openDir(t, m.Back("D/sub/L"))
			openFile(t, m.Back("D/old"), "old")
			shell, other := agent(t), agent(t)
			if out := shell.Get("sh", "cd "+m.At("D")+" && "+c.script); out != "0 " {
				t.Fatal(out)
			}
			if !c.passes {
				m.awaitFree("D")
				return
			}
			eventually(t, "the lock passes", func() bool { return m.ownsAny(shell.Pid) })
			other.want("EEXIST", "mkdir", m.At("D/L"))
			other.want("EBUSY", "put", m.At("D/old"), "other", "")
			shell.must("put", m.At("D/old"), "its own", "")
			if out := shell.Get("sh", "rm -r "+m.At("D/L")); out != "0 " {
				t.Error(out)
			}
			m.wantFree("D")
		})
	}
}

// TestR5LockDirKilled: so it does if the daemon is killed in between.
func TestR5LockDirKilled(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	shell := agent(t)
	child := shell.Child()
	child.must("mkdir", m.At("D/devserver"))
	child.must("put", m.At("D/devserver/pid"), "1", "creat")
	m.restart(nil)
	m.wantOwner("D", child.Pid)
	child.Exit(0)
	eventually(t, "the lock passes", func() bool { return m.ownsAny(shell.Pid) })
	wantContent(t, m.At("D/devserver/pid"), "1")
}
