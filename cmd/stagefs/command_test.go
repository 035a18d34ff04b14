//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/filestore"
)

// The test binary is also run as the program itself: with a mount that is a
// fake, see serve_test.go and daemon_test.go, or as it is, see real_test.go.
func TestMain(m *testing.M) {
	if os.Getenv(envAsk) != "" {
		main()
	}
	switch mode := os.Getenv(envFake); mode {
	case "":
		os.Exit(m.Run())
	case "real":
		main()
	default:
		os.Exit(fakeMain(mode))
	}
}

// A fakeMount is a directory in which plain files stand for a mount's control
// directory.
type fakeMount struct {
	dir      string
	out, err bytes.Buffer
}

func newFakeMount(t *testing.T, control map[string]string) *fakeMount {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, fs.ControlDir), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range control {
		if err := os.WriteFile(filepath.Join(dir, fs.ControlDir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &fakeMount{dir: dir}
}

// run runs a command line on a machine with this mount alone.
func (m *fakeMount) run(t *testing.T, args ...string) (status int) {
	t.Helper()
	m.out.Reset()
	m.err.Reset()
	c := &command{
		args: args, in: strings.NewReader(""), out: &m.out, err: &m.err,
		mount:   func(fs.Options) (server, error) { return nil, errors.New("no mounting in this test") },
		unmount: func(string, bool) error { return errors.New("no unmounting in this test") },
		mounts: func() ([]fs.MountEntry, error) {
			return []fs.MountEntry{{Path: m.dir, Source: "/src"}}, nil
		},
		find: func(path string) (string, string, error) {
			if !below(path, m.dir) {
				return "", "", fs.ErrNoMount
			}
			rel, err := filepath.Rel(m.dir, path)
			return m.dir, rel, err
		},
	}
	return c.run(context.Background())
}

// check runs a command line and compares status and output.
func (m *fakeMount) check(t *testing.T, args []string, status int, out, errs string) {
	t.Helper()
	got := m.run(t, args...)
	if got != status {
		t.Errorf("stagefs %q = %d, want %d (stderr %q)", args, got, status, m.err.String())
	}
	if !strings.Contains(m.out.String(), out) || out == "" && m.out.Len() > 0 {
		t.Errorf("stagefs %q prints %q, want %q in it", args, m.out.String(), out)
	}
	if !strings.Contains(m.err.String(), errs) || errs == "" && m.err.Len() > 0 {
		t.Errorf("stagefs %q says %q, want %q in it", args, m.err.String(), errs)
	}
}

func TestExitStatuses(t *testing.T) {
	for _, tt := range []struct {
		err    error
		status int
		text   string
	}{
		{usagef("no %s", "x"), 64, "no x"},
		{&fs.OptionError{Option: "lock name", Value: "a/b\n", Reason: "has a slash"}, 64, `--lock-name "a/b\n": has a slash`},
		{&fs.OptionError{Option: "directory", Reason: "is empty"}, 64, `directory "": is empty`},
		{&fs.ServedError{Dir: "/d", Pid: 17}, 75, "by process 17"},
		{&fs.ServedError{Dir: "/d"}, 75, "another process"},
		{&fs.OverlapError{Dir: "/d", Within: true, Other: "/", Pid: 17, Mountpoint: "/m"}, 75, "/d is inside of /, which process 17 serves already, at /m; only one of them can be served: to unmount that one, stagefs umount /m"},
		{&fs.OverlapError{Dir: "/d"}, 75, "inside of /d is another directory, which another process serves already, though it is not mounted here; only one"},
		{&fs.CopyError{Dir: "/d", Other: "/e", Pid: 17}, 75, "of /e (pid 17), with the same UUID"},
		{fs.ErrNotExist, 66, ""},
		{fs.ErrNotDirectory, 66, ""},
		{fs.ErrOnFuse, 66, ""},
		{fs.ErrReadOnly, 66, "read-write"},
		{fs.ErrMountpointBusy, 73, "another mountpoint"},
		{fs.ErrStaleMount, 73, "umount -l"},
		{fs.ErrNotTaken, 71, "umount"},
		{fs.ErrMoved, 73, "mount it again"},
		{fs.ErrNoFuse, 71, "stagefs doctor"},
		{fs.ErrHelperKilled, 71, "try again"},
		{fs.ErrNoTransport, 71, "stagefs doctor"},
		{fmt.Errorf("%w: it is another's", filestore.ErrDir), 77, "--state-dir"},
		{fmt.Errorf("%w: %w", filestore.ErrDir, unix.EROFS), 71, "--state-dir"},
		{fs.ErrStrict, 75, "--strict"},
		{fs.ErrNoMount, 69, "stagefs mount"},
		{&os.PathError{Op: "open", Path: "x", Err: unix.EACCES}, 77, ""},
		{unix.EIO, 74, ""},
		{unix.EBUSY, 75, ""},
		{unix.ENOTCONN, 69, ""},
		{unix.ENOMEM, 71, ""},
		{errors.New("bug\x1b[31m"), 70, `bug\x1b[31m`},
	} {
		status, text := explain(tt.err)
		if status != tt.status || !strings.Contains(text, tt.text) || text == "" {
			t.Errorf("explain(%v) = %d, %q, want %d with %q", tt.err, status, text, tt.status, tt.text)
		}
	}
}

func TestUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	for _, tt := range []struct {
		args      string
		status    int
		out, errs string
	}{
		{"", 64, "", "which command?"},
		{"--help", 0, "COMMANDS", ""},
		{"-h", 0, "COMMANDS", ""},
		{"help locks", 0, "--watch", ""},
		{"locks --help", 0, "--watch", ""},
		{"locks x --help", 0, "--watch", ""},
		{"version", 0, "stagefs ", ""},
		{"--version", 0, "stagefs ", ""},
		{"version x", 64, "", "too many arguments"},
		{"lokcs", 64, "", "did you mean locks?"},
		{"frobnicate", 64, "", "unknown command frobnicate;"},
		{"/d /d -o rw,dev,suid", 64, "", "needs a link"},
		{"--json", 64, "", "unknown option --json"},
		{"--help", 0, "stagefs --help | --version", ""},
		{"locks --jsn", 64, "", "did you mean --json?"},
		{"locks a b", 64, "", "too many arguments"},
		{"why", 64, "", "missing argument"},
		{"mount", 64, "", "missing argument"},
		{"mount d --depth x", 64, "", "--depth x: want a whole number"},
		{"mount d --grace x", 64, "", "--grace x: want seconds, or a duration like 1m30s"},
		{"mount d --grace=", 64, "", "want seconds"},
		{"mount d --grace 5 --unlocked maybe", 64, "", "want allow or deny"},
		{"mount d --state-dir=", 64, "", "--state-dir is empty"},
		{"mount d --log=", 64, "", "--log is empty"},
		{"doctor --state-dir=", 64, "", "--state-dir is empty"},
		{"run -E x d true", 64, "", "--conflict-exit-code x: want 0 to 255"},
		{"run -E 256 d true", 64, "", "--conflict-exit-code 256: want 0 to 255"},
		{"help nope", 64, "", "unknown command nope"},
		{"help lokcs", 64, "", "did you mean locks?"},
		{"help run mount", 64, "", "one command"},
		{"mount d --depth=-1", 64, "", "depth"},
		{"mount d --depth -1", 64, "", "depth"},
		{"mount d --depth", 64, "", "needs a value"},
		{"mount d --unlocked maybe", 64, "", "want allow or deny"},
		{"mount d --grace 0s", 64, "", "more than 0"},
		{"mount d --strict=maybe", 64, "", "strict"},
		{"mount d --state-dir d/x", 64, "", "inside of"},
		{"mount d --state-dir d", 64, "", "inside of"},
		{"mount d m --state-dir m/x", 64, "", "inside of"},
		{"mount d/x d", 64, "", "inside of"},
		{"mount -d /", 64, "", "/: the system needs that directory as it is"},
		{"mount d --log d/x", 64, "", "inside of"},
		{"mount d m --log m/x", 64, "", "inside of"},
		{"mount d --lock-name a/b", 64, "", "slash"},
		{"mount d --lock-name=", 64, "", "empty"},
	} {
		m.check(t, strings.Fields(tt.args), tt.status, tt.out, tt.errs)
	}
	m.check(t, []string{"why", ""}, 64, "", "empty")
}
