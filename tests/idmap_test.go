//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// swapped is what a mount shows the IDs of its files as: root's as nobody's, and the other
// way round. So who is nobody makes what is root's below, and has no rights of root's.
var swapped = []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}, {ContainerID: 1, HostID: 1, Size: nobody - 1}, {ContainerID: nobody, HostID: 0, Size: 1}}

// shift is by how much shifted changes IDs, as for a container with users of its own.
const shift = 100000

var shifted = []syscall.SysProcIDMap{{ContainerID: 0, HostID: shift, Size: shift}}

// idMapped mounts a directory a second time, with mapped IDs.
func idMapped(t *testing.T, dir string, ids []syscall.SysProcIDMap) string {
	t.Helper()
	at := tempDir(t)
	mustDo(t, mountMapped(t, dir, at, ids))
	t.Cleanup(func() { mustDo(t, unix.Unmount(at, unix.MNT_DETACH)) })
	return at
}

func mountMapped(t *testing.T, dir, at string, ids []syscall.SysProcIDMap) error {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: unix.SIGKILL}
	mustDo(t, cmd.Start())
	users, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	cmd.Process.Kill()
	cmd.Wait()
	mustDo(t, err)
	defer users.Close()
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	mustDo(t, err)
	defer unix.Close(tree)
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())})
	if err != nil {
		return err
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// mountedMapped serves a directory whose IDs may be mapped, and names what is in it by a
// mount that does.
func mountedMapped(t *testing.T, ids []syscall.SysProcIDMap) (m *Mount, at func(name string) string) {
	t.Helper()
	needIDMap(t)
	m = mount(t, "--idmap")
	front := idMapped(t, m.Path, ids)
	return m, func(name string) string { return filepath.Join(front, name) }
}

// needIDMap skips the test where the kernel maps no IDs of FUSE mounts.
func needIDMap(t *testing.T) {
	t.Helper()
	need(t, "root", "fuse")
	var u unix.Utsname
	mustDo(t, unix.Uname(&u))
	var major, minor int
	fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	if major < 6 || major == 6 && minor < 12 {
		t.Skip("needs Linux 6.12")
	}
	if strings.Contains(os.Getenv("STAGEFS_MOUNT_OPTS"), "--compat") {
		t.Skip("is more than Linux 5.10 offers")
	}
	dir := staticDir(t)
	if err := mountMapped(t, dir, dir, shifted); err != nil {
		t.Skipf("the file system of the tests has no mapped mounts: %v", err)
	}
	mustDo(t, unix.Unmount(dir, unix.MNT_DETACH))
}

// TestM2IDMap does everything by a mapped mount of the mount, and by one of a plain
// directory, and expects the same answers and the same tree.
func TestM2IDMap(t *testing.T) {
	needIDMap(t)
	m := mount(t, "--idmap")
	plain := tempDir(t)
	for name, ids := range map[string][]syscall.SysProcIDMap{"swapped": swapped, "shifted": shifted} {
		front, back := idMapped(t, m.Path, ids), idMapped(t, plain, ids)
		for _, c := range append(asBacking(), idMapCases()...) {
			if !regexp.MustCompile(`owner|setgid|ACL|permissions|suid|TMPFILE`).MatchString(c.name) {
				continue // nobody's IDs matter there
			}
			if name == "shifted" {
				c.uid += shift
			}
			t.Run(name+" "+c.name, func(t *testing.T) {
				dir := strings.ReplaceAll(name+" "+c.name, " ", "-")
				ground(t, filepath.Join(plain, dir))
				ground(t, m.Back(dir))
				if want, got := c.play(t, filepath.Join(back, dir)), c.play(t, filepath.Join(front, dir)); want != got {
					t.Errorf("answers differ from a plain directory's:\n%s", diff(want, got))
				}
				if want, got := shape(t, filepath.Join(plain, dir)), shape(t, m.Back(dir)); want != got {
					t.Errorf("tree differs from the plain directory's:\n%s", diff(want, got))
				}
			})
		}
	}
}

// idMapCases are what IDs matter to besides.
func idMapCases() []scriptCase {
	return []scriptCase{
		{name: "owners", uid: nobody, lines: `
			creat {}/open/file wronly,creat,excl 0644
			stat {}/open/file
			chown {}/open/file 1000 -1
			chown {}/open/file 65534 65534
			chmod {}/open/file 04755
			stat {}/open/file
			rename {}/open/file {}/open/moved whiteout
			chmod {}/secret 0666
			unlink {}/sticky/file
			creat {}/sticky/own wronly,creat,excl
			rename {}/sticky/own {}/sticky/renamed
			rename {}/sticky/renamed {}/sticky/again whiteout
			unlink {}/sticky/renamed
			unlink {}/sticky/again`},
		{name: "owners as root", lines: `
			creat {}/open/file wronly,creat,excl 0644
			chown {}/open/file 1000 1001
			stat {}/open/file
			chown {}/secret 0 0
			stat {}/secret
			mkdir {}/open/dir 02775
			chown {}/open/dir 7 8
			creat {}/open/dir/file wronly,creat,excl
			stat {}/open/dir/file
			rename {}/secret {}/open/secret
			unlink {}/sticky/file`},
		{name: "ACL of a setgid file", uid: nobody, lines: `
			creat {}/open/file wronly,creat,excl 0644
			chmod {}/open/file 02755
			setfacl {}/open/file
			stat {}/open/file
			getxattr {}/open/file system.posix_acl_access
			creat {}/setgid/file wronly,creat,excl 0644
			chmod {}/setgid/file 02755
			setfacl {}/setgid/file
			stat {}/setgid/file`},
	}
}

// TestIDMapLocks: a lock is one by whatever mount it was taken, its holder is shown as the
// user that he is, and a mapping to root makes nobody an admin, nor away from it.
func TestIDMapLocks(t *testing.T) {
	needIDMap(t)
	for _, transport := range []string{"uring", "threads", "fuse"} {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport, "--idmap")
			at := idMapped(t, m.Path, swapped)
			a, b, root := stranger(t), stranger(t), agent(t)
			a.must("mkdir", filepath.Join(at, "D"))
			b.must("mkdir", m.At("E"))
			if transport != "fuse" {
				m.replace()
			}
			m.wantOwner("D", a.Pid)
			m.wantOwner("E", b.Pid)
			for _, who := range []*Agent{b, root} {
				who.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
				who.want("EBUSY", "creat", filepath.Join(at, "D/x"), "wronly,creat")
			}
			for _, who := range []*Agent{a, root} {
				who.want("EBUSY", "creat", m.At("E/x"), "wronly,creat")
				who.want("EBUSY", "creat", filepath.Join(at, "E/x"), "wronly,creat")
			}
			a.must("creat", filepath.Join(at, "D/own"), "wronly,creat")
			b.must("creat", m.At("E/own"), "wronly,creat")
			for name, want := range map[string]uint32{"D/own": 0, "E/own": nobody} {
				var st unix.Stat_t
				mustDo(t, unix.Stat(m.Back(name), &st))
				if st.Uid != want || st.Gid != want {
					t.Errorf("%s belongs to %d:%d below, want %d", name, st.Uid, st.Gid, want)
				}
			}
			for dir, l := range m.Locks() {
				if l.UID != nobody {
					t.Errorf("the holder of %s is shown with uid %d, want %d", dir, l.UID, nobody)
				}
			}
			denials, err := os.ReadFile(m.control("denials"))
			mustDo(t, err)
			for uid, want := range map[int]int{0: 2, nobody: 2} {
				if got := strings.Count(string(denials), fmt.Sprintf(`"uid":%d,`, uid)); got != want {
					t.Errorf("%d kinds of refusals to uid %d, want %d:\n%s", got, uid, want, denials)
				}
			}

			for _, ctl := range []string{m.control("ctl"), filepath.Join(at, ".stagefs/ctl")} {
				a.want("EPERM", "put", ctl, "break E because\n", "")
				b.want("EPERM", "put", ctl, "release D\n", "")
				a.want("EPERM", "put", ctl, "check\n", "")
			}
			m.wantOwner("E", b.Pid)
			root.must("put", filepath.Join(at, ".stagefs/ctl"), "break E because\n", "")
			m.wantFree("E")
			root.must("put", m.control("ctl"), "break D because\n", "")
			m.wantFree("D")
		})
	}
}

