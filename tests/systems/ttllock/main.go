//go:build linux

// Ttllock is a worker that does its work under a lock with a time to live, as
// services do that lock through a cache server: whoever has the lock renews it
// every now and then, and whoever does not renew it in time has lost it.
//
//	ttllock [-ttl 16s] [-every 1s] CLIENT DIR
//
// It says "locked TOKEN" when it works, and "lost WHY" when it has to stop. What
// it does meanwhile it reads from its standard input:
//
//	put NAME TEXT    writes a file
//	renew COUNT      renews that often, with times of its own, if it has -ttl or -every
//	end [WHY]        the work is over, or has failed
//
// At last it says "over", with what went wrong.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagefs/stagefs/lockstate/client"
)

func main() {
	ttl := flag.Duration("ttl", client.DefaultTTL, "how long the lock lasts without renewal")
	every := flag.Duration("every", 0, "time between renewals; 0: a 16th of that; below 0: none")
	flag.Parse()
	lines := make(chan string)
	go func() {
		in := bufio.NewScanner(os.Stdin)
		for in.Scan() {
			lines <- in.Text()
		}
		close(lines)
	}()
	err := work(flag.Arg(0), flag.Arg(1), *ttl, *every, lines)
	fmt.Println("over", err)
	if err != nil {
		os.Exit(1)
	}
}

// work does what the lines say while the client has the lock on dir.
func work(id, dir string, ttl, every time.Duration, lines <-chan string) error {
	if ttl == client.DefaultTTL && every == 0 {
		return client.TryWithLock(context.Background(), dir, id, func(ctx context.Context) error {
			fmt.Println("locked")
			return obey(ctx, dir, nil, lines)
		})
	}
	if id == "" {
		return client.ErrEmptyClientID
	}
	l, err := client.Acquire(context.Background(), dir, client.Options{Client: id, TTL: ttl, RenewEvery: every})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() { <-l.Lost(); cancel(l.Err()) }()
	fmt.Println("locked", l.Token())
	err = obey(ctx, dir, l, lines)
	return errors.Join(err, l.Release(false))
}

func obey(ctx context.Context, dir string, l *client.Lock, lines <-chan string) error {
	lost := ctx.Done()
	for {
		select {
		case <-lost:
			fmt.Println("lost", context.Cause(ctx))
			lost = nil
		case line, ok := <-lines:
			verb, rest, _ := strings.Cut(line, " ")
			switch {
			case !ok || verb == "end" && rest == "":
				return nil
			case verb == "end":
				return errors.New(rest)
			case verb == "put":
				name, text, _ := strings.Cut(rest, " ")
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
					fmt.Println("refused", name, err)
					continue
				}
				fmt.Println("put", name)
			case verb == "renew" && l != nil:
				renew(ctx, l, rest)
			default:
				fmt.Println("refused", line)
			}
		}
	}
}

// renew renews a lock by hand, a few times in each of its lives.
func renew(ctx context.Context, l *client.Lock, count string) {
	n, _ := strconv.Atoi(count)
	for range n {
		if err := l.Renew(ctx); err != nil {
			fmt.Println("refused", err)
			return
		}
		select {
		case <-time.After(l.TTL() / 48):
		case <-ctx.Done():
		}
	}
	fmt.Println("renewed", n)
}
