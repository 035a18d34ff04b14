//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestR5AttackKernel: what a program takes that the kernel has started, as it does for a
// core dump, ends with it. Its parent is a thread of the kernel, which lives for ever.
func TestR5AttackKernel(t *testing.T) {
	needKernelsRoot(t)
	m := mount(t)
	dir, script := tempDir(t), filepath.Join(tempDir(t), "empty")
	for _, how := range []string{"mkdir", "create"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			const hierarchy = "none,name=stagefs-test"
			if err := syscall.Mount("none", dir, "cgroup", 0, hierarchy); err != nil {
				t.Skip(err)
			}
			defer syscall.Unmount(dir, syscall.MNT_DETACH)
			openDir(t, m.Back("F"))
			do := map[string]string{"mkdir": "mkdir D", "create": "set -C; : >F/devserver"}[how]
			text := fmt.Sprintf("#!/bin/sh\nexec >'%s.said'; cd '%s'; [ -e .stagefs/ctl ] || { echo sees no mount; exit; }; %s; echo $PPID $?; exit 0\n", script, m.Path, do)
			writeProgram(t, script, []byte(text))
			mustDo(t, os.WriteFile(filepath.Join(dir, "release_agent"), []byte(script), 0))
			group := filepath.Join(dir, how)
			mustDo(t, os.Mkdir(group, 0o755))
			defer os.Remove(group)
			mustDo(t, os.WriteFile(filepath.Join(group, "notify_on_release"), []byte("1"), 0))
			if r := sh(t, group, "sh -c 'echo $$ >cgroup.procs'"); r.Status != 0 {
				t.Fatal(r)
			}
			said := ""
			eventually(t, "the kernel has started the script", func() bool {
				b, _ := os.ReadFile(script + ".said")
				said = string(b)
				return said != ""
			})
			mustDo(t, os.Remove(script+".said"))
			if said != "2 0\n" {
				t.Skipf("its parent and what it did: %q", said)
			}
			m.awaitFree("D")
			m.awaitFree("F")
		})
	}
}

// needKernelsRoot skips a test where paths lead elsewhere for what the kernel starts, as in a
// container: that is in the mount namespace of the kernel's threads.
func needKernelsRoot(t *testing.T) {
	t.Helper()
	name, _ := os.ReadFile("/proc/2/comm")
	kernels, err := os.Readlink("/proc/2/ns/mnt")
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	if string(name) != "kthreadd\n" || err != nil || kernels != ours {
		t.Skip("what the kernel starts is in another mount namespace")
	}
}
