package fs

import "testing"

// TestMountName: which mount may be the one that was noted.
func TestMountName(t *testing.T) {
	n := mountName{"boot", "2a", "mnt:[1]", "7"}
	for noted, want := range map[string]bool{
		n.String():            true,
		"boot ?":              true,  // one that was being made
		"boot 2a mnt:[2] 9":   true,  // a copy of it, in another mount namespace
		"boot 2a mnt:[1] 8":   false, // the number of its file system is used again
		"boot 2b mnt:[1] 7":   false,
		"boot 2b mnt:[2] 9":   false,
		"before 2a mnt:[1] 7": false,
		"before ?":            false,
		"":                    false,
	} {
		if n.is(noted) != want {
			t.Errorf("%q may be the mount: %v, want %v", noted, !want, want)
		}
	}
	if n.id = ""; !n.is("boot 2a mnt:[1] 8") || n.is("boot 2b mnt:[1] 8") {
		t.Error("of a mount of which only the file system is known, another thing is compared")
	}
	own, err := nameOfMount("/", 1)
	if err != nil || !own.is(own.String()) {
		t.Errorf("the root's is %q, %v", own, err)
	}
}
