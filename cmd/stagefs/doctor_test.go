//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeMachine makes a machine of the given files.
func fakeMachine(t *testing.T, euid int, files map[string]string) machine {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return machine{root: root, euid: euid}
}

func TestMachine(t *testing.T) {
	kernel := func(v string) map[string]string { return map[string]string{"proc/sys/kernel/osrelease": v} }
	uring := func(v string) map[string]string {
		return map[string]string{"sys/module/fuse/parameters/enable_uring": v}
	}
	for _, tt := range []struct {
		name  string
		euid  int
		files map[string]string
		check func(machine) finding
		want  string
	}{
		{"new kernel", 0, kernel("6.18.4-x\n"), machine.checkKernel, statusOK},
		{"5.10", 0, kernel("5.10.0-8-amd64"), machine.checkKernel, statusOK},
		{"5.9", 0, kernel("5.9.16"), machine.checkKernel, statusFail},
		{"4.19", 0, kernel("4.19.0"), machine.checkKernel, statusFail},
		{"fuse", 0, map[string]string{"proc/filesystems": "nodev\tproc\n\text4\nnodev\tfuse\n"}, machine.checkFuse, statusOK},
		{"only fuseblk", 0, map[string]string{"proc/filesystems": "\tfuseblk\n"}, machine.checkFuse, statusFail},
		{"a file for the device", 0, map[string]string{"dev/fuse": ""}, machine.checkDevice, statusFail},
		{"a directory for the device", 0, map[string]string{"dev/fuse/x": ""}, machine.checkDevice, statusFail},
		{"no device", 0, nil, machine.checkDevice, statusFail},
		{"root", 0, map[string]string{"proc/self/status": "CapEff:\t000001ffffffffff\n"}, machine.checkUser, statusOK},
		{"root in a container", 0, map[string]string{"proc/self/status": "CapEff:\t00000000a80425fb\n"}, machine.checkUser, statusFail},
		{"user", 1000, nil, machine.checkUser, statusWarn},
		{"allow_other", 1000, map[string]string{"etc/fuse.conf": "# x\n user_allow_other\n"}, machine.checkAllowOther, statusOK},
		{"allow_other in a comment", 1000, map[string]string{"etc/fuse.conf": "#user_allow_other\n"}, machine.checkAllowOther, statusWarn},
		{"no fuse.conf", 1000, nil, machine.checkAllowOther, statusWarn},
		{"io_uring", 0, uring("Y\n"), machine.checkUring, statusOK},
		{"io_uring off", 0, uring("N\n"), machine.checkUring, statusNote},
		{"no io_uring", 0, nil, machine.checkUring, statusNote},
		{"no timeout", 0, map[string]string{"proc/sys/fs/fuse/max_request_timeout": "0\n"}, machine.checkTimeout, statusOK},
		{"old kernel without timeouts", 0, nil, machine.checkTimeout, statusOK},
		{"a timeout", 0, map[string]string{"proc/sys/fs/fuse/default_request_timeout": "60\n"}, machine.checkTimeout, statusWarn},
		{"the longest timeout", 0, map[string]string{"proc/sys/fs/fuse/max_request_timeout": "60\n"}, machine.checkTimeout, statusWarn},
	} {
		if got := tt.check(fakeMachine(t, tt.euid, tt.files)); got.Status != tt.want {
			t.Errorf("%s: %+v, want %s", tt.name, got, tt.want)
		} else if got.Status == statusFail && got.Fix == "" {
			t.Errorf("%s: %+v has no fix", tt.name, got)
		}
	}
}

func TestCheckDirectory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir:                         statusOK,
		file:                        statusFail,
		filepath.Join(dir, "gone"):  statusFail,
		filepath.Join(file, "sub"):  statusFail,
		filepath.Join(dir, "x\x1b"): statusFail,
	} {
		if got, _ := checkDirectory(path); got[0].Status != want {
			t.Errorf("checkDirectory(%q) = %+v, want %s first", path, got, want)
		}
	}
	m := machine{euid: os.Geteuid()}
	for path, want := range map[string]string{
		filepath.Join(dir, "new", "deep"): statusOK,
		filepath.Join(file, "sub"):        statusFail,
		"/proc/none":                      statusFail,
		"/proc":                           statusFail,
	} {
		if got := m.checkStateDir(path, ""); got.Status != want {
			t.Errorf("checkStateDir(%q) = %+v, want %s", path, got, want)
		}
	}
	for backing, want := range map[string]string{dir: statusFail, filepath.Join(dir, "static"): statusOK} {
		if got := m.checkStateDir(filepath.Join(dir, "state"), backing); got.Status != want {
			t.Errorf("checkStateDir beside %q = %+v, want %s", backing, got, want)
		}
	}
}

func TestDoctor(t *testing.T) {
	m := newFakeMount(t, nil)
	if status := m.run(t, "doctor", "--json", "/no/such/dir"); status != 69 {
		t.Errorf("doctor of a missing directory = %d, want 69", status)
	}
	var got struct {
		OK     bool
		Checks []finding
	}
	if err := json.Unmarshal(m.out.Bytes(), &got); err != nil || got.OK || len(got.Checks) < 8 {
		t.Errorf("doctor --json = %+v, %v", got, err)
	}
	const hint = "give a directory to have it tried"
	given := []string{"doctor", t.TempDir()}
	if m.run(t, given...); m.out.Len() == 0 || strings.Contains(m.out.String(), hint) {
		t.Errorf("doctor of a directory prints %q", m.out.String())
	}
	if m.run(t, given[:1]...); m.out.Len() == 0 {
		t.Error("doctor prints nothing")
	}
}
