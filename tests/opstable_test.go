//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// An op is one way to change something: commands of an agent, the first that
// fails being the answer. {D} is the directory that a lock may govern, {F} a
// free one beside it.
type op struct {
	name    string
	steps   string // separated by semicolons
	refused string // what a non-holder hears; "" means EBUSY (W2)
	also    string // what a holder may hear besides what a plain directory answers
	only    string // the one state in which it makes sense
}

// lockNames says how the making of the lock *name* is refused (A8).
const lockNames = "EEXIST"

// mutations are all operations of W1. The fixtures that they work on are those
// of fixtures below.
func mutations() []op {
	return []op{
		{name: "create O_EXCL", steps: "creat {D}/new wronly,creat,excl"},
		{name: "create", steps: "creat {D}/new wronly,creat"},
		{name: "create rdonly", steps: "creat {D}/new rdonly,creat"},
		{name: "open O_TRUNC", steps: "creat {D}/file wronly,trunc"},
		{name: "open O_TRUNC O_CREAT", steps: "creat {D}/file wronly,trunc,creat"},
		{name: "open O_TRUNC rdonly", steps: "creat {D}/file rdonly,trunc"},
		{name: "open wronly", steps: "put {D}/file data wronly"},
		{name: "open rdwr", steps: "put {D}/file data rdwr"},
		{name: "open append", steps: "put {D}/file data append"},
		{name: "open through symlink", steps: "creat {F}/into wronly,trunc"},
		{name: "mknod fifo", steps: "mknod {D}/new fifo"},
		{name: "mknod socket", steps: "mknod {D}/new sock"},
		{name: "mknod file", steps: "mknod {D}/new file"},
		{name: "mknod device", steps: "mknod {D}/new chr"}, // a whiteout, which everybody may make
		{name: "mkdir", steps: "mkdir {D}/new"},
		{name: "symlink", steps: "symlink target {D}/new"},
		{name: "link in", steps: "link {F}/mine {D}/new"},
		{name: "link within", steps: "link {D}/file {D}/new"},
		{name: "link out", steps: "link {D}/file {F}/new"},
		{name: "unlink", steps: "unlink {D}/file"},
		{name: "unlink symlink", steps: "unlink {D}/sym"},
		{name: "unlink fifo", steps: "unlink {D}/fifo"},
		{name: "rmdir", steps: "rmdir {D}/dir"},
		{name: "rename within", steps: "rename {D}/file {D}/new"},
		{name: "rename out", steps: "rename {D}/file {F}/new"},
		{name: "rename into", steps: "rename {F}/mine {D}/new"},
		{name: "rename over", steps: "rename {D}/file {D}/file2"},
		{name: "rename over from outside", steps: "rename {F}/mine {D}/file"},
		{name: "rename over, outside", steps: "rename {D}/file {F}/mine"},
		{name: "rename noreplace", steps: "rename {D}/file {D}/new noreplace"},
		{name: "rename noreplace into", steps: "rename {F}/mine {D}/new noreplace"},
		{name: "rename exchange within", steps: "rename {D}/file {D}/full exchange"},
		{name: "rename exchange out", steps: "rename {D}/file {F}/mine exchange"},
		{name: "rename exchange in", steps: "rename {F}/mine {D}/file exchange"},
		{name: "rename whiteout within", steps: "rename {D}/file {D}/new whiteout"},
		{name: "rename whiteout out", steps: "rename {D}/file {F}/new whiteout"},
		{name: "rename whiteout in", steps: "rename {F}/mine {D}/new whiteout"},
		{name: "rename dir out", steps: "rename {D}/full {F}/new"},
		{name: "rename dir in", steps: "rename {F}/dir {D}/new"},
		{name: "rename dir over dir", steps: "rename {F}/dir {D}/dir"},
		{name: "rename D away", steps: "rename {D} {F}/new"},
		{name: "rename D over", steps: "rename {D} {F}/dir"},
		{name: "rename D exchange", steps: "rename {F}/dir {D} exchange"},
		{name: "truncate", steps: "truncate {D}/file 3"},
		{name: "ftruncate", steps: "open x {D}/file rdwr;ftruncate x 3;close x"},
		{name: "chmod", steps: "chmod {D}/file 0600"},
		{name: "fchmod", steps: "open x {D}/file rdonly;fchmod x 0600;close x"},
		{name: "chmod D", steps: "chmod {D} 0700"},
		{name: "chown", steps: "chown {D}/file 1 1"},
		{name: "chown to nobody new", steps: "chown {D}/file -1 -1"},
		{name: "chown symlink", steps: "chown {D}/sym 1 1"},
		{name: "chown D", steps: "chown {D} 1 1"},
		{name: "utimens", steps: "utimens {D}/file 1000000000"},
		{name: "utimens now", steps: "utimens {D}/file"},
		{name: "utimens D", steps: "utimens {D} 1000000000"},
		{name: "setxattr", steps: "setxattr {D}/file user.new value"},
		{name: "setxattr D", steps: "setxattr {D} user.new value"},
		{name: "removexattr", steps: "removexattr {D}/file user.old"},
		{name: "setfacl", steps: "setfacl {D}/file"},
		{name: "setfacl default D", steps: "setfacl {D} default"},
		{name: "removexattr acl", steps: "removexattr {D}/acl system.posix_acl_access"},
		{name: "fallocate", steps: "open x {D}/file rdwr;fallocate x 0 0 100;close x"},
		{name: "punch hole", steps: "open x {D}/file rdwr;fallocate x 3 0 5;close x"},
		{name: "copy_file_range", steps: "open x {D}/file wronly;copyrange {F}/mine x;close x"},
		{name: "O_TMPFILE", steps: "open x {D} tmpfile,rdwr;close x"},
		{name: "O_TMPFILE linked", steps: "open x {D} tmpfile,rdwr;linkfd x {D}/new;close x"},
		{name: "O_TMPFILE from outside", steps: "open x {F} tmpfile,rdwr;linkfd x {D}/new;close x"},
		{name: "FS_IOC_SETFLAGS", steps: "setflags {D}/file"},
		{name: "FS_IOC_SETFLAGS D", steps: "setflags {D}"},

		{name: "lock name O_EXCL", steps: "creat {D}/devserver.lock wronly,creat,excl", refused: lockNames},
		{name: "lock name mknod", steps: "mknod {D}/devserver.lock file", refused: lockNames},
		{name: "lock name mkdir", steps: "mkdir {D}/devserver.lock", refused: lockNames},
		{name: "lock name symlink", steps: "symlink 123@host {D}/devserver.lock", refused: lockNames},
		{name: "lock name link", steps: "link {F}/mine {D}/devserver.lock", refused: lockNames},
		{name: "lock name rename", steps: "rename {F}/mine {D}/devserver.lock", refused: lockNames},
		{name: "lock name rename noreplace", steps: "rename {F}/mine {D}/devserver.lock noreplace", refused: lockNames},

		{name: "lock file O_EXCL again", steps: "creat {D}/devserver wronly,creat,excl", only: "explicit", refused: lockNames},
		{name: "lock file unlink", steps: "unlink {D}/devserver", only: "explicit"},
		{name: "lock file rename away", steps: "rename {D}/devserver {F}/new", only: "explicit"},
		{name: "lock file rename within", steps: "rename {D}/devserver {D}/new", only: "explicit"},
		{name: "lock file rename over", steps: "rename {F}/mine {D}/devserver", only: "explicit", refused: "EEXIST|EBUSY"},
		{name: "lock file exchange", steps: "rename {F}/mine {D}/devserver exchange", only: "explicit", refused: "EEXIST|EBUSY"},
		{name: "lock file link away", steps: "link {D}/devserver {F}/new", only: "explicit"},
		{name: "lock file chmod", steps: "chmod {D}/devserver 0600", only: "explicit"},
		{name: "lock file utimens", steps: "utimens {D}/devserver 1", only: "explicit"},
		{name: "lock file truncate", steps: "truncate {D}/devserver 1", only: "explicit", refused: "ok|EBUSY"},
		{name: "lock file O_TRUNC", steps: "creat {D}/devserver wronly,trunc", only: "explicit", refused: "ok|EBUSY"}, // A10
	}
}

