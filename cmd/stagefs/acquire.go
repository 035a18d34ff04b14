//go:build linux

package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/client"
)

func (c *command) acquireCommand() *cli.Command {
	return &cli.Command{
		Name:      "acquire",
		Usage:     "take a directory for the calling script, or for a client, and print the token",
		ArgsUsage: "[options] DIR",
		Flags: append(takeFlags(),
			&cli.BoolFlag{Name: "json", Usage: "print the lock as a JSON object"},
		),
		Action: c.acquireAction,
	}
}

// acquireAction takes the lock and exits at once: having changed nothing, it
// hands a lock of processes to its parent (R5).
func (c *command) acquireAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 1, 1); err != nil {
		return err
	}
	if ctx.IsSet("client-file") {
		return c.acquireByFile(ctx, ctx.String("client-file"))
	}
	id, err := clientID(ctx)
	if err != nil {
		return err
	}
	return c.acquireAs(ctx, id)
}

// acquireByFile takes a lease, and makes the file that hands its client's ID over.
func (c *command) acquireByFile(ctx *cli.Context, file string) error {
	id := ctx.String("client")
	if !ctx.IsSet("client") {
		var err error
		if id, err = randomID(); err != nil {
			return err
		}
	}
	if id == "" {
		return usagef("acquire: the client ID is empty")
	}
	if err := notStopped(file); err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	notifyUnignored(signals, append(stopSignals(), syscall.SIGQUIT)...)
	c.quits()
	if err := writeClientFile(file, id); err != nil {
		return err
	}
	go func() { // who gives up waiting will try again
		sig := <-signals
		os.Remove(file)
		dieBy(sig.(syscall.Signal))
	}()
	err := c.acquireAs(ctx, id)
	if err != nil {
		os.Remove(file) // it hands over nothing
	}
	return err
}

// randomID is an ID that nobody guesses. crypto/rand would cost each command
// the start of the crypto packages.
func randomID() (string, error) {
	b := make([]byte, 16)
	if _, err := unix.Getrandom(b, 0); err != nil { // so few come whole, getrandom(2)
		return "", err
	}
	return hex.EncodeToString(b), nil
}

func (c *command) acquireAs(ctx *cli.Context, id string) error {
	dir := ctx.Args().First()
	opts, until, cancel, err := takeOptions(ctx, id)
	if err != nil {
		return err
	}
	defer cancel()
	if err := awakeInTime(ctx, dir); err != nil {
		return err
	}
	d, err := findDir(dir)
	if err != nil {
		return err
	}
	var had uint64 // the token of the lock that the client, or the session, has already, and would keep
	if s, err := d.Check(until, id); err == nil {
		had = s.Token
	}
	signal.Ignore(syscall.SIGPIPE) // of whoever was to read the token
	stop := c.sayWait(until, dir, opts)
	status, err := d.Acquire(until, opts)
	stop()
	if errors.Is(err, client.ErrNoLock) {
		err = unix.ENOENT // the directory
	}
	if err != nil {
		return lockError(dir, exitHeld, err)
	}
	if status.Token == 0 {
		c.say("%s: no lock was taken: locking is disabled there, or somebody else has it and that is only observed", quote(dir))
	}
	if status.Heirless && had == 0 {
		_ = d.Release(context.Background(), client.Release{Token: status.Token}) // it ends in any case
		return exitf(exitOS, "%s: the lock would end with this command, since what called it inherits none: it is the first process of a container, a service manager or the like, or not seen by the daemon; use stagefs run, or say --owner=session or --client",
			quote(dir))
	}
	err = c.printStatus(ctx, d, status)
	if err != nil && status.Token != had && status.Token != 0 {
		return unprinted(d, id, status.Token, err)
	}
	return err
}

// unprinted releases a lock whose token nobody was told: a lease, or a session's
// lock, would last on.
func unprinted(d *client.Dir, id string, token uint64, why error) error {
	if err := d.Release(context.Background(), client.Release{Client: id, Token: token}); err != nil {
		return exitf(exitIO, "writing the output: %s; and the lock with token %d can't be released: %s", oneLine(why), token, oneLine(err))
	}
	return exitf(exitIO, "writing the output: %s; the lock was released", oneLine(why))
}

// writeClientFile makes the file that hands an ID over. The ID is what gives
// its bearer the lock: only its owner may read it, and no file that is there
// is touched.
func writeClientFile(file, id string) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	switch {
	case errors.Is(err, os.ErrExist):
		// To take the ID that is in it would share a lease with whoever else
		// has it, unasked.
		return exitf(exitCantCreate, "the client's file %s exists already; if its client is to take this directory too, leave --client-file out and set %s to it; else remove it, or name another",
			quote(file), envClientFile)
	case err != nil:
		return exitf(exitCantCreate, "the client's file: %s", oneLine(err))
	}
	_, err = fmt.Fprintln(f, id)
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(file) // another try would find it in its way
		return exitf(exitIO, "the client's file: %s", oneLine(err))
	}
	return nil
}

// printStatus prints the token of a lock, or all that is known of it.
func (c *command) printStatus(ctx *cli.Context, d *client.Dir, s client.Status) error {
	if !ctx.Bool("json") {
		_, err := fmt.Fprintln(c.out, s.Token)
		return err
	}
	var bytes []byte
	if !utf8.ValidString(d.Path()) {
		bytes = []byte(d.Path())
	}
	return c.printJSON(struct {
		Dir      string  `json:"dir"`
		DirBytes []byte  `json:"dir_bytes,omitempty"` // when it is not valid UTF-8
		Token    uint64  `json:"token"`
		Kind     string  `json:"kind,omitempty"`
		Client   string  `json:"client,omitempty"`
		TTL      float64 `json:"ttl,omitempty"`      // seconds
		Deadline float64 `json:"deadline,omitempty"` // seconds from now
	}{d.Path(), bytes, s.Token, s.Kind, s.Client, s.TTL.Seconds(), s.Deadline.Seconds()})
}
