//go:build linux

package tests

// A shapeOf a stager is one way in which real builds are made of processes. Its script
// stages source directory $SRC as directory $D, and calls $PAUSE once, in the
// middle, which lets a rival try its luck. Where a tool offers no such moment
// (stop is true), or others of its processes don't wait, all are stopped.
type shapeOf struct {
	name   string
	needs  []string
	script string
	stop   bool
	owner  string   // the name of the process that the lock is of, "" for sh
	others bool     // others of its processes work on while one pauses
	extra  []string // files in $D besides those of $SRC
}

func stagerShapes() []shapeOf {
	return []shapeOf{
		{
			name: "shell script",
			script: `set -e
				mkdir "$D"; cp -r "$SRC"/a* "$D"/; $PAUSE; cp -r "$SRC"/[!a]* "$D"/
				mkdir "$D.tmp"; rmdir "$D.tmp"; echo done >"$D/last"`,
			extra: []string{"last"},
		},
		{
			name: "interactive bash", owner: "bash", needs: []string{"/usr/bin/script", "bash"},
			// Each prompt line is a job of its own; the shell is the owner. The
			// pause comes between two of them.
			script: `printf '%s\n' 'mkdir "$D"' 'cp -r "$SRC"/. "$D"/' '$PAUSE' 'echo done >"$D/last"' 'exit' |
				script -qec 'bash --norc --noprofile -i' /dev/null >/dev/null`,
			extra: []string{"last"},
		},
		{
			name: "make -j", owner: "make", needs: []string{"make"}, others: true,
			script: `cat >"$TMP/Makefile" <<-'EOF'
				FILES := $(notdir $(wildcard $(SRC)/*))
				all: $(addprefix do-,$(FILES)) pause
				dir: ; mkdir $(D)
				pause: dir ; $(PAUSE)
				do-%: dir ; cp -r $(SRC)/$* $(D)/$*
				EOF
				make -s -j4 -f "$TMP/Makefile"`,
		},
		{
			name: "ninja", owner: "ninja", needs: []string{"ninja"}, others: true,
			script: `cd "$TMP" && { printf 'rule cp\n  command = cp -r $in $out\nrule sh\n  command = $cmd && touch $out\n'
				echo "build made: sh"; echo "  cmd = mkdir $D"; echo "build paused: sh | made"; echo "  cmd = $PAUSE"
				for f in "$SRC"/*; do echo "build $D/${f##*/}: cp $f | made"; done; } >build.ninja && ninja --quiet`,
		},
		{
			name:   "xargs -P",
			script: `mkdir "$D" && ls "$SRC" | xargs -P4 -I{} cp -r "$SRC/{}" "$D/{}" && $PAUSE && ls "$SRC" | xargs -P4 -n1 sh -c 'touch "$D/$1"' sh`,
		},
		{name: "python", owner: "python3", needs: []string{"/usr/bin/python3"}, script: `exec /usr/bin/python3 "$TMP/stager.py"`, others: true, extra: []string{"last"}},
		{
			name:   "setsid child",
			script: `mkdir "$D" && cp -r "$SRC"/. "$D" && setsid -w sh -c '$PAUSE && echo done >"$D/last"'`,
			extra:  []string{"last"},
		},
		{
			name: "double fork",
			// The middle process goes away, and the writer becomes a child of
			// init: a descendant that was seen before (H2).
			script: `mkdir "$D" && cp -r "$SRC"/. "$D"
				( ( : >"$D/last"; : >"$TMP/seen"; $PAUSE; echo done >"$D/last"; : >"$TMP/finished" ) &
				  until [ -e "$TMP/seen" ]; do sleep 0.02; done )
				until [ -e "$TMP/finished" ]; do sleep 0.02; done`,
			extra: []string{"last"},
		},
		{name: "rsync", owner: "rsync", needs: []string{"rsync"}, script: `rsync -a "$SRC"/ "$D"/`, stop: true},
		{name: "tar", needs: []string{"tar"}, others: true, script: `mkdir "$D" && tar -C "$SRC" -c . | { dd bs=10240 count=2 iflag=fullblock status=none; $PAUSE; cat; } | tar -C "$D" -x`},
		{name: "cp -a", owner: "cp", script: `cp -a "$SRC" "$D"`, stop: true},
		{name: "unzip", owner: "unzip", needs: []string{"unzip", "/usr/bin/python3"}, script: `cd "$SRC" && /usr/bin/python3 -m zipfile -c "$TMP/src.zip" . && unzip -q "$TMP/src.zip" -d "$D"`, stop: true},
		{name: "git clone", owner: "git", needs: []string{"git"}, script: `export GIT_CONFIG_GLOBAL=/dev/null; cd "$TMP" && cp -r "$SRC" repo && cd repo && git init -q . && git add . &&
			git -c user.name=a -c user.email=a@b commit -qm all && git clone -q "$TMP/repo" "$D" && rm -rf "$D/.git"`, stop: true},
	}
}

const stagerPy = `
import os, shutil, subprocess, threading
src, dst = os.environ["SRC"], os.environ["D"]

def thread(fn, *args):
    t = threading.Thread(target=fn, args=args)
    t.start()
    return t

thread(os.makedirs, dst).join()
names = sorted(os.listdir(src))

def copy(names):
    for name in names:
        path = os.path.join(src, name)
        if os.path.isdir(path):
            subprocess.check_call(["cp", "-r", path, dst])
        else:
            shutil.copy(path, dst)

workers = [thread(copy, names[i::4]) for i in range(4)]
subprocess.check_call(os.environ["PAUSE"].split())
for w in workers:
    w.join()
with open(os.path.join(dst, "last"), "w") as f:
    f.write("done\n")
`
