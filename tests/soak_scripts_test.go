//go:build linux

package tests

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// A stagerKind is a real tool that stages a build: a script that is told by its
// environment what to stage (SRC, ZIP, REPO), where to (D), and how to publish
// (PUBLISH). What ends its lock differs from one to the next. In the last
// argument, @ stands for the directory of the soak's files.
type stagerKind struct {
	name string
	argv []string
	// resumes says that it can go on with what a killed one left.
	resumes bool
}

func stagerKinds() []stagerKind {
	sh := func(script string) []string { return []string{"sh", "-ec", script} }
	return []stagerKind{
		// The mkdir's lock is handed over to the script (R5) and ends with it.
		{name: "tar", argv: []string{"bash", "-ec", `set -o pipefail
mkdir "$D"
tar -C "$SRC" -cf - . | tar -C "$D" -xf -
sh "$PUBLISH"`}},
		{name: "git clone", argv: sh(`mkdir "$D"
git -c core.autocrlf=false -c gc.auto=0 clone -q --no-hardlinks "$REPO" "$D"
sh "$PUBLISH"`)},
		// A lock file of the script's own, whose end frees the directory
		// although the script lives on (A13, R1).
		{name: "rsync", resumes: true, argv: sh(`mkdir -p "$D"
set -C; echo $$ >"$D/devserver"; set +C
rsync -aI --delete --exclude=/devserver "$SRC/" "$D/"
sh "$PUBLISH"
rm "$D/devserver"
sleep 0.05`)},
		// Lock files that child processes make: handed over as well.
		{name: "cp -a", argv: sh(`mkdir "$D"
dotlockfile -r 0 "$D/devserver.lock"
cp -a "$SRC/." "$D/"
sh "$PUBLISH"
dotlockfile -u "$D/devserver.lock"`)},
		{name: "unzip", argv: sh(`mkdir "$D"
lockfile -r0 "$D/devserver.lock"
unzip -q "$ZIP" -d "$D"
sh "$PUBLISH"
rm -f "$D/devserver.lock"`)},
		{name: "python", resumes: true, argv: []string{"/usr/bin/python3", "@/stager.py"}},
		{name: "shell", argv: []string{"bash", "-e", "@/stager.sh"}},
		{name: "make", argv: []string{"make", "-s", "-j2", "-f", "@/Makefile"}},
	}
}

// publishSh tells that a build is complete. The lock still stands then; but
// rivals are kept off it, because they may touch it when the lock has ended.
const publishSh = `exec 7<"$MARK" || exit
rm "$MARK" || exit
flock 7 || exit
: >"$DONE.part" && mv "$DONE.part" "$DONE"
`

const soakStagerPy = `
import fcntl, os, shutil, subprocess, sys, threading, time
from lockfile import FileLock

src, d = os.environ["SRC"], os.environ["D"]
os.makedirs(d, exist_ok=True)
lock = FileLock(os.path.join(d, "devserver"))
lock.acquire(timeout=-1)
for name in os.listdir(d):
    if not name.startswith("devserver") and os.path.join(d, name) != lock.unique_name:
        path = os.path.join(d, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)

failed = []

def copy(entries):
    try:
        for e in entries:
            if e.is_dir():
                shutil.copytree(e.path, os.path.join(d, e.name), copy_function=shutil.copy2)
            else:
                shutil.copy(e.path, d)
    except BaseException as e:
        failed.append(e)

entries = sorted(os.scandir(src), key=lambda e: e.name)
half = len(entries) // 2
thread = threading.Thread(target=copy, args=(entries[:half],))
thread.start()
for e in entries[half:]:
    subprocess.check_call(["cp", "-r", "--preserve=mode", e.path, d])
thread.join()
if failed:
    raise failed[0]
subprocess.check_call(["sh", os.environ["PUBLISH"]])
lock.release()
time.sleep(0.05)
`

// soakStagerSh goes through the directories with a different writing tool for
// each.
const soakStagerSh = `mkdir "$D"
cd "$SRC"
n=0
find . -type d | sort >"$LIST"
while IFS= read -r dir; do
	to=$D/$dir
	[ "$dir" = . ] || mkdir "$to"
	find "$dir" -maxdepth 1 -type f >"$LIST.files"
	[ -s "$LIST.files" ] || continue
	n=$((n + 1))
	case $((n % 9)) in
	0) xargs -d '\n' install -m 644 -t "$to" <"$LIST.files" ;;
	1) xargs -d '\n' -n 20 -P 2 cp -p -t "$to" <"$LIST.files" ;;
	2) tar -cf - -T "$LIST.files" | tar -C "$D" -xf - ;;
	3) rsync -a --files-from="$LIST.files" . "$D" ;;
	4) cp -t "$to" $(cat "$LIST.files") && chmod 640 "$to"/* && chmod 644 "$to"/* && touch "$to"/* ;;
	5) xargs -d '\n' cp -t "$to" <"$LIST.files" && sed -i -e 's/^/x/' -e 's/^x//' "$to"/* ;;
	*) head -n 6 "$LIST.files" | while IFS= read -r f; do
		case $((n % 3)) in
		0) cat "$f" >"$D/$f.part" && mv "$D/$f.part" "$D/$f" ;;
		1) dd if="$f" of="$D/$f" bs=64k status=none ;;
		2) : >"$D/$f" && tee -a "$D/$f" <"$f" >/dev/null && ln "$D/$f" "$D/$f.ln" && rm "$D/$f" && mv "$D/$f.ln" "$D/$f" ;;
		esac
	done
	tail -n +7 "$LIST.files" | xargs -r -d '\n' cp -t "$to" ;;
	esac
done <"$LIST"
find . -type f -perm /100 -exec sh -c 'for f; do chmod 755 "$D/$f"; done' sh {} +
find . -type f ! -perm /100 -exec sh -c 'for f; do echo "$D/$f"; done' sh {} + | xargs -d '\n' chmod 644
sh "$PUBLISH"
`

// soakFiles are the files that stagers and rivals find outside the mount.
func soakFiles(src source) map[string]string {
	return map[string]string{
		"publish.sh": publishSh,
		"Makefile":   soakMakefile(src),
		"client.py":  clientPy,
		"stager.py":  soakStagerPy,
		"stager.sh":  soakStagerSh,
		"rival.py":   rivalPy,
		"rival.sh":   rivalSh,
	}
}

// soakMakefile has a target for each directory of the source. The mkdir's lock
// comes to make itself, whose exit ends it.
func soakMakefile(src source) string {
	var dirs []string
	for name, line := range src.tree {
		if line == "directory" {
			dirs = append(dirs, name)
		}
	}
	slices.Sort(dirs)
	number := map[string]int{}
	var b strings.Builder
	b.WriteString("publish: all\n\t@sh \"$(PUBLISH)\"\n")
	for i, dir := range dirs {
		number[dir] = i
		if dir == "." {
			fmt.Fprintf(&b, "d%d:\n\t@mkdir \"$(D)\"\n", i)
		} else {
			fmt.Fprintf(&b, "d%d: | d%d\n\t@mkdir \"$(D)/%s\"\n", i, number[filepath.Dir(dir)], dir)
		}
		fmt.Fprintf(&b, "\t@find \"$(SRC)/%s\" -maxdepth 1 -type f -exec cp -p -t \"$(D)/%s\" {} +\nall: d%d\n", dir, dir, i)
	}
	return b.String()
}
