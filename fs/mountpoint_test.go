package fs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMount(t *testing.T) {
	for line, want := range map[string]mountLine{
		"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue": {
			dev: "98:0", root: "/mnt1", point: "/mnt2", fstype: "ext3", source: "/dev/root",
		},
		`40 35 0:40 / /srv/with\040space rw - fuse.stagefs /srv/a\134b rw`: {
			dev: "0:40", root: "/", point: "/srv/with space", fstype: "fuse.stagefs", source: `/srv/a\b`,
		},
	} {
		got, ok := parseMount(line)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(mountLine{})); diff != "" || !ok {
			t.Errorf("parseMount(%q) is off (-want +got), %t:\n%s", line, ok, diff)
		}
	}
	for _, line := range []string{"", "-", " - ", "36 35 98:0 /mnt1", "36 35 98:0 /a /b rw - ext3"} {
		if got, ok := parseMount(line); ok {
			t.Errorf("parseMount(%q) = %+v, want none", line, got)
		}
	}
}

func FuzzParseMount(f *testing.F) {
	f.Add(`40 35 0:40 / /srv/with\040space rw - fuse.stagefs /srv/a\134b rw`)
	f.Add(`1 2 3:4 \ \9 - \777 \12`)
	f.Fuzz(func(t *testing.T, line string) { parseMount(line) })
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
