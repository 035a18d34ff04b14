//go:build linux

package tests

import "path/filepath"

// An attack is an operation as an agent's commands. The first own of them only
// prepare it, in the rival's own directory; undo is for when the build had
// been abandoned, and nobody was in the way.
type attack struct {
	steps [][]string
	own   int
	undo  [][]string
}

func syscallAttacks(to target) []attack {
	one := func(step ...string) attack { return attack{steps: [][]string{step}} }
	undone := func(undo []string, step ...string) attack {
		return attack{steps: [][]string{step}, undo: [][]string{undo}}
	}
	// then opens the victim's file for writing, which is refused already.
	then := func(flags string, steps ...[]string) attack {
		return attack{steps: append([][]string{{"open", "x", to.File, flags}}, steps...), undo: [][]string{{"close", "x"}}}
	}
	taken := filepath.Join(to.Own, "taken")
	lock, plain := filepath.Join(to.Sub, "devserver.lock"), filepath.Join(to.Dir, "devserver")
	rm := func(path string) []string { return []string{"unlink", path} }
	all := []attack{
		undone(rm(to.New), "creat", to.New, "wronly,creat,excl"),
		undone(rm(to.New), "mknod", to.New, "fifo"),
		undone(rm(to.New), "mknod", to.New, "sock"),
		undone([]string{"rmdir", to.New}, "mkdir", to.New),
		undone(rm(to.New), "symlink", "/etc/passwd", to.New),
		undone(rm(to.New), "link", to.OwnF, to.New),
		undone(rm(taken), "link", to.File, taken),
		undone(rm(to.New), "rename", to.OwnF, to.New),
		one("rename", to.OwnF, to.File),
		undone(rm(to.New), "rename", to.OwnF, to.New, "noreplace"),
		one("rename", to.File, to.OwnF, "exchange"),
		one("rename", to.File, to.New),
		undone(rm(taken), "rename", to.File, taken),
		one("rename", to.File, to.New, "whiteout"),
		undone([]string{"rename", taken, to.Dir}, "rename", to.Dir, taken),
		one("unlink", to.File),
		one("rmdir", to.Sub),
		one("truncate", to.File, "0"),
		one("truncate", to.File, "1000000"),
		one("chmod", to.File, "0777"),
		one("chmod", to.Sub, "0700"),
		one("chown", to.File, "1000", "1000"),
		one("utimens", to.File),
		one("utimens", to.Sub, "1000"),
		one("setxattr", to.File, "user.rival", "RIVAL"),
		one("setxattr", to.Sub, "user.rival", "RIVAL"),
		one("setfacl", to.File),
		then("wronly", []string{"write", "x", "RIVAL"}),
		then("wronly,trunc"),
		then("wronly,append", []string{"write", "x", "RIVAL"}),
		then("rdwr", []string{"mmap", "m", "x"}, []string{"close", "x"}, []string{"poke", "m", "RIVAL"}, []string{"munmap", "m"}),
		then("rdwr", []string{"fallocate", "x", "0", "0", "100000"}),
		then("rdwr", []string{"copyrange", to.OwnF, "x"}),
		one("thread", "creat", to.File, "wronly,trunc"),
		{steps: [][]string{{"open", "x", to.Sub, "wronly,tmpfile"}}, undo: [][]string{{"close", "x"}}},
		{
			own:   2,
			steps: [][]string{{"open", "x", to.Own, "rdwr,tmpfile"}, {"write", "x", "RIVAL"}, {"linkfd", "x", to.New}},
			undo:  [][]string{{"close", "x"}, rm(to.New)},
		},
		{ // the rival's own writable mapping must not come in
			own: 3,
			steps: [][]string{
				{"open", "x", to.OwnF, "rdwr"},
				{"ftruncate", "x", "4096"},
				{"mmap", "m", "x"},
				{"rename", to.OwnF, to.New},
			},
			undo: [][]string{{"poke", "m", "RIVAL"}, {"munmap", "m"}, {"close", "x"}, rm(to.New)},
		},

		undone(rm(lock), "creat", lock, "wronly,creat,excl"),
		undone(rm(lock), "symlink", "nowhere", lock),
		undone(rm(lock), "link", to.OwnF, lock),
		undone(rm(lock), "rename", to.OwnF, lock),
		undone([]string{"rmdir", lock}, "mkdir", lock),
		one("unlink", filepath.Join(to.Dir, "devserver.lock")),
		one("unlink", plain),
		one("utimens", plain, "1000"),
	}
	if to.Anchor {
		// A name above a lock is covered too (C1).
		board := filepath.Dir(to.Dir)
		all = append(all, one("rename", board, taken), one("rename", board, board+"-gone"), one("rename", to.Own, board, "exchange"), one("rmdir", board))
	}
	return all
}
