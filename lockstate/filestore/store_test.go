package filestore_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// Run as another process, the test binary opens a store, reserves a block and
// waits to be killed.
const envChild = "FILESTORE_TEST_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envChild); dir != "" {
		childMain(dir)
	}
	os.Exit(m.Run())
}

func childMain(dir string) {
	s, err := filestore.Open(dir, filestore.Options{Key: "key"})
	var held *filestore.HeldError
	switch {
	case errors.As(err, &held):
		fmt.Println("held", held.Pid)
		os.Exit(0)
	case err != nil:
		fmt.Println("error", err)
		os.Exit(1)
	}
	next := s.Tokens() + 100
	if err := s.Reserve(next); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("mark", next)
	time.Sleep(time.Minute)
	os.Exit(1)
}

// child starts another process on dir, and returns the first line it says.
func child(t *testing.T, dir string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envChild+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, _ := bufio.NewReader(out).ReadString('\n')
	return cmd, strings.TrimSpace(line)
}

func open(t *testing.T, dir string) *filestore.Store {
	t.Helper()
	s, err := filestore.Open(dir, filestore.Options{Key: "key"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestOneProcessABacking(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)

	if _, got := child(t, dir); got != fmt.Sprintf("held %d", os.Getpid()) {
		t.Errorf("second process says %q, want held %d", got, os.Getpid())
	}
	if _, err := filestore.Open(dir, filestore.Options{Key: "key"}); !errors.As(err, new(*filestore.HeldError)) {
		t.Errorf("Open twice in one process = %v, want a HeldError", err)
	}
	other, err := filestore.Open(dir, filestore.Options{Key: "other"})
	if err != nil {
		t.Fatalf("Open of another backing = %v", err)
	}
	other.Close()

	if err := s.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close() = %v", err)
	}
	if _, got := child(t, dir); got != "mark 100" {
		t.Errorf("process after Close says %q, want mark 100", got)
	}
}

func TestKillFreesAndMarkStays(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		cmd, got := child(t, dir)
		if want := fmt.Sprintf("mark %d", (i+1)*100); got != want {
			t.Fatalf("process %d says %q, want %q", i, got, want)
		}
		_, err := filestore.Open(dir, filestore.Options{Key: "key"})
		var held *filestore.HeldError
		if !errors.As(err, &held) || held.Pid != cmd.Process.Pid {
			t.Fatalf("Open beside the process = %v, want one that names pid %d", err, cmd.Process.Pid)
		}
		cmd.Process.Kill()
		cmd.Wait()
	}
	s := open(t, dir)
	if got := s.Tokens(); got != 300 {
		t.Errorf("Tokens() = %d, want 300", got)
	}
	if got := s.Warnings(); len(got) != 0 {
		t.Errorf("Warnings() = %q, want none", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, key := range []string{"", "a/b", "../x", ".x", "a\x00"} {
		if s, err := filestore.Open(dir, filestore.Options{Key: key}); err == nil {
			s.Close()
			t.Errorf("Open with key %q: no error", key)
		}
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := filestore.Open(file, filestore.Options{Key: "key"}); err == nil {
		t.Error("Open in a file: no error")
	}
	shared := filepath.Join(dir, "shared")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := filestore.Open(shared, filestore.Options{Key: "key"}); err == nil {
		t.Error("Open in a directory that everyone may write: no error")
	}
}

func TestOpenMakesDirPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	open(t, dir)
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o700 {
		t.Errorf("mode of the state directory = %o, want 700", got)
	}
}

func TestDefaultDir(t *testing.T) {
	got, err := filestore.DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if got != "/var/lib/stagefs" {
			t.Errorf("DefaultDir() = %q as root", got)
		}
		return
	}
	t.Setenv("XDG_STATE_HOME", "/x/y")
	if got, _ := filestore.DefaultDir(); got != "/x/y/stagefs" {
		t.Errorf("DefaultDir() = %q, want /x/y/stagefs", got)
	}
	t.Setenv("XDG_STATE_HOME", "relative")
	t.Setenv("HOME", "/h")
	if got, _ := filestore.DefaultDir(); got != "/h/.local/state/stagefs" {
		t.Errorf("DefaultDir() = %q, want /h/.local/state/stagefs", got)
	}
}

// A lock file that another one has taken the place of, from a backup perhaps, is locked
// within two seconds: whoever opens the store then is refused.
func TestLockFileExchanged(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	name := filepath.Join(dir, "key.lock")
	if err := os.WriteFile(name+".copy", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".copy", name); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if text, _ := os.ReadFile(name); len(text) > 0 {
			break // it has the pid
		}
		if time.Now().After(end) {
			t.Fatal("nobody has locked the new file")
		}
	}
	var held *filestore.HeldError
	if s, err := filestore.Open(dir, filestore.Options{Key: "key"}); !errors.As(err, &held) {
		if err == nil {
			s.Close()
		}
		t.Errorf("another Open = %v, want a HeldError", err)
	}
}
