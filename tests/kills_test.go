package tests

import (
	"bufio"
	"flag"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

var kills = flag.Int("kills", 100, "owners that TestR4Kills kills")

// R4: the owner dies, however: its locks end. How soon is measured from the
// return of kill(2) to the moment when the directory has no governing lock any
// more, seen through its attributes, which look at no process themselves.
func TestR4Kills(t *testing.T) {
	m := mount(t)
	var took []time.Duration
	for i := range *kills {
		dir := m.At("d" + itoa(i))
		cmd := exec.Command("dash", "-c", `mkdir "$1" && echo x >"$1/f" && echo && exec sleep 1000`, "-", dir)
		out, err := cmd.StdoutPipe()
		mustDo(t, err)
		mustDo(t, cmd.Start())
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // no sooner: a dead one is a zombie here
		_, err = bufio.NewReader(patientReader{out.(*os.File)}).ReadString('\n')
		mustDo(t, err)
		if !governed(dir) {
			t.Errorf("%s is not held", dir)
		}
		mustDo(t, cmd.Process.Kill())
		killed := time.Now()
		eventuallySpin(t, "the lock of a killed owner to end", func() bool { return !governed(dir) })
		took = append(took, time.Since(killed))
		cmd.Wait()
	}
	wantPrompt(t, "from kill -9 to a free directory", took)
}

func governed(path string) bool {
	var buf [64]byte
	_, err := syscall.Getxattr(path, "user.stagefs.kind", buf[:])
	return err == nil
}

// eventuallySpin is eventually without pauses, for what takes microseconds.
func eventuallySpin(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
