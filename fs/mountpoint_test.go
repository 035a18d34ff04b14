package fs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The mount table as the kernel writes it.
func TestParseMounts(t *testing.T) {
	for line, want := range map[string][]MountEntry{
		"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue": {{
			ID: 36, Parent: 35, Dev: "98:0", Root: "/mnt1", Path: "/mnt2", Options: "rw,noatime", FSType: "ext3", Source: "/dev/root",
			FSOptions: "rw,errors=continue", Propagation: "master:1",
		}},
		`40 35 0:40 / /srv/with\040space rw - fuse.stagefs /srv/a\134b rw`: {{
			ID: 40, Parent: 35, Dev: "0:40", Root: "/", Path: "/srv/with space", Options: "rw", FSType: "fuse.stagefs", Source: `/srv/a\b`,
			FSOptions: "rw",
		}},
		"": nil, "-": nil, " - ": nil, "36 35 98:0 /mnt1": nil, "36 35 98:0 /a /b rw - ext3": nil, "x 35 98:0 /a /b rw - ext3 a rw": nil,
	} {
		if diff := cmp.Diff(want, ParseMounts(line)); diff != "" {
			t.Errorf("ParseMounts(%q) is off (-want +got):\n%s", line, diff)
		}
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add(`40 35 0:40 / /srv/with\040space rw - fuse.stagefs /srv/a\134b rw`)
	f.Add(`1 2 3:4 \ \9 - \777 \12`)
	f.Fuzz(func(t *testing.T, text string) { ParseMounts(text) })
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		path, dir string
		want      bool
	}{
		{"/a", "/a", true}, {"/a/b", "/a", true}, {"/ab", "/a", false}, {"/", "/a", false}, {"/a", "/", true},
	} {
		if got := within(c.path, c.dir); got != c.want {
			t.Errorf("within(%q, %q) = %t, want %t", c.path, c.dir, got, c.want)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Options{Dir: "/srv", LockNames: []string{"devserver", "*.lock"}, Depth: 3}
	if err := good.Validate(); err != nil {
		t.Errorf("Validate(%+v) = %v, want nil", good, err)
	}
	for _, o := range []Options{
		{},
		{Dir: "/srv", Depth: -1},
		{Dir: "/srv", Grace: -1},
		{Dir: "/srv", LockNames: []string{""}},
		{Dir: "/srv", LockNames: []string{"a/b"}},
		{Dir: "/srv", LockNames: []string{"."}},
		{Dir: "/srv", LockNames: []string{".stagefs"}},
		{Dir: "/srv", LockNames: []string{"[a"}},
		{Dir: "/srv", LockNames: []string{"*"}},
		{Dir: "/srv", Candidates: []string{"a\x00b"}},
	} {
		if err := o.Validate(); err == nil {
			t.Errorf("Validate(%+v) = nil, want an error", o)
		}
	}
}
