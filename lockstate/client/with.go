//go:build linux

package client

import "context"

// TryWithLock calls f while the client has the lease on a directory, which must
// exist, unless somebody else has it: then it fails with [ErrFailedToLock]. f's
// context is cancelled when the lock is lost, with the [*LostError] as its cause.
//
// A client has one lease on a directory: of two calls with one ID, neither excludes the
// other, and when one f returns, the lock is lost to the other.
//
// It returns f's own error. If f returns none though the lock was lost, or the
// release fails, it returns that.
func TryWithLock(ctx context.Context, dir, clientID string, f func(context.Context) error) error {
	return linux().tryWithLock(ctx, dir, clientID, f)
}

func (s *system) tryWithLock(ctx context.Context, dir, clientID string, f func(context.Context) error) (err error) {
	if clientID == "" {
		return ErrEmptyClientID
	}
	l, err := s.acquire(ctx, dir, Options{Client: clientID})
	if err != nil {
		return err
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		select {
		case <-l.Lost():
			cancel(l.Err())
		case <-ctx.Done():
		}
	}()
	failed := true // also if f panics
	defer func() {
		cancel(nil)
		<-watching
		how := ""
		if failed {
			how = " failed"
		}
		if released := l.end(asked, how); err == nil {
			err = released
		}
	}()
	err = f(ctx)
	failed = err != nil
	return err
}
