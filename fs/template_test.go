package fs

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// A9: the names that the real programs make, and names that builds have.
func TestMayBeCandidate(t *testing.T) {
	fs := &FS{}
	fs.setNames([]string{"devserver.lock", "m.NFSLock", "nova-*"}, nil, []string{"*.cand"})
	for name, want := range map[string]bool{
		"vm-7f3a2b40.1234-5678901234567": true,
		"vm-7f3a2b40.12345678901234567":  true,
		"build-7.example.org-ab.99":      true,
		"vm.12345678901234567":           true,
		"build-7.example.org.1234-56789": true,
		".lk29544fvm":                    true,
		".lk123456789avm":                true,
		"_iNH._gZArB.vm":                 true,
		"_Y.q7ZArB.vm":                   true,
		"_abcd,q7ZArB.build.example.org": true,
		"_3O%mhlBrB.vm":                  true,
		"app-1.0":                        true, // who makes it is to tell
		"mine.cand":                      true,
		"vm.7f3a2b401740-1234":           true,
		"vm-7f3a2b40-1f2a3b4c.1234":      true,
		"vm.1234_rlock_1_2_3.lck":        true,
		".vm_1234_rlock_1_2_3.lck":       true,
		".vm.org_1234_a_b.rb_1_2_3.lck":  true,
		"shlock1234":                     true,
		startedOn() + ".1234":            true,
		"devserver.lock|vm|1234|5":       true,
		"devserver.lock.vm.org.1234.0":   true,
		"devserver.lock.1234":            true,
		"devserver.lock.v.6b09.6b092f84": false,

		"devserver.lock.v.6b092f84.00001234": true,
		"nova-a.host.1234":                   true,
		"m.tmp.1.1234.2":                     true,
		"devserver." + startedOn() + ".1234": true,

		"image.bin":            false,
		"libfoo.so.1":          false,
		"app.20261125":         false,
		".12345678901234567":   false,
		"libfoo-1.2.so":        false,
		"chrome-r10.zip":       false,
		"go1.26-amd64.tar.gz":  false,
		".lock":                false,
		".lkml":                false,
		"_pytest":              false,
		"_build.stamp":         false,
		"__init__.py":          false,
		"-ab.1":                false,
		"host-ab.":             false,
		"host-xyz.12":          false,
		"devserver":            false,
		"_button.module.css":   false,
		"_io.mod:le.css":       false,
		"a-1.2-3-4":            false,
		"":                     false,
		"_":                    false,
		"kernel-5.10.tar.xz":   false,
		"delta-deadbeef.patch": false,

		"app-3f2a9c1." + strconv.FormatInt(time.Now().UnixNano(), 10):  false,
		"app-3f2a9c1." + strconv.FormatInt(time.Now().UnixMicro(), 10): false,
		"app-3f2a9c1." + strconv.FormatInt(time.Now().UnixMilli(), 10): false,
		"app-3f2a9c1." + strconv.FormatInt(time.Now().Unix(), 10):      false,
		"app-3f2a9c1." + time.Now().Format("200601021504"):             false,
		"app-3f2a9c1." + time.Now().Format("20060102150405"):           false,
		"app." + time.Now().Format("20060102150405.000")[:14] + "123":  false,

		"vm-7f3a2b40.1" + strconv.FormatInt(time.Now().UnixNano(), 10): true,
		"vm-7f3a2b40.179-5762827123456789":                             true,
		"vm.1234":                                                      startedOn() == "vm",
		"devserver.vm.1234":                                            startedOn() == "vm",
		"devserver.1234":                                               false,
		"devserver.lock.bak":                                           false,
		"a|b|1234|5":                                                   false,
		"n.tmp.1.1234.2":                                               false,
		"shlock":                                                       false,
		"shlock.h":                                                     false,
		"app.1234_b.lck":                                               false,
		"app_1_2_3.lck":                                                false,
		".app_1_2_3.lck":                                               false,
		"._12_b_1_2_3.lck":                                             false,
		"libc-2.36.so.6":                                               false,
		"app.4f3c-1":                                                   false,
	} {
		if got := fs.mayBeCandidate(name); got != want {
			t.Errorf("mayBeCandidate(%q) = %t, want %t", name, got, want)
		}
	}
}

