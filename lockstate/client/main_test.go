//go:build linux

package client_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// static is the root of a stagefs mount, on which the examples run.
var static string

// What the first thread starts learns of its end: that is this process's own, however
// it ends.
func init() { runtime.LockOSThread() }

// TestMain mounts one for the examples, if this machine can. Elsewhere they
// only have to compile.
func TestMain(m *testing.M) {
	flag.Parse()
	unmount, err := mountStatic()
	switch {
	case err == nil:
	case os.Getenv("STAGEFS_REQUIRE") == "1":
		fmt.Fprintln(os.Stderr, "no mount for the examples:", err)
		os.Exit(1)
	default:
		fmt.Fprintln(os.Stderr, "the examples are skipped:", err)
		flag.Set("test.skip", "^Example")
		unmount = func() {}
	}
	code := m.Run()
	unmount()
	os.Exit(code)
}

func mountStatic() (unmount func(), err error) {
	if os.Geteuid() != 0 {
		return nil, os.ErrPermission
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	fuse.Close()
	base, err := os.MkdirTemp("", "stagefs-example-")
	if err != nil {
		return nil, err
	}
	bin := filepath.Join(base, "stagefs")
	static = filepath.Join(base, "static")
	unmount = func() { os.RemoveAll(base) }
	for _, cmd := range []*exec.Cmd{
		exec.Command("go", "build", "-o", bin, "../../cmd/stagefs"),
		exec.Command("mkdir", "-p", static),
	} {
		if out, err := cmd.CombinedOutput(); err != nil {
			unmount()
			return nil, fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
	}
	daemon := exec.Command(bin, "mount", "--state-dir", filepath.Join(base, "state"), static)
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // it unmounts
	said, err := os.Create(filepath.Join(base, "log"))
	if err != nil {
		unmount()
		return nil, err
	}
	defer said.Close()
	daemon.Stdout, daemon.Stderr = said, said
	if err := daemon.Start(); err != nil {
		unmount()
		return nil, err
	}
	unmount = func() {
		exec.Command(bin, "umount", "--lazy", static).Run()
		daemon.Process.Signal(syscall.SIGTERM)
		daemon.Wait()
		os.RemoveAll(base)
	}
	for range 1000 {
		if _, err := os.Stat(filepath.Join(static, ".stagefs")); err == nil {
			return unmount, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	out, _ := os.ReadFile(said.Name())
	unmount()
	return nil, fmt.Errorf("%v: no mount: %s", daemon.Args, out)
}
