//go:build linux

package procid_test

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

const statTail = " 3700 3731 2608 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 183045 43012096 3189 18446744073709551615 1 1 0 0 0 0 0 4096 1256 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 256\n"

// The name is the process's to choose, and the line still reads right.
func TestParseStat(t *testing.T) {
	for _, name := range []string{"cat", "", "a b", ") Z 1 1", "((", "\n", ")"} {
		line := "3734 (" + name + ") S" + statTail
		state, ppid, start, code, err := procid.ParseStat([]byte(line))
		if err != nil || state != 'S' || ppid != 3700 || start != 183045 || code != 256 {
			t.Errorf("ParseStat(%q) = %c, %d, %d, %d, %v, want S, 3700, 183045, 256", line, state, ppid, start, code, err)
		}
	}
	for _, line := range []string{"", "1", "1 (a", "1 (a)", "1 (a) S 1 2 3\n", "1 (a) S x" + statTail, strings.Repeat(")", 3)} {
		if _, _, _, _, err := procid.ParseStat([]byte(line)); err == nil {
			t.Errorf("ParseStat(%q) did not fail", line)
		}
	}
}

func TestWaitsAt(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	for end := time.Now().Add(10 * time.Second); !strings.Contains(procid.WaitsAt(pid), "sleep"); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/wchan")
			t.Fatalf("WaitsAt = %q, the file has %q, %v; want the function of nanosleep(2)", procid.WaitsAt(pid), b, err)
		}
	}
	cmd.Process.Kill()
	cmd.Wait()
	if at := procid.WaitsAt(pid); at != "" {
		t.Errorf("WaitsAt of what is gone = %q", at)
	}
}

func TestParseStatus(t *testing.T) {
	const text = "Name:\ta\\nTgid:\t9\nState:\tS (sleeping)\nTgid:\t12\nPid:\t13\nUid:\t1000\t1001\t1002\t1003\nNSpid:\t13\t7\t1\n"
	name, tgid, euid, nsPid, err := procid.ParseStatus([]byte(text))
	if err != nil || tgid != 12 || euid != 1001 || nsPid != 1 || !strings.HasPrefix(name, "a\\n") {
		t.Errorf("ParseStatus = %q, %d, %d, %d, %v, want name a\\n…, 12, 1001, 1", name, tgid, euid, nsPid, err)
	}
	for _, text := range []string{"", "Name:\ta\n", "Tgid:\tx\n", "Tgid:\t1\nUid:\t1\n"} {
		if _, _, _, _, err := procid.ParseStatus([]byte(text)); err == nil {
			t.Errorf("ParseStatus(%q) did not fail", text)
		}
	}
}

// A process that has ended has no memory, and is known to have none until it is reaped.
func TestHasMemory(t *testing.T) {
	want := func(tid int, has, known bool) {
		t.Helper()
		if gotHas, gotKnown := procid.HasMemory(tid); gotHas != has || gotKnown != known {
			t.Errorf("HasMemory(%d) = %v, %v, want %v, %v", tid, gotHas, gotKnown, has, known)
		}
	}
	h := start(t, "deadleader 0")
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(h.numbers(t)[0]) + "/task")
	if err != nil || len(threads) < 2 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		want(tid, tid != h.pid(), true) // its first thread is a zombie
	}
	h.stdin.Close()
	zombie(t, h.pid())
	want(h.pid(), false, true)
	h.Wait()
	want(h.pid(), false, false)
}

// Only what a service manager decides counts: resource limits do not.
func TestParseCgroup(t *testing.T) {
	for text, want := range map[string]string{
		"0::/user.slice/session-1.scope\n":                           "/user.slice/session-1.scope",
		"9:name=systemd:/a:b\n4:memory:/x\n1:cpu,cpuacct:/\n0::/c\n": "/a:b/c",
		"4:memory:/x\n": "",
		"":              "",
	} {
		if got := procid.ParseCgroup([]byte(text)); strings.ReplaceAll(got, "\n", "") != want {
			t.Errorf("ParseCgroup(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestIsReaperName(t *testing.T) {
	for name, want := range map[string]bool{
		"systemd": true, "init": true, "tini": true, "dumb-init": true, "catatonit": true, "conmon": true,
		"containerd-shim": true, "s6-svscan": true, "s6-supervise": true, "runsv": true, "runsvdir": true, "supervisord": true, "kthreadd": true, "kworker/u8:3": true,
		"sshd": true, "sshd-session": true, "cron": true, "crond": true, "atd": true, "smbd": true, "vsftpd": true, "proftpd": true,
		"bash": false, "make": false, "systemd-run": false, "initdb": false, "python3": false, "crontab": false, "ssh": false, "rsync": false, "": false,
	} {
		if got := procid.IsReaperName(name); got != want {
			t.Errorf("IsReaperName(%q) = %v, want %v", name, got, want)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("3734 (cat) S" + statTail))
	if b, err := os.ReadFile("/proc/self/stat"); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, ppid, _, _, err := procid.ParseStat(b); err != nil && ppid != 0 {
			t.Errorf("ParseStat(%q) = ppid %d and %v", b, ppid, err)
		}
	})
}

func FuzzParseStatus(f *testing.F) {
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, tgid, _, _, err := procid.ParseStatus(b); err == nil && tgid <= 0 {
			t.Errorf("ParseStatus(%q) = tgid %d", b, tgid)
		}
	})
}

func FuzzParseCgroup(f *testing.F) {
	f.Add([]byte("9:name=systemd:/a\n0::/b\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got := procid.ParseCgroup(b); len(got) > len(b) {
			t.Errorf("ParseCgroup(%q) = %q: longer than what it was read from", b, got)
		}
	})
}

func TestStatusField(t *testing.T) {
	s := procid.Status("Name:\tx y\nUid:\t0\t1\t2\t3\nNSpid:\t7\nGroups:\t\nPid:\t9")
	for name, want := range map[string]string{"Name": "x y", "Uid": "0\t1\t2\t3", "Pid": "9", "Groups": "", "id": "", "NSpgid": ""} {
		if got := s.Field(name); got != want {
			t.Errorf("Field(%s) = %q, want %q", name, got, want)
		}
	}
	if s, err := procid.ReadStatus(os.Getpid()); err != nil || s.Field("PPid") != strconv.Itoa(os.Getppid()) {
		t.Errorf("of this process: %v, parent %q, want %d", err, s.Field("PPid"), os.Getppid())
	}
}
