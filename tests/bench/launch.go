//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A client is a running job.
type client struct {
	cmd    *exec.Cmd
	in     *os.File // the sign to go
	out    *bufio.Reader
	outEnd *os.File
	done   *os.File // reads EOF when the client has ended
	errs   *bytes.Buffer
}

// environ is what all clients and daemons of a run get: the mark, and nothing
// that makes tools behave differently from one machine to the other.
func environ(root string) []string {
	var env []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if name != envJob && name != envJanitor && !strings.HasPrefix(name, "LC_") && !strings.HasPrefix(name, "GIT_") && name != "GOFLAGS" {
			env = append(env, e)
		}
	}
	return append(env, envRoot+"="+root, "LC_ALL=C", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "GIT_TERMINAL_PROMPT=0")
}

// start brings a client up to the point where it waits for the sign.
func start(root string, j job, env ...string) (*client, error) {
	cmd, err := jobCommand(j)
	if err != nil {
		return nil, err
	}
	cmd.Env = append(append(environ(root), env...), cmd.Env...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c := &client{cmd: cmd, errs: new(bytes.Buffer)}
	var theirs [3]*os.File
	if theirs[0], c.in, err = os.Pipe(); err != nil {
		return nil, err
	}
	if c.outEnd, theirs[1], err = os.Pipe(); err != nil {
		return nil, err
	}
	if c.done, theirs[2], err = os.Pipe(); err != nil {
		return nil, err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], c.errs
	cmd.ExtraFiles = theirs[2:]
	err = cmd.Start()
	for _, f := range theirs {
		f.Close()
	}
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(c.outEnd)
	if line, err := c.out.ReadString('\n'); line != "ready\n" {
		c.end()
		return nil, fmt.Errorf("%s in %s does not get ready: %v %s", j.Kind, j.Dir, err, c.said())
	}
	return c, nil
}

// said is what the client complained of: the beginning, if every file fails.
func (c *client) said() string {
	const enough = 400
	said := strings.TrimSpace(c.errs.String())
	if len(said) > enough {
		said = said[:enough] + " and so on"
	}
	return said
}

// end kills what still runs, and waits.
func (c *client) end() error {
	unix.Kill(-c.cmd.Process.Pid, unix.SIGKILL)
	return c.wait()
}

func (c *client) wait() error {
	err := c.cmd.Wait()
	c.in.Close()
	c.outEnd.Close()
	c.done.Close()
	if err != nil {
		return fmt.Errorf("%w: %s", err, c.said())
	}
	return nil
}

// killOn ends the client when the context ends, until the returned func is called.
func (c *client) killOn(ctx context.Context) func() bool {
	pid := c.cmd.Process.Pid
	return context.AfterFunc(ctx, func() { unix.Kill(-pid, unix.SIGKILL) })
}

// runTool runs a tool and takes its time, from the sign until it has ended.
func runTool(ctx context.Context, root string, j job, env ...string) (time.Duration, error) {
	j.Kind = "exec"
	c, err := start(root, j, env...)
	if err != nil {
		return 0, err
	}
	defer c.killOn(ctx)()
	began := now()
	c.in.Close()
	c.done.Read(make([]byte, 1))
	took := time.Duration(now() - began)
	if err := c.wait(); err != nil {
		return 0, fmt.Errorf("%q: %w", j.Argv, err)
	}
	return took, ctx.Err()
}

// runLoops runs clients at once. A row's time is from the first start to the
// last end; its count is that of all.
func runLoops(ctx context.Context, root string, jobs []job) ([]timing, error) {
	var clients []*client
	defer func() {
		for _, c := range clients {
			c.end()
		}
	}()
	for _, j := range jobs {
		c, err := start(root, j)
		if err != nil {
			return nil, err
		}
		defer c.killOn(ctx)()
		clients = append(clients, c)
	}
	for _, c := range clients {
		c.in.Close()
	}
	var found []result
	for len(clients) > 0 {
		c := clients[0]
		clients = clients[1:]
		var res result
		bad := json.NewDecoder(c.out).Decode(&res)
		if err := c.wait(); err != nil {
			return nil, fmt.Errorf("%s: %w", jobs[0].Kind, err)
		}
		if bad != nil {
			return nil, fmt.Errorf("%s: no result: %w", jobs[0].Kind, bad)
		}
		found = append(found, res)
	}
	return together(found), ctx.Err()
}

// together has a timing for each row of what several clients did at once. Only
// of one alone does it mean something how fast it was at its best.
func together(found []result) []timing {
	var rows []timing
	for i, s := range found[0].Spans {
		t := timing{}
		for _, res := range found {
			s.Start, s.End = min(s.Start, res.Spans[i].Start), max(s.End, res.Spans[i].End)
			t.ops += res.Ops[i]
		}
		t.took = time.Duration(s.End - s.Start)
		if len(found) == 1 && t.ops > 1 {
			t.best = time.Duration(found[0].Best[i])
		}
		if len(found) == 1 && i < len(found[0].Spent) {
			t.spent = found[0].Spent[i]
		}
		rows = append(rows, t)
	}
	return rows
}
