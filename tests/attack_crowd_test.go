//go:build linux

package tests

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A crowd are processes that all do the same to a few names, in turns by chance.
type crowd struct {
	prepare func(back string)
	turns   func(c *crowded) []func()
	answers map[string]string // that a local file system gives to a call, but for "ok" alone
}

// crowded is one of those processes.
type crowded struct {
	top   string // where they are
	own   string // the beginning of names that it has for itself
	heard map[string]bool
}

// TestAttackPlain attacks M2: a crowd hears what it hears in a bare directory, in one that
// is free, and in one that its parent holds.
func TestAttackPlain(t *testing.T) {
	const size, duration = 4, 300 * time.Millisecond
	for _, kind := range slices.Sorted(maps.Keys(crowds())) {
		t.Run(kind, func(t *testing.T) {
			if kind == "links" {
				needProtectedLinks(t)
			}
			byTransport(t, func(t *testing.T, opts ...string) {
				m := mount(t, opts...)
				cr := crowds()[kind]
				for _, top := range []string{"bare", "free", "held/top"} {
					openDir(t, m.Back(top))
					cr.prepare(m.Back(top))
					where, next := m.At(top), agent
					switch top {
					case "bare":
						where = m.Back(top)
					case "held/top":
						parent := agent(t)
						parent.must("creat", m.At("held/devserver"), "wronly,creat,excl")
						next = func(*testing.T) *Agent { return parent.Child() }
					}
					var answers []func() string
					for range size {
						answers = append(answers, next(t).StartGet("crowded", kind, where, duration.String()))
					}
					all := map[string]bool{}
					for _, answer := range answers {
						for _, one := range strings.Split(answer(), ", ") {
							all[one] = true
						}
					}
					for _, one := range slices.Sorted(maps.Keys(all)) {
						i := strings.LastIndexByte(one, ' ')
						want := cr.answers[one[:i]]
						if want == "" {
							want = "ok"
						}
						if !oneOf(one[i+1:], want) && (top == "bare" || !oneOf(one, "move EBUSY")) {
							t.Errorf("%s: %s, want %s", top, one, want)
						}
					}
				}
			})
		})
	}
}

// joinCrowd has this process be in a crowd for a while. It returns which calls heard what.
func joinCrowd(kind, top string, d time.Duration) (string, error) {
	runtime.LockOSThread() // the daemon knows threads
	defer runtime.UnlockOSThread()
	c := &crowded{top: top, own: "own." + itoa(os.Getpid()), heard: map[string]bool{}}
	turns := crowds()[kind].turns(c)
	for end := time.Now().Add(d); time.Now().Before(end); {
		turns[rand.IntN(len(turns))]()
	}
	return strings.Join(slices.Sorted(maps.Keys(c.heard)), ", "), unix.Chdir("/")
}

func (c *crowded) note(call string, err error) bool {
	c.heard[call+" "+errnoName(err)] = true
	return err == nil
}

// at is a path of one of several names, which have blanks between.
func (c *crowded) at(names string) string {
	all := strings.Fields(names)
	return c.top + "/" + all[rand.IntN(len(all))]
}

func (c *crowded) open(call, path string, flags int) bool {
	fd, err := unix.Open(path, flags|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o666)
	return c.note(call, err) && c.note("close", unix.Close(fd))
}

