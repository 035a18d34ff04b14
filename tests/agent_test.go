//go:build linux

package tests

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An Agent is a process of its own that makes system calls when told to: the
// holder, the stranger, the child. It runs this test binary again (agentMain)
// and talks over a socket, so that it can be started by anything: by the
// test, by another agent, by a shell in the middle of a script.
type Agent struct {
	t    *testing.T
	Pid  int
	ends int // pidfd: once it is dead, others may get its number soon (TestH2Numbers)
	conn net.Conn
	in   *bufio.Reader
}

// agentAs starts an agent under a user id, as a child of the test process.
func agentAs(t *testing.T, uid uint32) *Agent {
	t.Helper()
	if uid == 0 {
		return agentBy(t, nil)
	}
	return agentBy(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}})
}

// agentOfSession starts one as root that leads a session.
func agentOfSession(t *testing.T) *Agent {
	t.Helper()
	return agentBy(t, &syscall.SysProcAttr{Setsid: true})
}

// agentBy starts one as a child that is made in a way of its own: with another user, say, or
// in a process group.
func agentBy(t *testing.T, attr *syscall.SysProcAttr) *Agent {
	t.Helper()
	return awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = attr
		startCmd(t, cmd)
	})
}

// agent starts one as root, and stranger one as the user nobody.
func agent(t *testing.T) *Agent    { t.Helper(); return agentAs(t, 0) }
func stranger(t *testing.T) *Agent { t.Helper(); return agentAs(t, nobody) }

const nobody = 65534

func agentCmd(sock string) *exec.Cmd {
	cmd := exec.Command(agentBin())
	cmd.Env = append(os.Environ(), envAgent+"="+sock)
	cmd.Dir = "/"
	return cmd
}

// awaitAgent waits for the agent that start causes to come up on the socket.
func awaitAgent(t *testing.T, start func(sock string)) *Agent {
	t.Helper()
	sock := filepath.Join(tempDir(t), "s")
	l, err := net.Listen("unix", sock)
	mustDo(t, err)
	defer l.Close()
	mustDo(t, os.Chmod(sock, 0o777))
	start(sock)
	l.(*net.UnixListener).SetDeadline(time.Now().Add(patience))
	conn, err := l.Accept()
	if err != nil {
		t.Fatalf("the agent did not come up: %v", err)
	}
	a := &Agent{t: t, conn: conn, in: bufio.NewReader(conn)}
	hello, err := a.in.ReadString('\n')
	mustDo(t, err)
	a.Pid, err = strconv.Atoi(strings.TrimSpace(hello))
	mustDo(t, err)
	a.ends = peerOf(t, conn)
	t.Cleanup(func() {
		defer unix.Close(a.ends)
		conn.Close() // ends it, with a status that hands nothing over (R5)
		a.awaitEnd("the agent ends")
	})
	return a
}

// peerOf is a pidfd of the process at the other end, which may call itself by
// another number.
func peerOf(t *testing.T, conn net.Conn) (pidfd int) {
	t.Helper()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	mustDo(t, err)
	var peer *unix.Ucred
	var failed error
	mustDo(t, raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}))
	mustDo(t, failed)
	pidfd, err = unix.PidfdOpen(int(peer.Pid), 0)
	mustDo(t, err)
	return pidfd
}

func (a *Agent) awaitEnd(what string) { a.t.Helper(); awaitEndOf(a.t, what, a.Pid, a.ends) }

// Child starts a descendant of the agent; setsid gives it its own session.
func (a *Agent) Child(how ...string) *Agent {
	a.t.Helper()
	return awaitAgent(a.t, func(sock string) { a.must(append([]string{"fork", sock}, how...)...) })
}

// Try runs a command and tells the errno's name, "ok" for none.
func (a *Agent) Try(args ...string) string {
	a.t.Helper()
	status, _ := a.call(args)
	return status
}

