//go:build linux

package tests

// rivalPy is a rival in Python.
const rivalPy = `
import errno, json, mmap, os, random, shutil, subprocess, sys, tempfile, threading

own = os.environ["OWN"]
os.makedirs(own)

def attempts(t):
    d, s, f, new, ownf = t["d"], t["s"], t["f"], t["new"], t["ownf"]

    def mode(m):
        def run():
            with open(f, m) as x:
                x.write(b"RIVAL")
        return run

    def mapped():
        with open(f, "r+b") as x:
            with mmap.mmap(x.fileno(), 0) as m:
                m[0:1] = b"R"

    def in_thread():
        failed = []
        def body():
            try:
                open(f, "ab").close()
            except OSError as e:
                failed.append(e)
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def in_child():
        r = subprocess.run([sys.executable, "-c", "import sys; open(sys.argv[1], 'ab').close()", f], capture_output=True)
        if r.returncode:
            text = r.stderr.decode()
            raise OSError(errno.EBUSY if "Errno 16" in text else errno.ENOENT if "Errno 2]" in text else 0, text[-300:])

    def fork_child():
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                os.truncate(f, 3)
            except OSError as e:
                code = e.errno
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise OSError(code, "in a child")

    def make():
        os.mkdir(new)
        os.rmdir(new)

    def make_deep():
        os.makedirs(os.path.join(new, "a", "b"))
        shutil.rmtree(new)

    def swap():
        tmp = tempfile.NamedTemporaryFile(dir=os.path.dirname(ownf), delete=False)
        tmp.write(b"RIVAL")
        tmp.close()
        try:
            os.replace(tmp.name, f)
        finally:
            if os.path.exists(tmp.name):
                os.unlink(tmp.name)

    def copy_tree():
        shutil.copytree(own, new)
        shutil.rmtree(new)

    def move_in():
        os.rename(own, new)
        os.rename(new, own)

    def dir_fd():
        fd = os.open(s, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.close(os.open("rival", os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=fd))
            os.unlink("rival", dir_fd=fd)
        finally:
            os.close(fd)

    def lock_file():
        path = os.path.join(d, "devserver")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(path)

    return [
        mode("wb"), mode("ab"), mode("r+b"), mode("wb"), mapped, in_thread, in_child, fork_child, make, make_deep, swap, dir_fd, lock_file,
        lambda: tempfile.NamedTemporaryFile(dir=s).close(),
        lambda: tempfile.TemporaryFile(dir=s).close(),
        lambda: os.remove(f),
        lambda: shutil.rmtree(s),
        lambda: shutil.rmtree(d),
        lambda: shutil.move(f, ownf),
        lambda: shutil.move(ownf, f),
        lambda: shutil.copyfile(ownf, f),
        lambda: shutil.copy2(ownf, new),
        copy_tree,
        lambda: os.truncate(f, 1),
        lambda: os.chmod(f, 0o600),
        lambda: os.chown(s, 1000, 1000),
        lambda: os.utime(f, (1, 1)),
        lambda: os.setxattr(f, "user.rival", b"RIVAL"),
        lambda: os.removexattr(f, "user.rival"),
        lambda: os.symlink(ownf, new),
        lambda: os.link(f, os.path.join(own, "alias%d" % t["n"])),
        lambda: os.mkfifo(new),
        lambda: os.rename(s, os.path.join(own, "taken%d" % t["n"])),
        lambda: os.rename(d, os.path.join(own, "build%d" % t["n"])),
        move_in,
    ]

for line in sys.stdin:
    t = json.loads(line)
    with open(t["ownf"], "w") as x:
        x.write("RIVAL")
    choice = attempts(t)
    i = random.randrange(len(choice))
    op, answer = "attempt %d" % i, "ok"
    try:
        choice[i]()
    except shutil.Error as e:
        text = str(e)
        answer = "EBUSY" if "Errno 16" in text else text[:300]
    except OSError as e:
        answer = errno.errorcode.get(e.errno, str(e))
    except Exception as e:
        answer = "%s: %s" % (type(e).__name__, e)
    if answer == "ENODATA":
        answer = "ENOENT"
    for left in os.listdir(own):
        if left != "file":
            path = os.path.join(own, left)
            shutil.rmtree(path, True) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
    print(op + "\t" + answer.replace("\n", " "))
`

