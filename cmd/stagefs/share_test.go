//go:build linux

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/lockstate"
)

// TestDocumented keeps the manual page, the completion and the README complete.
func TestDocumented(t *testing.T) {
	for _, file := range []string{"share/stagefs.1", "share/stagefs.bash", "../../README.md"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(data), `\-`, "-")
		for _, cmd := range (&command{}).app().Commands {
			if !strings.Contains(text, cmd.Name) {
				t.Errorf("%s does not speak of the command %s", file, cmd.Name)
			}
			for _, flag := range cmd.Flags {
				name := "-" + flag.(cli.DocGenerationFlag).Names()[0]
				if !strings.Contains(text, name) {
					t.Errorf("%s does not speak of %s -%s", file, cmd.Name, name)
				}
			}
		}
	}
}

// TestStatuses: the README and the manual page tell of each exit status, and of no
// others.
func TestStatuses(t *testing.T) {
	read := func(file, from, to, pattern string) []string {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, text, _ := strings.Cut(string(data), from)
		text, _, _ = strings.Cut(text, to)
		var all []string
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			all = append(all, strings.Split(strings.ReplaceAll(m[1], " ", ""), ",")...)
		}
		slices.Sort(all)
		return all
	}
	want := append(read("exit.go", "const (", "\n)", `(?m)^\texit\w+ += (\d+)`), "126", "127")
	want[slices.Index(want, "128")] += "+n"
	slices.Sort(want)
	for file, got := range map[string][]string{
		"the README":      read("../../README.md", "Exit statuses:", "##", `(?m)^\| (\d.*?) \|`),
		"the manual page": read("share/stagefs.1", ".Sh EXIT STATUS", ".El", `(?m)^\.It (.*)`),
	} {
		if !slices.Equal(got, want) {
			t.Errorf("%s has the statuses %q, want %q", file, got, want)
		}
	}
}

// TestUnit: the daemon is followed by the next one without a word to systemd, which would
// restart what depends on the unit, and their locks would end; and not in the background,
// where systemd would kill it. systemd starts both again however often they are killed: the
// unit must not run into the limit of starts, which is five in ten seconds. Nor is it
// stopped, and the mount with it, where the daemon was killed for want of memory. It waits
// for the mount that its state is on. What does not mend by itself is not tried at once.
func TestUnit(t *testing.T) {
	const unit = "share/stagefs@.service"
	data, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	section := make(map[string]string)
	in := ""
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			in = line
		}
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			section[in+key] = value
		}
	}
	for key, want := range map[string]string{
		"[Unit]StartLimitIntervalSec": "0", "[Service]Restart": "on-failure", "[Service]OOMPolicy": "continue", "[Unit]RequiresMountsFor": "%f /var/lib/stagefs",
		"[Service]Type": "notify", "[Service]NotifyAccess": "all",
	} {
		if got := section[key]; got != want {
			t.Errorf("%s=%s, want %s", key, got, want)
		}
	}
	start := section["[Service]ExecStart"]
	if !strings.Contains(start, `mount --supervise "$$@" --daemon=false -- "$$dir"`) || !strings.HasSuffix(start, " %i $STAGEFS_OPTIONS") {
		t.Errorf("ExecStart=%s", start)
	}
	if strings.Contains(start+section["[Service]ExecReload"], "%f") {
		t.Error("the path of the directory is an argument, in which systemd expands ${ } and $$")
	}
	// What needs somebody who mends it is not tried again at once; where everybody waits for
	// the next daemon, there is no pause.
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "sleep"), []byte("#!/bin/sh\necho \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	post := strings.ReplaceAll(section["[Service]ExecStopPost"], "$$", "$")
	never := strings.Fields(section["[Service]RestartPreventExitStatus"])
	for status, pause := range map[string]string{
		"69": "2\n", "70": "2\n", "71": "2\n", "73": "2\n", "74": "2\n",
		"KILL": "", "ABRT": "", "2": "", "0": "", "143": "", "": "",
	} {
		cmd := exec.Command("/bin/sh", "-c", post)
		cmd.Env = []string{"PATH=" + bin, "EXIT_STATUS=" + status}
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != pause || slices.Contains(never, status) {
			t.Errorf("after the exit status %q: %q, %v, want %q; never again after %q", status, out, err, pause, never)
		}
	}
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		if os.Getenv("STAGEFS_REQUIRE") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	if out, err := exec.Command(verify, "verify", "--man=no", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// TestCompletion: what bash offers. A = is a word of its own, as it is by
// default, or part of one.
func TestCompletion(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip(err)
	}
	for line, want := range map[string]string{
		"stagefs unm":                        "unmount",
		"stagefs unmount --l":                "--lazy",
		"stagefs mount --owner = gr":         "group",
		"stagefs mount --owner=gr":           "--owner=group",
		"stagefs mount --owner gr":           "group",
		"stagefs mount --on-crash = ":        "keep destroy quarantine",
		"stagefs run -w /":                   "",
		"stagefs locks -w /us":               "/usr",
		"stagefs acquire -w /us":             "",
		"stagefs run --wait = /":             "",
		"stagefs run -E /":                   "",
		"stagefs mount --shared-name /":      "",
		"stagefs run --wait = 5 D /bin/true": "/bin/true",
		"stagefs run --wait 5 D /bin/true":   "/bin/true",
		"stagefs run -w 5 --why = x /usr":    "/usr",
	} {
		script := `source share/stagefs.bash; IFS=' ' read -ra COMP_WORDS <<<"$1"; [[ $1 == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _stagefs 2>/dev/null; echo "${COMPREPLY[*]}"`
		out, err := exec.Command(bash, "-c", script, "bash", line).Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%q completes to %q, want %q (%v)", line, got, want, err)
		}
	}
}

// TestDocumentedJSON: the manual page names each field of what is printed as JSON,
// and each event and reason.
func TestDocumentedJSON(t *testing.T) {
	data, err := os.ReadFile("share/stagefs.1")
	if err != nil {
		t.Fatal(err)
	}
	words := make(map[string]bool)
	for _, word := range strings.FieldsFunc(strings.ReplaceAll(string(data), `\-`, "-"), func(r rune) bool { return strings.ContainsRune(" ,;\n", r) }) {
		words[word] = true
	}
	for _, v := range []any{
		lockstate.Listing{},
		lockstate.Row{},
		lockstate.Waiter{},
		lockstate.Orphan{},
		lockstate.Blocker{},
		lockstate.Denial{},
		lockstate.Event{},
		lockstate.Answer{},
		lockstate.Quarantined{},
		finding{},
	} {
		for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && !words[name] {
				t.Errorf("the manual page does not speak of the field %q of %T", name, v)
			}
		}
	}
	for _, word := range []string{
		lockstate.EventAcquired, lockstate.EventRefused, lockstate.EventWaiting, lockstate.EventHandedOver, lockstate.EventReleased,
		lockstate.EventLost, lockstate.EventBroken, lockstate.EventQuarantined, lockstate.EventDestroyed, lockstate.EventsMissed,
		string(lockstate.Unlinked), string(lockstate.Unlocked), string(lockstate.Removed), string(lockstate.Exited),
		string(lockstate.Narrowed), string(lockstate.Replaced), string(lockstate.Given), string(lockstate.Failed),
		string(lockstate.Broken), string(lockstate.Expired), string(lockstate.Abandoned),
	} {
		if !words[word] {
			t.Errorf("the manual page does not speak of %q", word)
		}
	}
}
