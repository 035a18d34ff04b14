package fs

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stagefs/stagefs/lockstate"
)

// A ctlLine is one command as it is written to the ctl file: a verb, a
// directory and options.
type ctlLine struct {
	verb, dir string
	why       string
	client    string
	ttl       time.Duration // 0: not said
	owner     string
	shared    bool
	isNew     bool // the directory was made for this acquisition
	failed    bool
	destroy   bool
	id        string        // of what was put in quarantine
	older     time.Duration // than so long
	onCrash   string
	wait      time.Duration // 0: not at all; forever: without end
	token     uint64        // 0: not said
}

const forever = time.Duration(1<<63 - 1)

// Bounds of what a command may say.
const (
	maxWhy = 1024 // bytes
	minTTL = 10 * time.Millisecond
	maxTTL = 24 * time.Hour
)

// MaxClient is how many bytes a client's ID can have.
const MaxClient = 256

// CheckTTL says what is wrong with a lease's time to live.
func CheckTTL(d time.Duration) error {
	if d < minTTL || d > maxTTL {
		return errors.New("want 10ms to 24h")
	}
	return nil
}

// ctlOptions says which options a verb knows; "!" marks one that it needs.
// break is not listed: all that follows its directory is the reason.
var ctlOptions = map[string]string{
	"acquire": " client ttl owner shared on-crash why wait new ",
	"renew":   " !client ttl ",
	"release": " client token failed destroy ",
	"check":   " client token ",
	"wait":    " wait ",
	"join":    " !client ",
	"watch":   " !token ",
	"restore": " !id ",
	"discard": " id older ",
	"replace": "",
}

var errNoCommand = errors.New("no such command")

// parseCtl reads a line. A bare "check" has no directory, nor has "replace".
func parseCtl(line string) (c ctlLine, err error) {
	verb, rest, _ := strings.Cut(line, " ")
	c.verb = verb
	known, ok := ctlOptions[verb]
	if !ok && verb != "break" {
		return c, fmt.Errorf("%q: %w", verb, errNoCommand)
	}
	if rest = strings.TrimLeft(rest, " "); (verb == "check" || verb == "replace") && rest == "" {
		return c, nil
	}
	if verb == "replace" {
		return c, errors.New("replace takes nothing")
	}
	if c.dir, rest, err = cutDir(rest); err != nil {
		return c, err
	}
	if verb == "break" {
		if c.why = rest; rest == "" {
			return c, errors.New("break needs the reason, behind the directory")
		}
		if err := badWhy(rest); err != nil {
			return c, fmt.Errorf("the reason %w", err)
		}
		return c, nil
	}
	if verb == "wait" {
		c.wait = forever
	}
	said := make(map[string]bool)
	for rest != "" {
		var key, value string
		var valued bool
		if key, value, valued, rest, err = cutOption(rest); err != nil {
			return c, err
		}
		if said[key] {
			return c, fmt.Errorf("%s is said twice", key)
		}
		said[key] = true
		if !strings.Contains(known, " "+key+" ") && !strings.Contains(known, " !"+key+" ") {
			return c, fmt.Errorf("%s does not know %q", verb, key)
		}
		if err := c.set(key, value, valued); err != nil {
			return c, fmt.Errorf("%s: %w", key, err)
		}
	}
	for _, k := range strings.Fields(known) {
		if k[0] == '!' && !said[k[1:]] {
			return c, fmt.Errorf("%s needs %s=", verb, k[1:])
		}
	}
	if said["ttl"] && !said["client"] {
		return c, errors.New("ttl: only a client's lease has one; add client=")
	}
	if said["failed"] && said["destroy"] {
		return c, errors.New("failed and destroy exclude each other")
	}
	if verb == "discard" && said["id"] == said["older"] {
		return c, errors.New("discard needs id= or older=")
	}
	if said["client"] && said["owner"] {
		return c, errors.New("owner: a lease belongs to its client; leave it out")
	}
	return c, nil
}

var (
	errBadPath   = errors.New("not a path beneath the mount")
	errBadString = errors.New("want a Go string, in double quotes, with what is not UTF-8 escaped, as \\xff")
	errUnquoted  = errors.New("it holds a control character: only a Go string, in double quotes, can")
)

// cutDir takes the directory off the front of s: a word, or a Go string.
func cutDir(s string) (dir, rest string, err error) {
	if strings.HasPrefix(s, `"`) {
		q := ""
		if q, dir, err = cutString(s); err != nil {
			return "", "", err
		}
		rest = strings.TrimSpace(s[len(q):])
	} else {
		dir, rest, _ = strings.Cut(s, " ")
		for _, c := range []byte(s) {
			if c < ' ' || c == 0x7f {
				return "", "", errUnquoted
			}
		}
	}
	dir = strings.TrimSuffix(dir, "/")
	if dir == "" || strings.ContainsRune(dir, 0) || strings.HasPrefix(dir, "/") {
		return "", "", errBadPath
	}
	for _, name := range strings.Split(dir, "/") {
		if name == "" || name == ".." || name == "." && dir != "." || len(name) > maxName {
			return "", "", errBadPath
		}
	}
	return dir, strings.TrimSpace(rest), nil
}

