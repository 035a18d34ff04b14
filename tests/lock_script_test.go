//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestA4Scripts: in a script, the process that opened the descriptor owns what
// flock(1) locks on it, so all its children write; or flock(1) owns it for its
// command.
func TestA4Scripts(t *testing.T) {
	need(t, "flock")
	m := mount(t)
	wait := `: >"$TMP/reached"; read line <"$TMP/go"`
	for _, shell := range []string{"dash", "bash"} {
		for _, s := range []struct{ name, script string }{
			{"exec 9", `exec 9>"$D/devserver"; flock 9 || exit 1; mkdir "$D/sub"; cp "$0" "$D/sub/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"`},
			{"exec 9 -n", `exec 9>"$D/devserver"; flock -n 9 || exit 1; cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"; flock -u 9`},
			{"exec 9<>", `exec 9<>"$D/devserver"; flock -x 9 || exit 1; cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"; exec 9>&-`},
			{"exec 9<", `exec 9<"$D/devserver"; flock 9 || exit 1; cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"`},
			{"subshell", `( flock 9 || exit 1; cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late" ) 9>"$D/devserver"`},
			{"group", `{ flock 9 || exit 1; cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"; } 9>"$D/devserver"`},
			{"command", `flock "$D/devserver" sh -c 'cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"' "$0"`},
			{"command -n", `flock -n "$D/devserver" sh -c 'cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"' "$0"`},
			{"command -o", `flock -o "$D/devserver" sh -c 'cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"' "$0"`},
			{"command -F", `flock -F "$D/devserver" sh -c 'cp "$0" "$D/copy" || exit 1; ` + wait + `; cp "$0" "$D/late"' "$0"`},
			{"command -c", `flock "$D/devserver" -c 'cp "/bin/true" "$D/copy" || exit 1; ` + wait + `; cp /bin/true "$D/late"'`},
		} {
			for _, made := range []string{"there", "created"} {
				if s.name == "exec 9<" && made == "created" {
					continue // it has to be there
				}
				t.Run(shell+"/"+s.name+"/"+made, func(t *testing.T) {
					need(t, shell)
					m := m.on(t)
					dir := strings.NewReplacer(" ", "", "<", "l", ">", "g").Replace(shell + s.name + made)
					openDir(t, m.Back(dir))
					if made == "there" {
						m.lockFile(dir)
					}
					script(t, m, dir, shell, s.script)
				})
			}
		}
	}
}

func script(t *testing.T, m *Mount, dir, shell, script string) {
	t.Helper()
	tmp := tempDir(t)
	mustDo(t, syscall.Mkfifo(filepath.Join(tmp, "go"), 0o600))
	cmd := command(shell, "-c", script, "/etc/hostname")
	cmd.Env = append(cmd.Env, "TMP="+tmp, "D="+m.At(dir))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p := startCmd(t, cmd)
	t.Cleanup(func() { p.group.signal(syscall.SIGKILL) })
	eventually(t, "the script has the lock", func() bool {
		select {
		case <-p.done:
			t.Fatalf("the script ended: %v", p.Wait())
		default:
		}
		_, err := os.Stat(filepath.Join(tmp, "reached"))
		return err == nil
	})
	wantKeptOut(t, m, dir, locker(t))
	row := m.Locks()[dir]
	if row.Protocol != "flock" || !running(row.Pid) {
		t.Errorf("row: %+v, want a living flock owner", row)
	}
	mustDo(t, os.WriteFile(filepath.Join(tmp, "go"), []byte("go\n"), 0o600))
	if r := p.Wait(); r.Status != 0 || r.Err != "" {
		t.Errorf("the script: %v", r)
	}
	m.awaitFree(dir)
	for _, name := range []string{"devserver", "late"} {
		if _, err := os.Stat(m.Back(dir, name)); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	}
}
