//go:build linux

package main

import (
	"slices"
	"strings"
	"testing"
)

// Options work in any place of the command line.
func TestNormalize(t *testing.T) {
	app := (&command{}).app()
	for _, tt := range []struct{ args, want string }{
		{"mount DIR", "mount -- DIR"},
		{"mount DIR --depth 2", "mount --depth=2 -- DIR"},
		{"mount --depth 2 DIR MNT", "mount --depth=2 -- DIR MNT"},
		{"mount DIR --depth=2 MNT -d", "mount --depth=2 --daemon -- DIR MNT"},
		{"mount DIR --depth -1", "mount --depth=-1 -- DIR"},
		{"mount --lock-name a DIR --lock-name b", "mount --lock-name=a --lock-name=b -- DIR"},
		{"mount DIR --lock-name --", "mount --lock-name=-- -- DIR"},
		{"mount DIR --log=a=b", "mount --log=a=b -- DIR"},
		{"mount -- -d --depth", "mount -- -d --depth"},
		{"mount -", "mount -- -"},
		{"mount --strict DIR", "mount --strict -- DIR"},
		{"mount --strict=true DIR", "mount --strict=true -- DIR"},
		{"mount -d --daemon=false DIR", "mount --daemon --daemon=false -- DIR"},
		{"-d mount DIR", "mount --daemon -- DIR"},
		{"umount -l M", "umount --lazy -- M"},
		{"unmount M", "umount -- M"},
		{"break D --why the owner left", "break --why=the -- D owner left"},
		{"run -n -w 5 D make -n --json", "run --nonblock --wait=5 -- D make -n --json"},
		{"run -w5 -E9 D -- ls -l", "run --wait=5 --conflict-exit-code=9 -- D -- ls -l"},
		{"run -nsE9 D x", "run --nonblock --shared --conflict-exit-code=9 -- D x"},
		{"run -- -n -- x", "run -- -n -- x"},
		{"-n run D x", "run --nonblock -- D x"},
		{"wait D -w1", "wait --wait=1 -- D"},
		{"help mount", "help mount"},
		{"--version", "version"},
	} {
		got, err := normalize(app, strings.Fields(tt.args))
		if err != nil || !slices.Equal(got, strings.Fields(tt.want)) {
			t.Errorf("normalize(%s) = %q, %v, want %s", tt.args, got, err, tt.want)
		}
	}
	for _, args := range []string{"", "--x", "mount --x", "mount --strict=x D", "umount -l=D", "mount -x D", "mount D --depth", "x", "run -E", "run -x D y", "run -nx D y"} {
		if got, err := normalize(app, strings.Fields(args)); err == nil {
			t.Errorf("normalize(%s) = %q, want an error", args, got)
		}
	}
	if _, err := normalize(app, []string{"--depth", "2", "mount", "DIR"}); err == nil || !strings.Contains(err.Error(), "follow the command") {
		t.Errorf("an option with its value before the command: %v", err)
	}
}

func FuzzNormalize(f *testing.F) {
	f.Add("mount DIR --depth 2 -- -x")
	f.Add("break --why=x D -")
	f.Add("run -nw5 D -- x -- -y")
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, " ")
		got, err := normalize((&command{}).app(), args)
		if err != nil || len(got) == 0 || got[0] == "help" || got[0] == "--help" || got[0] == "version" {
			return
		}
		// A second time nothing moves any more.
		again, err := normalize((&command{}).app(), got)
		if err != nil || !slices.Equal(again, got) {
			t.Errorf("normalize(%q) = %q, and of that %q, %v", args, got, again, err)
		}
	})
}

func TestDidYouMean(t *testing.T) {
	known := []string{"--depth", "--debug", "--daemon"}
	for given, want := range map[string]string{
		"--dept":  " (did you mean --depth?)",
		"--debgu": " (did you mean --debug?)",
		"--xyzzy": "",
	} {
		if got := didYouMean(given, known); got != want {
			t.Errorf("didYouMean(%s) = %q, want %q", given, got, want)
		}
	}
}
