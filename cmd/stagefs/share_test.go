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
