//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A subject is something that serves a directory. In its command, {src} is the
// directory, {mnt} the mount point and {state} where it may keep its state.
type subject struct {
	Name    string   `json:"name"`
	Command []string `json:"command,omitempty"` // in the foreground; none for the bare directory
	ours    bool     // a stagefs
	main    bool     // the stagefs that is measured in all states

	// Transport is how the kernel's requests come to a stagefs, as it says itself.
	Transport string `json:"transport,omitempty"`
	narrow    bool   // left out of the steps that would take too long
	calls     bool   // knows no more than works of single calls need
}

// MarshalJSON leaves out where the program is on the machine.
func (s subject) MarshalJSON() ([]byte, error) {
	type plain subject
	p := plain(s)
	if len(p.Command) > 0 {
		p.Command = slices.Clone(p.Command)
		p.Command[0] = filepath.Base(p.Command[0])
	}
	return json.Marshal(p)
}

const (
	bareName = "bare"
	oursName = "stagefs"
)

// subjects are what was asked for and this machine offers; notes tell what is
// left out, and why. What must be built comes to binDir.
func subjects(o options, binDir string) (found []subject, notes []string) {
	found = append(found, subject{Name: bareName})
	wanted := stagefsSubjects(o.stagefs)
	for _, p := range peers() {
		if !o.subjects.MatchString(p.Name) {
			continue
		}
		bin, err := p.find(binDir)
		if err != nil {
			notes = append(notes, p.Name+" is left out: "+err.Error())
			continue
		}
		p.Command = append(bin, p.Command...)
		wanted = append(wanted, p.subject)
	}
	for _, p := range o.peers {
		name, command, _ := strings.Cut(p, "=")
		wanted = append(wanted, subject{Name: name, Command: strings.Fields(command)})
	}
	for _, s := range wanted {
		if o.subjects.MatchString(s.Name) {
			found = append(found, s)
		}
	}
	return found, notes
}

// A peer is another FUSE filesystem that shows a directory as it is. Its
// command lacks the program until that was found.
type peer struct {
	subject
	find func(binDir string) (program []string, err error)
}

func peers() []peer {
	installed := func(name string) func(string) ([]string, error) {
		return func(string) ([]string, error) {
			bin, err := exec.LookPath(name)
			return []string{bin}, err
		}
	}
	return []peer{
		{subject{Name: "loopback", Command: []string{"-q", "-directmount", "{mnt}", "{src}"}}, buildLoopback},
		{subject{Name: "bindfs", Command: []string{"-f", "{src}", "{mnt}"}}, installed("bindfs")},
		{subject{Name: "passthrough_hp", Command: []string{"{src}", "{mnt}"}}, passthrough},
		{subject{Name: "passthrough_hp ring", Command: []string{"-o", "io_uring", "{src}", "{mnt}"}, narrow: true}, ringPassthrough},
		{subject{Name: "floor", Command: []string{"auto", "{src}", "{mnt}"}, calls: true}, buildFloor},
		{subject{Name: "passthrough_ll", Command: []string{"-f", "-o", "source={src}", "{mnt}"}, narrow: true}, buildExample},
		{subject{Name: "mergerfs", Command: []string{"-f", "{src}", "{mnt}"}, narrow: true}, installed("mergerfs")},
	}
}

// passthrough finds libfuse's example, which has come to go to the background.
func passthrough(string) ([]string, error) {
	bin, err := exec.LookPath("passthrough_hp")
	if err == nil && helpHas(bin, "--foreground", "--help") {
		return []string{bin, "--foreground"}, nil
	}
	return []string{bin}, err
}

// ringPassthrough finds it if it and the kernel know FUSE over io_uring
// (libfuse 3.18, Linux 6.14).
func ringPassthrough(string) ([]string, error) {
	program, err := passthrough("")
	switch {
	case err != nil:
		return nil, err
	case !ringOffered():
		return nil, errors.New("enable_uring of the kernel's fuse module is off")
	case !helpHas(program[0], "io_uring", "--help"):
		return nil, errors.New("this libfuse has no io_uring")
	}
	return program, nil
}

// stagefsSubjects are the mount as it comes, and, where it can be told to use
// another one, each slower transport.
func stagefsSubjects(bin string) []subject {
	command := func(opts ...string) []string {
		c := append([]string{bin, "mount", "--state-dir", "{state}"}, opts...)
		return append(c, "--", "{src}", "{mnt}")
	}
	found := []subject{{Name: oursName, ours: true, main: true, Command: command()}}
	if !helpHas(bin, "--transport", "mount", "--help") {
		return found
	}
	for _, way := range []string{"threads", "fuse"} {
		if way == "threads" && !ringOffered() {
			continue // what it takes by itself then
		}
		found = append(found, subject{Name: oursName + " " + way, ours: true, Command: command("--transport", way)})
	}
	return found
}

// ringOffered tells whether the kernel lets FUSE use io_uring.
func ringOffered() bool {
	on, _ := os.ReadFile("/sys/module/fuse/parameters/enable_uring")
	return strings.TrimSpace(string(on)) == "Y"
}

func helpHas(bin, word string, args ...string) bool {
	out, _ := exec.Command(bin, args...).CombinedOutput()
	return strings.Contains(string(out), word)
}

// buildLoopback builds go-fuse's own example, in the version of go.mod.
func buildLoopback(binDir string) ([]string, error) {
	return buildPackage(binDir, "loopback", "github.com/hanwen/go-fuse/v2/example/loopback")
}

// buildFloor builds what tells the cost of Go and the transport from stagefs's own.
func buildFloor(binDir string) ([]string, error) {
	return buildPackage(binDir, "floor", "github.com/stagefs/stagefs/tests/bench/floor")
}

func buildPackage(binDir, name, path string) ([]string, error) {
	bin := filepath.Join(binDir, name)
	cmd := exec.Command("go", "build", "-trimpath", "-o", bin, path)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	return []string{bin}, built(cmd)
}

// buildExample builds passthrough_ll, which libfuse3-dev brings as source.
func buildExample(binDir string) ([]string, error) {
	const name = "passthrough_ll"
	if have, err := exec.LookPath(name); err == nil {
		return []string{have}, nil
	}
	src := "/usr/share/doc/libfuse3-dev/examples/" + name + ".c"
	if _, err := os.Stat(src); err != nil {
		return nil, err
	}
	bin := filepath.Join(binDir, name)
	return []string{bin}, built(exec.Command("sh", "-c", `gcc -O2 -o "$1" "$2" $(pkg-config fuse3 --cflags --libs)`, "sh", bin, src))
}

func built(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building it: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// raiseFiles lets the peers that keep a descriptor for each file have as many
// as there may be.
func raiseFiles() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
}
