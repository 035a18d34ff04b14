//go:build linux

// Package tests exercises stagefs from outside: the real binary, real mounts
// and real programs as clients. The rules that the tests are named after (C3,
// W1 …) are listed by go doc ./lockstate.
//
// # Processes
//
// A lock's descendants are holders (H2), and every process here descends from
// the test process. So the test process itself never takes a lock on a mount:
// it prepares content in the backing directory, and leaves all that concerns a
// lock to agents, which are this same binary run again (see agent_test.go).
//
// # Environment
//
//	STAGEFS_BIN         the binary to test; default: cmd/stagefs is built
//	STAGEFS_REQUIRE     1: what is missing on the machine fails the test instead of skipping it
//	STAGEFS_MOUNT_OPTS  further options of every mount, such as --compat
//	STAGEFS_EXCLUSIVE   1: nobody else uses the machine, so its clock may be stepped
//	STAGEFS_TEST_DIR    where static directories are made; default: the temporary directory
//	STAGEFS_KILLS       how many owners TestR4Time kills
//	STAGEFS_SEED        the seed of the scripts of TestM2Locks
package tests

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// These variables of the environment tell a process of this run what it is.
// envRoot also marks all that the run ever starts, so that what is left over
// can be found.
const (
	envRoot    = "STAGEFS_TEST_ROOT"    // directory of the run
	envAgent   = "STAGEFS_TEST_AGENT"   // socket of an agent's test
	envJanitor = "STAGEFS_TEST_JANITOR" // directory to clear when stdin ends
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(envAgent) != "":
		os.Exit(agentMain(os.Getenv(envAgent)))
	case os.Getenv(envForbid) != "" && os.Getenv(envRoot) != "":
		os.Exit(forbidMain(os.Getenv(envForbid)))
	case os.Getenv(envInject) != "" && os.Getenv(envRoot) != "" && len(os.Args) > 1 && oneOf(os.Args[1], "mount|umount"):
		os.Exit(injectMain(os.Getenv(envInject)))
	case os.Getenv(envWorker) != "":
		os.Exit(workerMain(os.Getenv(envWorker)))
	case os.Getenv(envJanitor) != "":
		os.Exit(janitorMain(os.Getenv(envJanitor)))
	}
	os.Exit(runSuite(m))
}

// heedSignals has the children of the tests heed signals that whoever started
// the tests, nohup(1) perhaps, had them ignore.
func heedSignals() {
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

func runSuite(m *testing.M) int {
	heedSignals()
	root, err := setUp()
	defer os.RemoveAll(root)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests:", err)
		return 1
	}
	// The janitor outlives a test process that panics or runs into its time
	// limit, and leaves no mount or daemon behind then.
	pipe, err := startJanitor(root)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests:", err)
		return 1
	}
	defer pipe.Close()

	code := m.Run()
	for _, left := range leftOvers(root) {
		fmt.Fprintln(os.Stderr, "FAIL: left over at the end:", left)
		code = 1
	}
	return code
}

// setUp makes the run's directory with the two programs in it. Ordinary users
// must be able to run both, which they can't where go test puts this binary.
func setUp() (root string, err error) {
	root, err = os.MkdirTemp(realFS(), "stagefs-test-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(root, 0o755); err != nil {
		return root, err
	}
	os.Setenv(envRoot, root)
	for _, name := range []string{"MAKEFLAGS", "MFLAGS", "MAKELEVEL"} { // a client's make is not one with what runs the tests
		os.Unsetenv(name)
	}
	os.Setenv("PATH", clientPath())
	if err := copyFile("/proc/self/exe", agentBin(), 0o755); err != nil {
		return root, err
	}
	if bin := os.Getenv("STAGEFS_BIN"); bin != "" {
		return root, copyFile(bin, stagefsBin(), 0o755)
	}
	build := exec.Command("go", "build", "-trimpath", "-o", stagefsBin(), "../cmd/stagefs")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // it is to run where there is no libc
	if out, err := build.CombinedOutput(); err != nil {
		return root, fmt.Errorf("building cmd/stagefs: %w\n%s", err, out)
	}
	return root, nil
}

// clientPath has the system's own programs found first, which are what the
// tests need packages for, and no wrapper that takes longer than the program.
// The go that runs the tests stays before them.
func clientPath() string {
	dirs := []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	if tool, err := exec.LookPath("go"); err == nil {
		dirs = slices.Insert(dirs, 0, filepath.Dir(tool))
	}
	return strings.Join(append(dirs, os.Getenv("PATH")), ":")
}

func testRoot() string   { return os.Getenv(envRoot) }
func stagefsBin() string { return filepath.Join(testRoot(), "stagefs") }
func agentBin() string   { return filepath.Join(testRoot(), "agent") }

// realFS is a directory on a filesystem with all that M2 speaks of.
func realFS() string {
	if dir := os.Getenv("STAGEFS_TEST_DIR"); dir != "" {
		return dir
	}
	for _, dir := range []string{os.TempDir(), "/var/tmp"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type != unix.TMPFS_MAGIC && st.Type != unix.FUSE_SUPER_MAGIC {
			return dir
		}
	}
	return os.TempDir()
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// leftOvers describes the processes and mounts of this run that still are.
func leftOvers(root string) []string {
	var left []string
	for mnt := range mountsBelow(root) {
		left = append(left, "mount "+mnt)
	}
	for _, pid := range markedPids(root) {
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		left = append(left, fmt.Sprintf("process %d: %q", pid, cmdline))
	}
	return left
}

// markedPids finds the processes that inherited this run's mark. Zombies show
// no environment, and so don't count.
func markedPids(root string) []int { return pidsWithEnv(envRoot + "=" + root) }

// pidsWithCommand finds the processes that were started as that program.
func pidsWithCommand(bin string) []int {
	return pidsWhere("cmdline", func(line string) bool { return strings.HasPrefix(line, bin+"\x00") })
}

// pidsWithEnv finds the processes whose environment has a line.
func pidsWithEnv(line string) []int {
	return pidsWhere("environ", func(env string) bool { return strings.Contains("\x00"+env, "\x00"+line+"\x00") })
}

// pidsWhere finds the other processes of whose file in /proc that is so.
func pidsWhere(file string, is func(content string) bool) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/" + file)
	for _, path := range paths {
		content, _ := os.ReadFile(path)
		if pid := atoi(strings.Split(path, "/")[2]); pid != os.Getpid() && is(string(content)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// mountsBelow has the mount points below dir, with their device numbers.
func mountsBelow(dir string) map[string]string {
	info, _ := os.ReadFile("/proc/self/mountinfo")
	mounts := map[string]string{}
	octal := regexp.MustCompile(`\\[0-7]{3}`)
	for line := range strings.Lines(string(info)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		// Blanks and the like are in octal there, proc_pid_mountinfo(5).
		at := octal.ReplaceAllStringFunc(f[4], func(o string) string {
			b, _ := strconv.ParseUint(o[1:], 8, 8)
			return string([]byte{byte(b)})
		})
		if strings.HasPrefix(at, dir+"/") {
			mounts[at] = f[2]
		}
	}
	return mounts
}