// cutOption takes a word, key=word or key="Go string" off the front of s.
func cutOption(s string) (key, value string, valued bool, rest string, err error) {
	end := strings.IndexAny(s, " =")
	if end < 0 {
		return s, "", false, "", nil
	}
	key, rest = s[:end], s[end+1:]
	if s[end] == ' ' {
		return key, "", false, strings.TrimLeft(rest, " "), nil
	}
	if !strings.HasPrefix(rest, `"`) {
		value, rest, _ = strings.Cut(rest, " ")
		return key, value, true, strings.TrimLeft(rest, " "), nil
	}
	q, value, err := cutString(rest)
	if err != nil {
		return "", "", false, "", fmt.Errorf("%s: %w", key, err)
	}
	if rest = rest[len(q):]; rest != "" && rest[0] != ' ' {
		return "", "", false, "", fmt.Errorf("%s: a blank is missing after the string", key)
	}
	return key, value, true, strings.TrimLeft(rest, " "), nil
}

// cutString returns the Go string that s begins with, as it is there and as it is meant.
// Such a string is UTF-8 (Go would put another name in place of one that is not), and
// other bytes are escaped.
func cutString(s string) (q, value string, err error) {
	if q, err = strconv.QuotedPrefix(s); err == nil {
		value, err = strconv.Unquote(q)
	}
	if err != nil || !utf8.ValidString(q) {
		return "", "", errBadString
	}
	return q, value, nil
}

var (
	errNoValue  = errors.New("a value is missing")
	errHasValue = errors.New("takes no value")
)

func (c *ctlLine) set(key, value string, valued bool) (err error) {
	switch flag := oneOf(key, "shared", "new", "failed", "destroy"); {
	case flag && valued:
		return errHasValue
	case !flag && !valued:
		return errNoValue
	}
	switch key {
	case "shared":
		c.shared = true
	case "new":
		c.isNew = true
	case "failed":
		c.failed = true
	case "destroy":
		c.destroy = true
	case "id":
		if c.id = value; badID(value) {
			err = errors.New("is no number of something in quarantine")
		}
	case "older":
		if c.older, err = ParseDuration(value); err == nil && c.older < 0 {
			err = errors.New("is below zero")
		}
	case "client":
		c.client, err = value, badClient(value)
	case "why":
		c.why, err = value, badWhy(value)
	case "ttl":
		if c.ttl, err = ParseDuration(value); err == nil {
			err = CheckTTL(c.ttl)
		}
	case "wait":
		if value == "forever" {
			c.wait = forever
			return nil
		}
		c.wait, err = ParseDuration(value)
		if err == nil && c.wait < 0 {
			err = errors.New("is below zero")
		}
	case "owner":
		c.owner = value
		if _, ok := scopeNamed(value); !ok {
			err = errors.New("is none of process, group, session, cgroup")
		}
	case "on-crash":
		if c.onCrash = value; !oneOf(value, lockstate.Keep, lockstate.Destroy, lockstate.Quarantine) {
			err = errors.New("is none of keep, destroy, quarantine")
		}
	case "token":
		if c.token, err = strconv.ParseUint(value, 10, 64); err != nil || c.token == 0 {
			err = errors.New("want a number above 0")
		}
	}
	return err
}

// ParseDuration reads a number of seconds, as for flock(1), or one with a unit.
func ParseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err == nil {
		return d, nil
	}
	seconds, notNumber := strconv.ParseFloat(s, 64)
	if notNumber != nil || !(math.Abs(seconds) < 1e9) { // nor NaN
		return 0, errors.New("want seconds, or a duration like 1m30s")
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

func oneOf(s string, all ...string) bool { return slices.Contains(all, s) }

// badWhy says what is wrong with a reason.
func badWhy(why string) error {
	if len(why) > maxWhy || !utf8.ValidString(why) {
		return fmt.Errorf("is no text of at most %d bytes", maxWhy)
	}
	return nil
}

// badClient says what is wrong with a client ID.
func badClient(id string) error {
	switch {
	case id == "":
		return errors.New("is empty")
	case len(id) > MaxClient:
		return fmt.Errorf("is longer than %d bytes", MaxClient)
	case !utf8.ValidString(id):
		return errors.New("is not valid UTF-8")
	case strings.TrimSpace(id) != id:
		return errors.New("begins or ends with a blank")
	}
	for _, r := range id {
		if !unicode.IsPrint(r) {
			return errors.New("holds what cannot be printed")
		}
	}
	return nil
}