// TestIDMapPrivate: a file that nobody but its maker sees at first belongs to the user whom
// the mount says, and who is nobody but mapped to root does not get at others' lock files.
func TestIDMapPrivate(t *testing.T) {
	m, at := mountedMapped(t, swapped)
	wantRoots := func(name string) {
		t.Helper()
		var st unix.Stat_t
		mustDo(t, unix.Stat(m.Back(name), &st))
		if st.Uid != 0 || st.Gid != 0 {
			t.Errorf("%s belongs to %d:%d below, want root", name, st.Uid, st.Gid)
		}
	}
	hold := func(dir string) *Agent {
		a := agent(t)
		a.must("mkdir", m.At(dir))
		a.must("chmod", m.At(dir), "0777")
		return a
	}
	wait := func(dir string, a *Agent) (b *Agent, got func() string) {
		b = stranger(t)
		b.must("open", "h", at(dir+"/devserver"), "rdwr,creat", "0600")
		if dir == "again" {
			b.must("open", "h2", at(dir+"/devserver"), "rdwr")
		}
		got = b.Start("flockw", "h")
		m.awaitWaiters(dir, 1)
		return b, got
	}

	a := hold("candidate")
	b := stranger(t)
	name := candidateName(t, b)
	b.must("creat", at("candidate/"+name), "wronly,creat,excl")
	b.want("EEXIST", "link", at("candidate/"+name), at("candidate/devserver.lock"))
	a.mustCommand(m, "release candidate")
	b.must("link", at("candidate/"+name), at("candidate/devserver.lock"))
	m.wantOwner("candidate", b.Pid)
	wantRoots("candidate/devserver.lock")

	for _, dir := range []string{"once", "again"} {
		a = hold(dir)
		b, got := wait(dir, a)
		m.replace()
		a.mustCommand(m, "release %s", dir)
		if got := got(); got != "ok" {
			t.Errorf("who waited in %s: flock = %s, want ok", dir, got)
		}
		m.wantOwner(dir, b.Pid)
		wantRoots(dir + "/devserver")
	}

	a = hold("others")
	_, got := wait("others", a)
	a.must("open", "h", m.At("others/devserver"), "rdwr,creat", "0600")
	a.must("chown", m.At("others/devserver"), "1", "1")
	a.must("flock", "h")
	a.mustCommand(m, "release others")
	unlock(t, a)
	if got := got(); got != "EACCES" {
		t.Errorf("by a lock file that is another's: flock = %s, want EACCES", got)
	}
}

