//go:build linux

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestHelperArgs: what mount(8) says is what the mount command is to do, or is refused with
// what to do instead.
func TestHelperArgs(t *testing.T) {
	flags := (&command{}).mountCommand().Flags
	for _, c := range []struct{ given, want, err string }{
		{"/srv /srv -o rw", "mount --daemon -- /srv", ""},
		{"/srv /srv/ -o rw,depth=2,strict,lock-name=a,lock-name=b=c", "mount --daemon --depth=2 --strict --lock-name=a --lock-name=b=c -- /srv", ""},
		{"/srv /mnt", "mount --daemon -- /srv /mnt", ""},
		{"-o defaults,nofail,x-systemd.automount,user=me -nv /srv /mnt -t fuse.stagefs", "mount --daemon -- /srv /mnt", ""},
		{"/srv /mnt -odepth=2", "mount --daemon --depth=2 -- /srv /mnt", ""},
		{"/srv /mnt -sno nothing,depth=2", "mount --daemon --depth=2 -- /srv /mnt", ""},
		{"/srv /mnt -f", "", ""},
		{"/srv /mnt -f -o nothing", "", "unknown mount option nothing"},
		{"/srv", "", "usage: mount -t fuse.stagefs"},
		{"/srv /mnt /other", "", "usage: mount -t fuse.stagefs"},
		{"/srv /mnt -o", "", "lacks its value"},
		{"/srv /mnt -N 1", "", "nsenter"},
		{"/srv /mnt -x", "", "unknown option -x"},
		{"/srv /mnt -o rw,nosuid,depth=2,noatime", "mount --daemon --depth=2 --options=rw,nosuid,noatime -- /srv /mnt", ""},
		{"/srv /mnt -o ro,relatime,remount,user_id=0,default_permissions,max_read=1048576", "mount --daemon --options=ro,relatime,remount -- /srv /mnt", ""},
		{"/srv /srv -o ro,remount,depth=2,supervise", "mount --daemon --options=ro,remount -- /srv", ""},
		{"/unseen /unseen -o ro,remount,depth=2,supervise", "mount --daemon --options=ro,remount -- /unseen", ""},
		// These are refused:
		{"/srv /srv -o rw,remount,user_id=0,depth=3", "mount --daemon --depth=3 --options=rw,remount -- /srv", ""},
		{"/srv /srv -o rw,remount,depth=2,supervise,depth=3", "mount --daemon --depth=3 --options=rw,remount -- /srv", ""},
		{"/srv /srv -o rw,remount,depth=2,supervise,strict", "mount --daemon --strict --options=rw,remount -- /srv", ""},
		{"/unseen /unseen -o rw,remount,user_id=0,depth=3", "mount --daemon --depth=3 --options=rw,remount -- /unseen", ""},
		{"/srv /mnt -o user_id=0", "", "unknown mount option user_id=0"},
		{"/srv /mnt -o sync", "", "set it where"},
		{"/srv /mnt -o depth", "", "depth=…"},
		{"/srv /mnt -o strict=yes", "", "takes no value"},
		{"/srv /mnt -o replace", "", "replace is not for mount(8)"},
		{"/srv /mnt -o daemon", "", "daemon is not for mount(8)"},
		{"--helpme", "", "unknown option --helpme; usage: mount -t fuse.stagefs"},
		{"stagefs /mnt", "", "stagefs is no directory, which comes first"},
	} {
		got, err := helperArgs(flags, strings.Fields(c.given), func(path string) []string {
			if path == "/unseen" {
				return nil
			}
			return []string{"stagefs", "mount", "--depth=2", "--supervise", "--", path}
		})
		if text := ""; err != nil || c.err != "" {
			if err != nil {
				text = err.Error()
			}
			if !strings.Contains(text, c.err) || c.err == "" {
				t.Errorf("helperArgs(%s) = %q, %v, want the error %q", c.given, got, err, c.err)
			}
			continue
		}
		if diff := cmp.Diff(strings.Fields(c.want), append([]string{}, got...)); diff != "" {
			t.Errorf("helperArgs(%s), -want +got:\n%s", c.given, diff)
		}
	}
	for program, want := range map[string]bool{"/sbin/mount.fuse.stagefs": true, "mount.stagefs": true, "/usr/bin/stagefs": false} {
		if got := isMountHelper(program); got != want {
			t.Errorf("isMountHelper(%q) = %v", program, got)
		}
	}
}
