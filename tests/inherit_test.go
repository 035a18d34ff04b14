//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// startedBy has a shell start the daemon, with what it has open and its limits.
func (m *Mount) startedBy(script string, opts ...string) {
	m.t.Helper()
	m.cmdBin = filepath.Join(tempDir(m.t), "starter")
	writeProgram(m.t, m.cmdBin, []byte("#!/bin/bash\n"+script+"\nexec "+stagefsBin()+" \"$@\"\n"))
	m.start(opts)
	m.t.Cleanup(m.stop)
}

// TestMountInherits: what whoever starts a daemon has open, and his limits on files,
// CPU time and memory, are not the daemon's.
func TestMountInherits(t *testing.T) {
	need(t, "root", "fuse")
	for name, opts := range map[string]string{"foreground": "", "background": "-d", "supervised": "--supervise", "supervised in the background": "-d --supervise"} {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir+".mnt")
			busy := filepath.Join(tempDir(t), "busy")
			mustDo(t, os.WriteFile(busy, nil, 0o666))
			m.startedBy("ulimit -S -f 100 -t 1000 -v 3000000 -d 2000000; exec 3<"+busy+" 4>>"+busy+" 9<"+busy, append(strings.Fields(opts), "--no-passthrough")...)
			eventually(t, "the mount answers", func() bool {
				_, err := os.ReadFile(m.control("version"))
				return err == nil
			})
			for pid := m.daemon(); ; {
				fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
				mustDo(t, err)
				for _, fd := range fds {
					if at, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); at == busy {
						t.Errorf("process %d has %s as descriptor %s", pid, at, fd.Name())
					}
				}
				parent := parentOf(t, pid)
				if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", parent)); exe != stagefsBin() {
					break
				}
				pid = parent
			}
			limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", m.daemon()))
			mustDo(t, err)
			for _, limit := range []string{"cpu time", "file size", "address space", "data size"} {
				_, rest, _ := strings.Cut(string(limits), "Max "+limit)
				line, _, _ := strings.Cut(rest, "\n")
				if strings.Count(line, "unlimited") != 2 {
					t.Errorf("the daemon has a limit on %s: %s", limit, line)
				}
			}
			if r := sh(t, m.Path, "dd if=/dev/zero of=f bs=1k count=200 && test $(stat -c %s f) = 204800"); r.Status != 0 {
				t.Errorf("a file of 200 KiB: %v", r)
			}
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Error(r)
			}
			eventually(t, "the supervisor ends", m.dead)
		})
	}
}

// TestMountInheritsLog: a log that is another program's input stays so.
func TestMountInheritsLog(t *testing.T) {
	need(t, "root", "fuse")
	for name, opts := range map[string]string{"foreground": "", "supervised in the background": "-d --supervise"} {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			said := filepath.Join(tempDir(t), "said")
			m.startedBy("exec "+stagefsBin()+" mount --log >(cat >"+said+") \"${@:2}\"", strings.Fields(opts)...)
			eventually(t, "the log comes", func() bool {
				b, _ := os.ReadFile(said)
				return strings.Contains(string(b), "msg=serving")
			})
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Error(r)
			}
			eventually(t, "the supervisor ends", m.dead)
		})
	}
}

// TestMountInheritsLimit: a limit that an ordinary user cannot raise is told of.
func TestMountInheritsLimit(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	dir := staticDir(t)
	mustDo(t, os.Chown(dir, nobody, nobody))
	m := newMount(t, dir, dir)
	mustDo(t, os.Chown(filepath.Dir(m.State), nobody, nobody))
	m.user = nobody
	m.startedBy("ulimit -f 100 -v 3000000")
	eventually(t, "the daemon serves", func() bool { return strings.Contains(m.Log(), "stagefs: serving") })
	for _, limit := range []string{"102400 bytes", "3072000000 bytes"} {
		if !strings.Contains(m.Log(), limit) {
			t.Errorf("no warning of a limit of %s", limit)
		}
	}
}