// TestIDMapOption: without the option there are no mapped mounts, and it says for whom it is.
func TestIDMapOption(t *testing.T) {
	needIDMap(t)
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	m := mount(t)
	if err := mountMapped(t, m.Path, tempDir(t), swapped); err != unix.EINVAL {
		t.Errorf("a mapped mount without --idmap: %v, want EINVAL", err)
	}
	wantRefusal(t, "64", []string{"--compat"}, "mount", "--idmap", "--compat", staticDir(t))
	if r := runCmdAs(t, stranger(t), "mount", "--idmap", staticDir(t)); !strings.HasPrefix(r, "64 ") || !strings.Contains(r, "--idmap") || !strings.Contains(r, "root") {
		t.Errorf("--idmap by an ordinary user: %q, want status 64, and whom it is for", r)
	}
}

// TestIDMapReserve: who is root on a mapped mount alone gets nothing of what ext4 keeps back
// for root.
func TestIDMapReserve(t *testing.T) {
	needIDMap(t)
	fill := func(dir string) (mib int) {
		a := agentAs(t, shift)
		a.must("open", "file", filepath.Join(idMapped(t, dir, shifted), "file"), "rdwr,creat,excl")
		for ; a.Try("pwrite", "file", "x", itoa(1<<20), itoa(mib<<20)) == "ok"; mib++ {
		}
		a.Kill()
		return mib
	}
	want := fill(newImage(t, 32, "-m", "20").static())
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		m := newImage(t, 32, "-m", "20").mount(append([]string{"--idmap"}, opts...)...)
		if got := fill(m.Path); got != want {
			t.Errorf("with options %q the file system was full after %d MiB, want %d", opts, got, want)
		}
	}
}

// TestIDMapKilled: who has taken a lock by a mapped mount keeps it when the daemon is killed,
// and is refused no more nor less by the next one.
func TestIDMapKilled(t *testing.T) {
	m, at := mountedMapped(t, swapped)
	a, b := stranger(t), stranger(t)
	a.must("mkdir", at("D"))
	a.must("mkdir", at("C"), "0755")
	a.mustCommand(m, "release C")
	if r := runCmdAs(t, a, "acquire", at("C")); !strings.HasPrefix(r, "0 ") { // which is root's outside of the mapping
		t.Errorf("acquire: %q", r)
	}
	b.must("mkdir", m.At("E"))
	m.restart(nil, "--idmap")
	m.wantOwner("C", a.Pid)
	m.wantOwner("D", a.Pid)
	m.wantOwner("E", b.Pid)
	again := idMapped(t, m.Path, swapped)
	a.must("creat", filepath.Join(again, "D/own"), "wronly,creat")
	a.want("EBUSY", "creat", filepath.Join(again, "E/x"), "wronly,creat")
	b.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
	a.want("EPERM", "put", m.control("ctl"), "break E because\n", "")
	a.Kill()
	m.awaitFree("D")
}
