//go:build linux

package client_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/stagefs/stagefs/lockstate/client"
)

// A directory is staged under a lease. The function's context ends if the lease
// is lost, and nothing more can be written then.
func ExampleTryWithLock() {
	dir := filepath.Join(static, "board", "v1")
	os.MkdirAll(dir, 0o777)
	err := client.TryWithLock(context.Background(), dir, "builder-7", func(ctx context.Context) error {
		for _, name := range []string{"kernel", "image"} {
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte("…"), 0o666); err != nil {
				return err
			}
		}
		return nil
	})
	fmt.Println(err)
	// Output: <nil>
}

// Who comes second hears who has the directory.
func ExampleHeldError() {
	ctx := context.Background()
	dir := filepath.Join(static, "board", "v2")
	lock, err := client.Acquire(ctx, dir, client.Options{Client: "builder-7", MakeParents: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Release(false)

	_, err = client.Acquire(ctx, dir, client.Options{Client: "builder-8"})
	var held *client.HeldError
	if errors.Is(err, client.ErrFailedToLock) && errors.As(err, &held) {
		fmt.Println("held by", held.Holder.Client)
	}
	// Output: held by builder-7
}

// The lock of a process: its token goes to whoever stores the result, and tells
// a late writer from the present one.
func ExampleAcquire() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir := filepath.Join(static, "board", "v3")
	lock, err := client.Acquire(ctx, dir, client.Options{Wait: true, MakeParents: true, Why: "nightly build"})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = os.WriteFile(filepath.Join(dir, "token"), fmt.Appendln(nil, lock.Token()), 0o666)
	fmt.Println(err, lock.Release(false))
	// Output: <nil> <nil>
}

// A lock that is broken, or expires, is lost at once.
func ExampleLock_Lost() {
	dir := filepath.Join(static, "board", "v4")
	lock, err := client.Acquire(context.Background(), dir, client.Options{
		Client: "builder-7", MakeParents: true, TTL: 100 * time.Millisecond, RenewEvery: -1, // never
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	<-lock.Lost()
	var lost *client.LostError
	if errors.As(lock.Err(), &lost) {
		fmt.Println(lost.Reason)
	}
	fmt.Println(errors.Is(lock.Release(false), client.ErrLost))
	// Output:
	// expired
	// true
}

// A directory that is new, or an error: of many that race, one goes on.
func ExampleOptions_mustBeNew() {
	ctx := context.Background()
	opts := client.Options{MustBeNew: true, MakeParents: true}
	dir := filepath.Join(static, "board", "v5")
	lock, err := client.Acquire(ctx, dir, opts)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(lock.Release(false))
	_, err = client.Acquire(ctx, dir, opts)
	fmt.Println(errors.Is(err, os.ErrExist))
	// Output:
	// <nil>
	// true
}

// Elsewhere than on a stagefs mount nothing is locked, and the error says so.
func ExampleErrNotStagefs() {
	_, err := client.Acquire(context.Background(), "/proc", client.Options{})
	fmt.Println(errors.Is(err, client.ErrNotStagefs))
	// Output: true
}