// A name is believed to be somebody's own only with his pid: the file is kept from
// all others, and removed with its creator.
func TestTellsPid(t *testing.T) {
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		pid  int
		want bool
	}{
		{here + "-7f3a.4711-123", 4711, true},
		{here + "-7f3a.4711123", 4711, true},
		{here + "-7f3a.4712-123", 4711, false},
		{here + "-7f3a.47-11-123", 4711, false},
		{here + "-7f3a.4711", 4711, false},
		{here + "-7f3a2b41.4711", 4711, true},
		{here + "-7f3a2b41.4712", 4711, false},
		{here + "-7f3a2b40-1f2a3b41.4711", 4711, true},
		{"other-7f3a2b40.4711", 4711, true},
		{"app-7f3a2b41.4711", 4711, false}, // a commit
		{here + ".7f3a2b401741-4711", 4711, true},
		{"other.7f3a2b401740-4711", 4711, true},
		{"other.7f3a2b401740-4711", 471, false},
		{"app.7f3a2b4-4711", 4711, false},
		{here + ".4711", 4711, true},
		{here + ".4711", 471, false},
		{"other.4711", 4711, false},
		{here + ".4711_rlock_1_2_3.lck", 4711, true},
		{here + ".4711_rlock_1_2_3.lck", 1, false},
		{"." + here + "_4711_rlock_1_2_3.lck", 4711, true},
		{"." + here + "_4711_rlock_1_2_3.lck", 1, false},
		{"shlock4711", 4711, true},
		{"shlock4711", 471, false},
		{"other-7f3a.4711-123", 4711, false},
		{"other-7f3a2b40.4711-5678901234567", 4711, true}, // in another namespace
		{"other-7f3a2b40.15678901234567", 1, true},
		{here + ".4711-5678901234567", 4711, true},
		{here + ".47115678901234567", 4711, true},
		{here + ".4712-5678901234567", 4711, false},
		{"other.4711-5678901234567", 4711, false}, // a time in nanoseconds is as long
		{"app-1.0", 1, false},
		{"linux-6.1", 1, false},
		{"linux-6.112", 11, false},
		{"app-20261125.1", 1, false},
		{".lk04711f" + here, 4711, true},
		{".lk04711fother", 4711, true},
		{".lk00001fother", 1, true},
		{".lk1234567avm", 1234567, true},
		{".lk04712fother", 4711, false},
		{".lk04711f", 4711, false},
		{".lk04711xother", 4711, false},
		{"_" + inProcmail(4711) + "." + inProcmail(now()) + "." + here, 4711, true},
		{"_" + inProcmail(4711) + "%" + inProcmail(now()) + ".other", 4711, true},
		{"_" + inProcmail(1) + "," + inProcmail(now()) + ".other", 1, true},
		{"_" + inProcmail(1<<22-1) + "." + inProcmail(now()) + ".other", 1<<22 - 1, true},
		{"_" + inProcmail(4712) + "." + inProcmail(now()) + "." + here, 4711, false},
		{"_" + inProcmail(4711) + "." + inProcmail(now()-3*86400) + "." + here, 4711, false},
		{"_a.module.css", 26, false},
		{"image.bin", 4711, false},
		{"", 0, false},
	} {
		if got := tellsPid(c.name, c.pid); got != c.want {
			t.Errorf("tellsPid(%q, %d) = %t, want %t", c.name, c.pid, got, c.want)
		}
	}
	if got := fromProcmail("mhlBrB"); got != 1795577958 { // as procmail's lockfile wrote that second
		t.Errorf("fromProcmail = %d", got)
	}
}

// What has the form of a candidate's name to the last is one whoever makes it, and a
// build's name has not: it would be kept from all others.
func TestIsWholeCandidateName(t *testing.T) {
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"other-7f3a2b40.4711-5678901234567890": true,
		"other-7f3a2b40.47115678901234567":     true,
		here + "-7f3a.4711-123":                true,
		here + ".4711-5678901234567890":        true,
		".lk04711fother":                       true,
		here + "-7f3a2b40.4711":                true,
		here + ".7f3a2b401740-4711":            true,
		"other-7f3a2b40.4711":                  false,

		"app-4f3c2d1.20261125":           false,
		"app-deadbeef.20261125120000":    false,
		"app.1764050000123456789":        false,
		here + "-7.20":                   false,
		here + ".20261125120000":         false,
		"linux-6.1":                      false,
		"_a.module.css":                  false,
		"other-7f3a2b40.47-11-567890123": false,
	} {
		if got := isWholeCandidateName(name); got != want {
			t.Errorf("isWholeCandidateName(%q) = %t, want %t", name, got, want)
		}
	}
}

func now() int { return int(time.Now().Unix()) }

func inProcmail(n int) (digits string) {
	for ; n > 0; n >>= 6 {
		digits += procmailDigits[n&63 : n&63+1]
	}
	return digits
}

func FuzzTemplates(f *testing.F) {
	for _, s := range []string{"vm-7f3a.12-3", ".lk29544fvm", "_iNH._gZArB.vm", "_", "-", "a-.", ".lk"} {
		f.Add(s)
	}
	fs := &FS{}
	f.Fuzz(func(t *testing.T, name string) {
		if tellsPid(name, 29544) && !fs.mayBeCandidate(name) {
			t.Errorf("%q is somebody's own candidate but no candidate", name)
		}
	})
}

// What begins with the lock name is believed to be somebody's own by his pid, too.
func TestLockNameTellsPid(t *testing.T) {
	fs := &FS{}
	fs.setNames([]string{"devserver.lock", "m.NFSLock"}, nil, nil)
	for name, want := range map[string]bool{
		"devserver.lock|other|4711|12345":        true,
		"devserver.lock|other|4712|4711":         false,
		"devserver.lock.other.org.4711.0":        true,
		"devserver.lock.other.4712.0":            false,
		"devserver.lock.other.6b092f84.00001267": true,
		"devserver.lock.other.6b092f84.00004711": false,
		"devserver.lock.4711":                    true,
		"devserver.lock.47":                      false,
		"m.tmp.1234.4711.5678":                   true,
		"m.tmp.1234.4712.4711":                   false,
		"m.tmp.4711.4712.5678":                   false,
		"m.x.1234.4711.5678":                     false,
		"devserver." + startedOn() + ".4711":     true,
		"devserver.x" + startedOn() + ".4711":    false,
		"devserver.other.4711":                   false,
	} {
		if got := fs.hasLockTemplate(name) && fs.lockNameTellsPid(name, 4711); got != want {
			t.Errorf("%q tells 4711: %t, want %t", name, got, want)
		}
	}
}

func BenchmarkMayBeCandidate(b *testing.B) {
	fs := &FS{}
	fs.setNames([]string{"devserver", "devserver.lock"}, nil, nil)
	for b.Loop() {
		for _, name := range []string{"main.go", "libfoo.so.6", "image", "linux-image-6.1.0-18-amd64.deb", "app-1.0"} {
			fs.mayBeCandidate(name)
		}
	}
}