func crowds() map[string]crowd {
	return map[string]crowd{
		"links": {
			prepare: func(back string) { os.WriteFile(back+"/always", nil, 0o666) },
			turns:   linkTurns,
			answers: map[string]string{"link onto": "ok|EEXIST", "unlink": "ok|ENOENT", "open": "ok|ENOENT"},
		},
		"lock names": {
			prepare: func(back string) { os.Mkdir(back+"/D", 0o777) },
			turns:   lockNameTurns,
			answers: map[string]string{
				"move": "ok|ENOENT|ENOTEMPTY", "create": "ok|EEXIST", "mkdir": "ok|EEXIST", "mknod": "ok|EEXIST",
				"symlink": "ok|EEXIST", "link": "ok|EEXIST", "stat": "ok|ENOENT", "open": "ok|ENOENT|EISDIR|ELOOP", "give": "ok|ENOENT",
			},
		},
		"parents": {
			prepare: func(back string) { os.MkdirAll(back+"/P/in/deep", 0o777) },
			turns:   parentTurns,
			answers: map[string]string{"move": "ok|ENOENT", "by path": "ok|ENOENT"},
		},
		"replaced": {
			prepare: func(back string) {
				for _, d := range []string{"d0", "d1"} {
					os.MkdirAll(back+"/"+d+"/sub", 0o777)
					os.WriteFile(back+"/"+d+"/sub/f", nil, 0o666)
				}
				os.WriteFile(back+"/f", nil, 0o666)
				os.Symlink("d0", back+"/l")
			},
			turns: replacedTurns,
		},
	}
}

// linkTurns: a file that always has a name gets and loses others.
func linkTurns(c *crowded) []func() {
	always, own := c.top+"/always", c.top+"/"+c.own
	return []func(){
		func() { c.note("link onto", unix.Link(always, c.at("n0 n1"))) },
		func() { c.note("unlink", unix.Unlink(c.at("n0 n1"))) },
		func() { c.open("open", c.at("n0 n1"), unix.O_RDONLY) },
		func() {
			var st unix.Stat_t
			if c.note("stat", unix.Stat(always, &st)) && st.Nlink == 0 {
				c.heard["a file that has no link"] = true
			}
		},
		func() {
			if c.note("link", unix.Link(always, own)) {
				c.note("unlink own", unix.Unlink(own))
			}
		},
		func() {
			if c.note("link", unix.Link(always, own)) {
				c.note("rename over", unix.Rename(own, c.at("n0 n1")))
				unix.Unlink(own) // it was the same file perhaps
			}
		},
	}
}

// lockNameTurns: a lock file is made in a directory that moves, by who works in it: who
// comes by its path may rightly find twice that it has just left.
func lockNameTurns(c *crowded) []func() {
	for unix.Chdir(c.at("D E")) != nil {
	}
	lock := func() string { return []string{"devserver", "devserver.lock"}[rand.IntN(2)] }
	own := c.top + "/" + c.own
	try := func(call string, take func(lock string) error, give func(lock string) error) func() {
		return func() {
			if l := lock(); c.note(call, take(l)) {
				c.note("give", give(l))
			}
		}
	}
	return []func(){
		func() {
			c.note("move", unix.Rename(c.top+"/D", c.top+"/E"))
			c.note("move", unix.Rename(c.top+"/E", c.top+"/D"))
		},
		func() { c.open("open", lock(), unix.O_RDWR) },
		func() {
			var st unix.Stat_t
			c.note("stat", unix.Lstat(lock(), &st))
		},
		try("create", func(l string) error { return creat(l) }, unix.Unlink),
		try("mkdir", func(l string) error { return unix.Mkdir(l, 0o777) }, unix.Rmdir),
		try("mknod", func(l string) error { return unix.Mknod(l, unix.S_IFIFO|0o666, 0) }, unix.Unlink),
		try("symlink", func(l string) error { return unix.Symlink("nowhere/else", l) }, unix.Unlink),
		func() {
			c.open("own", own, unix.O_CREAT|unix.O_RDWR)
			try("link", func(l string) error { return unix.Link(own, l) }, unix.Unlink)()
			c.note("unlink own", unix.Unlink(own))
		},
	}
}