// rivalSh is a rival that uses every writing tool of a shell.
const rivalSh = `mkdir -p "$OWN"
while IFS=$'\t' read -r n d s f new; do
	echo RIVAL >"$OWN/file"
	own=$OWN/file
	ops=(
		'echo RIVAL >"$f"' 'echo RIVAL >>"$f"' 'exec 5<>"$f" && exec 5>&-' 'touch "$f"' 'touch "$new"'
		'cp "$own" "$f"' 'cp "$own" "$new"' 'cp -r "$OWN" "$new"' 'mv "$own" "$f"' 'mv "$own" "$new"'
		'mv "$f" "$OWN/taken"' 'mv "$s" "$OWN/taken"' 'mv "$d" "$OWN/taken"' 'mv "$f" "$new"'
		'rm "$f"' 'rm -r "$s"' 'rm -r "$d"' 'rmdir "$s"' 'mkdir "$new" && rmdir "$new"' 'mkdir -p "$new/a/b" && rm -r "$new"'
		'ln "$own" "$new"' 'ln "$f" "$OWN/alias"' 'ln -s x "$new"' 'ln -f "$own" "$f"' 'ln -sf "$own" "$f"'
		'truncate -s 0 "$f"' 'truncate -s 9 "$new"' 'dd if=/dev/zero of="$f" bs=1 count=9 conv=notrunc' 'dd if=/dev/zero of="$new" count=1'
		'tee "$f" <"$own" >/dev/null' 'tee -a "$f" <"$own" >/dev/null' 'tee "$new" <"$own" >/dev/null' 'install "$own" "$f"' 'install -d "$new" && rmdir "$new"'
		'sed -i s/a/b/ "$f"' 'perl -i -pe s/a/b/ "$f"' 'printf "a\nRIVAL\n.\nw\nq\n" | ed -s "$f"'
		'chmod 600 "$f"' 'chmod 700 "$s"' 'chown 1:1 "$f"' 'chgrp 1 "$s"' 'setfattr -n user.rival -v x "$f"' 'setfacl -m u:1:r "$f"'
		'fallocate -l 99999 "$f"' 'fallocate -l 9 "$new"' 'mkfifo "$new"' 'mknod "$new" p' 'mktemp -p "$s"' 'x=$(mktemp -d -p "$s") && rmdir "$x"'
		'rsync "$own" "$f"' 'rsync -r "$OWN/" "$s/"' 'rsync -rI --inplace "$own" "$f"' 'tar -C "$OWN" -cf - . | tar -C "$s" -xf - --no-same-owner'
		'split -b 1 "$own" "$new."' 'sort -o "$f" "$own"' 'gzip -c <"$f" >"$f.gz"' 'shred -n 1 "$f"' 'git init -q "$new"' 'find "$s" -maxdepth 0 -exec touch {} +'
		'printf "%s\n" "$f" | xargs rm' '(cd "$s" && cp "$own" .)' 'set -C; echo x >"$d/devserver" && rm "$d/devserver"' 'rm "$d/devserver.lock"'
		'ln -s x "$d/devserver.lock" && rm "$d/devserver.lock"' 'mkdir "$d/devserver.lock" && rmdir "$d/devserver.lock"'
	)
	op=${ops[RANDOM % ${#ops[@]}]}
	said=$( (eval "$op") 2>&1 >/dev/null </dev/null)
	status=$?
	rm -rf "$OWN"/taken "$OWN"/alias
	case $said in
	*busy*) answer=EBUSY ;;
	*exist*lready* | *"File exists"* | *"cannot overwrite existing"*) answer=EEXIST ;;
	*"No such file"* | *"not found"* | *anish*) answer=ENOENT ;;
	*"not empty"*) answer=ENOTEMPTY ;;
	*) if [ $status = 0 ]; then answer=ok; else answer="status $status: ${said//$'\n'/ }"; fi ;;
	esac
	printf '%s\t%s\n' "$op" "$answer"
done
`