// ancestorOps work on {A}, {A}/mid and {A}/mid/D, of which only the last is
// locked: a lock beneath.
func ancestorOps() []op {
	return []op{
		{name: "rename parent", steps: "rename {A}/mid {A}/new"},
		{name: "rename grandparent", steps: "rename {A} {F}/new"},
		{name: "rename parent exchange", steps: "rename {A}/mid {F}/dir exchange"},
		{name: "rename parent, exchange from the other side", steps: "rename {F}/dir {A}/mid exchange"},
		{name: "rename parent whiteout", steps: "rename {A}/mid {A}/new whiteout"},
		{name: "rename over parent", steps: "rename {F}/dir {A}/mid"},
		{name: "rmdir parent", steps: "rmdir {A}/mid"},
		{name: "rmdir grandparent", steps: "rmdir {A}"},
	}
}

// beneathFree are operations on the parent that a lock beneath leaves free.
func beneathFree() []op {
	return []op{
		{name: "create beside", steps: "creat {A}/mid/new wronly,creat,excl"},
		{name: "mkdir beside", steps: "mkdir {A}/mid/new"},
		{name: "unlink beside", steps: "unlink {A}/mid/file"},
		{name: "rename beside", steps: "rename {A}/mid/file {A}/mid/new"},
		{name: "chmod parent", steps: "chmod {A}/mid 0711"},
		{name: "utimens parent", steps: "utimens {A}/mid 1000000000"},
	}
}

