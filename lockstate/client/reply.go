//go:build linux

package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A reply is the daemon's answer to a command, as one JSON object.
type reply struct {
	Dir      string `json:"dir"`
	DirBytes []byte `json:"dir_bytes"` // when it is not valid UTF-8
	Token    uint64 `json:"token"`
	Client   string `json:"client"`
	TTL      span   `json:"ttl"`
	Deadline span   `json:"deadline_in"`
	Kind     string `json:"kind"`
	Heirless bool   `json:"heirless"`

	// Of a refusal.
	Message  string    `json:"message"`
	Permit   []byte    `json:"permit"` // see [Permit]
	Held     *Holder   `json:"held"`
	Blockers []Blocker `json:"blockers"`

	// Of a watched lock that has ended.
	Reason string `json:"reason"`
	By     int    `json:"by"`
	Why    string `json:"why"`
}

// A span is a duration: a number of seconds, or a string like 16s.
type span time.Duration

func (s *span) UnmarshalJSON(data []byte) error {
	var seconds float64
	if json.Unmarshal(data, &seconds) == nil {
		*s = span(seconds * float64(time.Second))
		return nil
	}
	var text string
	if err := json.Unmarshal(data, &text); err != nil || text == "" {
		return err
	}
	d, err := time.ParseDuration(text)
	*s = span(d)
	return err
}

// refusal is what a command's errno means. rel is dir as the daemon knows it, "" if that
// does not matter.
func (r *reply) refusal(dir, rel string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.ETIMEDOUT):
		h := &HeldError{Dir: dir, Holder: r.Held, Blockers: r.Blockers, Reason: r.Message, rel: rel, err: err}
		if h.Holder != nil && h.Holder.Token == 0 {
			h.Holder = nil
		}
		return fmt.Errorf("%w: %w", ErrFailedToLock, h)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%s: %w (%w)", dir, ErrNoLock, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w (%w)", dir, ErrNotHolder, err)
	case daemonGone(err):
		return notAnswering(dir, err)
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("%s: only who may make entries in it may lock it: %w", dir, err)
	case r.Message != "" && r.Message != err.Error():
		return fmt.Errorf("%s: %s: %w", dir, r.Message, err)
	}
	return fmt.Errorf("%s: %w", dir, err)
}

// refusalAt is refusal, for a command that takes or wants the directory itself.
func (r *reply) refusalAt(p place, err error) error {
	if p.rel == "." && errors.Is(err, unix.EBUSY) && (r.Held == nil || r.Held.Token == 0) && len(r.Blockers) == 0 {
		return fmt.Errorf("%s: %w", p.path, ErrRoot)
	}
	return r.refusal(p.path, p.rel, err)
}

// word is s as one word of a command line. What could be taken for more is
// quoted as in Go.
func word(s string) string {
	safe := strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._/+:@%,-", r))
	}) < 0
	if safe && s != "" {
		return s
	}
	return strconv.Quote(s)
}
