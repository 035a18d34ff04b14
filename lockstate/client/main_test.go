//go:build linux

package client_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// static is the root of a stagefs mount, on which the examples run.
var static string

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
	unmount = func() {
		exec.Command(bin, "umount", "--lazy", static).Run()
		os.RemoveAll(base)
	}
	for _, cmd := range []*exec.Cmd{
		exec.Command("go", "build", "-o", bin, "../../cmd/stagefs"),
		exec.Command("mkdir", "-p", static),
		exec.Command(bin, "mount", "-d", "--state-dir", filepath.Join(base, "state"), static),
	} {
		if out, err := cmd.CombinedOutput(); err != nil {
			unmount()
			return nil, fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
	}
	return unmount, nil
}