// do runs the steps of an op below base and tells its answer.
func (o op) do(a *Agent, base string, dir string) string {
	a.t.Helper()
	names := strings.NewReplacer("{D}", filepath.Join(base, dir), "{F}", filepath.Join(base, "F"), "{A}", filepath.Join(base, "A"))
	answer := "ok"
	for step := range strings.SplitSeq(o.steps, ";") {
		words := strings.Fields(step)
		if answer != "ok" && words[0] != "close" {
			continue
		}
		for i := range words {
			words[i] = names.Replace(words[i])
		}
		if got := a.Try(words...); answer == "ok" {
			answer = got
		}
	}
	return answer
}

// fixtures fills a directory with one of each.
func fixtures(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"file", "file2", "acl", "dir", "full", "sym", "fifo"} {
		fixture(t, dir, name)
	}
}

// fixtures fills {D} with what the op works on, and a file.
func (o op) fixtures(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"file", "file2", "acl", "dir", "full", "sym", "fifo"} {
		if name == "file" || o.uses("{D}/"+name) {
			fixture(t, dir, name)
		}
	}
}

// uses reports whether a step has that name.
func (o op) uses(name string) bool {
	return slices.Contains(strings.FieldsFunc(o.steps, func(r rune) bool { return r == ' ' || r == ';' }), name)
}

func fixture(t *testing.T, dir, name string) {
	t.Helper()
	at := filepath.Join(dir, name)
	switch name {
	case "dir":
		openDir(t, at)
	case "full":
		openDir(t, at)
		mustDo(t, os.WriteFile(filepath.Join(at, "file"), []byte("deep"), 0o644))
	case "sym":
		mustDo(t, os.Symlink("file", at))
	case "fifo":
		mustDo(t, unix.Mkfifo(at, 0o666))
	default:
		mustDo(t, os.WriteFile(at, []byte("the old content of "+name), 0o666))
		mustDo(t, os.Chmod(at, 0o666))
	}
	switch name {
	case "file":
		mustDo(t, unix.Setxattr(at, "user.old", []byte("value"), 0))
	case "acl":
		mustDo(t, unix.Setxattr(at, "system.posix_acl_access", accessACL(), 0))
	}
}

// neighbour fills {F}, the free directory, in the same way.
func (o op) neighbour(t *testing.T, dir, subject string) {
	t.Helper()
	openDir(t, dir)
	mine := filepath.Join(dir, "mine")
	mustDo(t, os.WriteFile(mine, []byte("mine, and free"), 0o666))
	mustDo(t, os.Chmod(mine, 0o666))
	if o.uses("{F}/dir") {
		openDir(t, filepath.Join(dir, "dir"))
	}
	if o.uses("{F}/into") {
		mustDo(t, os.Symlink(fmt.Sprintf("../%s/file", subject), filepath.Join(dir, "into")))
	}
}

// openDir makes a directory that everyone may write to.
func openDir(t *testing.T, dir string) {
	t.Helper()
	mustDo(t, os.MkdirAll(dir, 0o777))
	mustDo(t, os.Chmod(dir, 0o777))
}