// Get runs a command that has to succeed, and gives back what it printed.
func (a *Agent) Get(args ...string) string {
	a.t.Helper()
	status, out := a.call(args)
	if status != "ok" {
		a.t.Fatalf("%q = %s, want ok", args, status)
	}
	return out
}

func (a *Agent) must(args ...string) { a.t.Helper(); a.Get(args...) }

// want runs a command and reports an error unless its errno is one of those in
// wants, a list with bars between.
func (a *Agent) want(wants string, args ...string) {
	a.t.Helper()
	if got := a.Try(args...); !oneOf(got, wants) {
		a.t.Errorf("%q = %s, want %s", args, got, wants)
	}
}

func oneOf(got, wants string) bool {
	for _, want := range strings.Split(wants, "|") {
		if got == want {
			return true
		}
	}
	return false
}

// Start sends a command without waiting for the answer, which the function
// that it returns collects.
func (a *Agent) Start(args ...string) func() string {
	a.t.Helper()
	a.send(args)
	return func() string { a.t.Helper(); status, _ := a.receive(); return status }
}

// StartGet is like [Agent.Start] for a command that has to succeed.
func (a *Agent) StartGet(args ...string) func() string {
	a.t.Helper()
	a.send(args)
	return func() string {
		a.t.Helper()
		status, out := a.receive()
		if status != "ok" {
			a.t.Fatalf("%q = %s, want ok", args, status)
		}
		return out
	}
}

func (a *Agent) call(args []string) (status, out string) {
	a.t.Helper()
	a.send(args)
	return a.receive()
}

func (a *Agent) send(args []string) {
	a.t.Helper()
	var line strings.Builder
	for _, arg := range args {
		line.WriteString(strconv.QuoteToASCII(arg) + " ")
	}
	_, err := fmt.Fprintln(a.conn, line.String())
	mustDo(a.t, err)
}

func (a *Agent) receive() (status, out string) {
	a.t.Helper()
	a.conn.SetReadDeadline(time.Now().Add(2 * patience))
	line, err := a.in.ReadString('\n')
	if err != nil {
		a.t.Fatalf("the agent does not answer: %v", err)
	}
	words, err := splitWords(line)
	mustDo(a.t, err)
	return words[0], words[1]
}

// Kill ends the agent with SIGKILL.
func (a *Agent) Kill() {
	a.t.Helper()
	mustDo(a.t, unix.PidfdSendSignal(a.ends, unix.SIGKILL, nil, 0))
	a.awaitEnd("the agent dies")
}

// Exit ends it with a status of its own.
func (a *Agent) Exit(status int) {
	a.t.Helper()
	a.send([]string{"exit", strconv.Itoa(status)})
	a.awaitEnd("the agent exits")
}

// agentMain is the other end: it obeys one line after the other.
func agentMain(sock string) int {
	conn, err := net.Dial("unix", sock)
	if err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		return 1
	}
	os.Unsetenv(envAgent) // what it runs is no agent
	syscall.Umask(0)
	fmt.Fprintln(conn, os.Getpid())
	h := hands{fds: map[string]int{}, maps: map[string][]byte{}}
	in := bufio.NewScanner(conn)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		words, err := splitWords(in.Text())
		var out string
		if err == nil {
			out, err = h.do(words)
		}
		fmt.Fprintf(conn, "%q %s\n", errnoName(err), strconv.QuoteToASCII(out))
	}
	return 3
}

// splitWords undoes the quoting of a line.
func splitWords(line string) ([]string, error) {
	var words []string
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			return nil, err
		}
		word, _ := strconv.Unquote(quoted)
		words = append(words, word)
		line = line[len(quoted):]
	}
	if len(words) == 0 {
		return nil, errors.New("empty line")
	}
	return words, nil
}

// errnoName is "ok", the name of the errno in err, or the error's text.
func errnoName(err error) string {
	if err == nil {
		return "ok"
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if name := unix.ErrnoName(errno); name != "" {
			return name
		}
		return fmt.Sprintf("errno %d", int(errno))
	}
	return err.Error()
}
