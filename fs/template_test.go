package fs

import (
	"fmt"
	"os"
	"testing"
)

// A9: the names that the real programs make, and names that builds have.
func TestIsCandidateName(t *testing.T) {
	fs := &FS{opts: Options{Candidates: []string{"*.cand"}}}
	for name, want := range map[string]bool{
		"vm-7f3a2b40.1234-5678901234567": true,
		"vm-7f3a2b40.12345678901234567":  true,
		"build-7.example.org-ab.99":      true,
		".lk29544fvm":                    true,
		".lk123456789avm":                true,
		"_iNH._gZArB.vm":                 true,
		"_Y.q7ZArB.vm":                   true,
		"_abcd,q7ZArB.build.example.org": true,
		"mine.cand":                      true,

		"image.bin":            false,
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
		"a-1.2-3-4":            false,
		"":                     false,
		"_":                    false,
		"kernel-5.10.tar.xz":   false,
		"delta-deadbeef.patch": false,
	} {
		if got := fs.isCandidateName(name); got != want {
			t.Errorf("isCandidateName(%q) = %t, want %t", name, got, want)
		}
	}
}

// A name is believed to be somebody's own only with his pid or on this host: the
// file behind it will be removed with its creator.
func TestOwnCandidateName(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	const pid = 4711
	for name, want := range map[string]bool{
		fmt.Sprintf("%s-7f3a.%d-123", host, pid):    true,
		fmt.Sprintf("%s-7f3a.%d-123", host, pid+1):  false,
		fmt.Sprintf("other-7f3a.%d-123", pid):       false,
		fmt.Sprintf(".lk%05df%s", pid, host):        true,
		fmt.Sprintf(".lk%05df%s", pid+1, host):      false,
		fmt.Sprintf(".lk%05dfother-than-this", pid): false,
		"_iNH._gZArB." + host:                       true,
		"_iNH._gZArB.other-than-this":               false,
		"image.bin":                                 false,
	} {
		if got := ownCandidateName(name, pid); got != want {
			t.Errorf("ownCandidateName(%q, %d) = %t, want %t", name, pid, got, want)
		}
	}
}

func FuzzTemplates(f *testing.F) {
	for _, s := range []string{"vm-7f3a.12-3", ".lk29544fvm", "_iNH._gZArB.vm", "_", "-", "a-.", ".lk"} {
		f.Add(s)
	}
	fs := &FS{}
	f.Fuzz(func(t *testing.T, name string) {
		if ownCandidateName(name, 29544) && !fs.isCandidateName(name) {
			t.Errorf("%q is somebody's own candidate but no candidate", name)
		}
	})
}