func creat(path string) error {
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o666)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// parentTurns: what is above a directory moves, and who is in it does not notice.
func parentTurns(c *crowded) []func() {
	dir := -1
	for dir < 0 {
		dir, _ = unix.Open(c.at("P Q")+"/in/deep", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	unix.Fchdir(dir)
	within := func(how string, dir int) {
		var st unix.Stat_t
		fd, err := unix.Openat(dir, c.own, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o666)
		if c.note(how+" create", err) {
			unix.Close(fd)
		}
		c.note(how+" rename", unix.Renameat(dir, c.own, dir, c.own+"r"))
		c.note(how+" link", unix.Linkat(dir, c.own+"r", dir, c.own, 0))
		if c.note(how+" stat", unix.Fstatat(dir, c.own, &st, 0)); st.Nlink != 2 {
			c.heard[fmt.Sprintf("%s nlink %d", how, st.Nlink)] = true
		}
		c.note(how+" mkdir", unix.Mkdirat(dir, c.own+"d", 0o777))
		c.note(how+" rename in", unix.Renameat(dir, c.own+"r", dir, c.own+"d/x"))
		if fd, err = unix.Openat(dir, ".", unix.O_DIRECTORY|unix.O_CLOEXEC, 0); c.note(how+" opendir", err) {
			all := listOwn(fd, c.own)
			if want := []string{c.own, c.own + "d"}; !slices.Equal(all, want) {
				c.heard[fmt.Sprintf("%s list %q", how, all)] = true
			}
			unix.Close(fd)
		}
		c.note(how+" unlink in", unix.Unlinkat(dir, c.own+"d/x", 0))
		c.note(how+" rmdir", unix.Unlinkat(dir, c.own+"d", unix.AT_REMOVEDIR))
		c.note(how+" unlink", unix.Unlinkat(dir, c.own, 0))
		c.note(how+" stat of ..", unix.Fstatat(dir, "../../..", &st, 0))
	}
	return []func(){
		func() { within("descriptor", dir) },
		func() { within("working directory", unix.AT_FDCWD) },
		func() {
			c.note("move", unix.Rename(c.top+"/P", c.top+"/Q"))
			c.note("move", unix.Rename(c.top+"/Q", c.top+"/P"))
		},
		func() {
			name := c.own + "p"
			if c.open("by path", c.at("P Q")+"/in/deep/"+name, unix.O_CREAT|unix.O_RDWR) {
				c.note("unlink here", unix.Unlink(name))
			}
		},
	}
}

// listOwn lists what in an open directory begins so, each as often as it is told of.
func listOwn(fd int, own string) (names []string) {
	for buf := make([]byte, 1<<10); ; {
		n, err := unix.Getdents(fd, buf)
		if err != nil || n == 0 {
			slices.Sort(names)
			return slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, own) })
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// replacedTurns: a name that something else gets in the same step is always there.
func replacedTurns(c *crowded) []func() {
	own := c.top + "/" + c.own
	exchange := func(a, b string) func() {
		return func() {
			c.note("exchange", unix.Renameat2(unix.AT_FDCWD, c.top+"/"+a, unix.AT_FDCWD, c.top+"/"+b, unix.RENAME_EXCHANGE))
		}
	}
	look := func(what, names string) func() {
		return func() {
			var st unix.Stat_t
			c.note(what+" stat", unix.Stat(c.at(names), &st))
			c.open(what+" open", c.at(names), unix.O_RDWR)
			c.note(what+" chmod", unix.Chmod(c.at(names), 0o666))
			c.note(what+" setxattr", unix.Setxattr(c.at(names), "user.x", nil, 0))
		}
	}
	return []func(){
		exchange("d0", "d1"), exchange("d0/sub", "d1/sub"),
		look("file", "f"), look("beneath", "d0/sub/f d1/sub/f"), look("symlink", "l/sub/f"),
		func() {
			c.open("own", own, unix.O_CREAT|unix.O_RDWR)
			c.note("rename", unix.Rename(own, c.at("f d0/sub/f d1/sub/f")))
		},
		func() {
			c.note("symlink", unix.Symlink(c.at("d0 d1")[len(c.top)+1:], own))
			c.note("rename", unix.Rename(own, c.top+"/l"))
		},
		func() {
			_, err := unix.Readlink(c.top+"/l", make([]byte, 10))
			c.note("readlink", err)
			c.open("opendir", c.at("l d0/sub d1/sub"), unix.O_DIRECTORY)
			c.open("create", c.at("d0/sub/n d1/sub/n l/n"), unix.O_CREAT|unix.O_RDWR)
		},
	}
}
