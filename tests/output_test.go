//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestCommandOutput: output that is lost is an error, whatever the command, and
// a lock whose token was not told is not kept.
func TestCommandOutput(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, args := range []string{"locks", "locks --json", "why D", "quarantine .", "doctor", "doctor --json", "version", "version --handover", "--help", "mount --help", "help run", "acquire D", "acquire --json D"} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		mustDo(t, err)
		cmd := exec.Command(stagefsBin(), strings.Fields(args)...)
		cmd.Dir, cmd.Stdout = m.Path, full
		r := runCmd(t, cmd)
		full.Close()
		if r.Status != 74 || !strings.Contains(r.Err, "no space left on device") {
			t.Errorf("stagefs %s >/dev/full: %v, want 74", args, r)
		}
		m.awaitFree("D")
	}
}
