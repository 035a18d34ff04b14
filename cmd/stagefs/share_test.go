//go:build linux

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
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

// TestUnit: systemd starts the daemon again however often it is killed: the unit
// must not run into the limit of starts, which is five in ten seconds.
func TestUnit(t *testing.T) {
	data, err := os.ReadFile("share/stagefs@.service")
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
	for key, want := range map[string]string{"[Unit]StartLimitIntervalSec": "0", "[Service]Restart": "on-failure"} {
		if got := section[key]; got != want {
			t.Errorf("%s=%s, want %s", key, got, want)
		}
	}
}
