package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// `go build` locks its cache and its modules with flock; all of them are in the
// mount here. Two builds run at once, in a cache that is there: who makes a
// directory has it.
func TestM2GoBuild(t *testing.T) {
	need(t, "go")
	m := mount(t, "--depth", "2")
	dir := m.Back("src/prog")
	mustDo(t, os.MkdirAll(dir, 0o755))
	mustDo(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.org/prog\n\ngo 1.21\n"), 0o644))
	mustDo(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nfunc main() { println(\"built\") }\n"), 0o644))
	mustDo(t, os.MkdirAll(m.Back("cache"), 0o755))
	script := `cd src/prog && export GOCACHE="$PWD/../../cache/go" GOFLAGS=-mod=mod GOTOOLCHAIN=local CGO_ENABLED=0
		go build -o zero . || exit
		go build -o one . & go build -o two . & wait
		./one && ./two`
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir = m.Path
	r := startCmd(t, cmd).WaitFor(10 * patience) // it compiles the library, too
	if r.Status != 0 || strings.Count(r.Err, "built") != 2 {
		t.Errorf("go build in the mount: %v", r)
	}
}

// Java's FileChannel locks with fcntl. On the lock file that locks the
// directory, and a rival hears what Java says of any locked file.
func TestA8Java(t *testing.T) {
	need(t, "java")
	m := mount(t)
	openDir(t, m.Back("D"))
	plain := tempDir(t)
	mustDo(t, os.Mkdir(filepath.Join(plain, "D"), 0o777))
	program := filepath.Join(tempDir(t), "Lock.java")
	mustDo(t, os.WriteFile(program, []byte(`
import java.nio.channels.*;
import java.nio.file.*;
class Lock {
	public static void main(String[] a) throws Exception {
		Path p = Path.of(a[1], "devserver");
		try (FileChannel c = FileChannel.open(p, StandardOpenOption.CREATE, StandardOpenOption.WRITE)) {
			FileLock l = a[0].equals("try") ? c.tryLock() : c.lock();
			if (l == null) { System.out.println("busy"); System.exit(1); }
			System.out.println("locked");
			Files.writeString(Path.of(a[1], "content"), a[0]);
			if (a.length > 2) new ProcessBuilder("/bin/sh", "-c", a[2]).inheritIO().start().waitFor();
			l.release();
		}
		System.out.println("released");
	}
}
`), 0o644))
	java := "java -Xshare:auto -XX:TieredStopAtLevel=1 " + program
	for _, dir := range []string{plain, m.Path} {
		if r := sh(t, dir, java+` try D`); r.Out != "locked\nreleased\n" || r.Status != 0 {
			t.Errorf("%s, free: %v", dir, r)
		}
		if r := sh(t, dir, `exec 9>D/devserver; python3 -c 'import fcntl; fcntl.lockf(9, fcntl.LOCK_EX)
import os; os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "`+java+` try D")'`); r.Out != "busy\n" {
			t.Errorf("%s, held: %v", dir, r)
		}
	}
	// Others are kept out while Java has it, and its children are not.
	r := sh(t, m.Path, java+` wait D 'echo more >D/child && echo child wrote'`)
	if r.Out != "locked\nchild wrote\nreleased\n" {
		t.Errorf("wait: %v", r)
	}
	if l := m.Locks(); len(l) != 0 {
		t.Errorf("locks are left: %+v", l)
	}
}
