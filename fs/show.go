package fs

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// plain returns s as it may stand in a line of text: quoted if it could be
// taken for more than one word, or could drive a terminal.
func plain(s string) string {
	for _, r := range s {
		if r == utf8.RuneError || r == '"' || r == '\\' || !unicode.IsPrint(r) || unicode.IsSpace(r) {
			return strconv.QuoteToASCII(s)
		}
	}
	if s == "" {
		return `""`
	}
	return s
}

// text returns s, and its bytes where they are not valid UTF-8: of s, JSON has something
// else in their place.
func text(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return s, []byte(s)
}

// reapListed bounds for how many locks a listing makes sure that their owners
// live, and have open what keeps them. Beyond it, an end may show a moment later.
const reapListed = 4096

// listing returns what the locks files show.
func (fs *FS) listing() lockstate.Listing {
	l := lockstate.Listing{
		Locks: []lockstate.Row{}, Waiters: fs.waits.list(fs),
		Orphans: []lockstate.Orphan{}, Blockers: []lockstate.Blocker{},
	}
	switch {
	case fs.opts.NoLocking:
		l.Mode = "off"
	case fs.opts.Observe:
		l.Mode = "observe"
	}
	if fs.opts.DenyUnlocked {
		l.Unlocked = "deny"
	}
	locks := fs.table.Locks()
	if len(locks) <= reapListed && fs.reapDead(locks) {
		locks = fs.table.Locks()
	}
	for _, s := range locks {
		l.Locks = append(l.Locks, fs.row(s))
	}
	l.Blockers = fs.blockers(fs.table.LeftOpen())
	for _, o := range fs.orphans.list(fs) {
		p, b := text(o)
		l.Orphans = append(l.Orphans, lockstate.Orphan{Path: p, PathBytes: b})
	}
	return l
}

// row returns what the listing tells of a lock.
func (fs *FS) row(s lockstate.LockState) lockstate.Row {
	row := lockstate.Row{
		Kind: s.Lock.KindName(), Protocol: s.Protocol, Token: s.Token, Since: s.Since, Scope: s.Scope.Kind.String(),
		Pid: s.Owner.Pid, Start: s.Owner.Start, UID: s.UID, Cmd: fs.procs.Cmdline(s.Owner),
		Why: s.Why, OnCrash: s.OnCrash, Blockers: fs.blockers(s.Blockers),
	}
	row.Dir, row.DirBytes = text(s.Path)
	row.File, row.FileBytes = text(s.File)
	if s.Client != "" {
		row.Scope, row.Client = "client", s.Client
		row.TTL, row.Deadline = s.TTL.Seconds(), max(0, s.Deadline-fs.table.Clock()).Seconds()
	}
	return row
}

func (fs *FS) blockers(hs []lockstate.HandleState) []lockstate.Blocker {
	all := make([]lockstate.Blocker, 0, len(hs))
	for _, h := range hs {
		who := fs.openersOf(h.Handle)
		if len(who) == 0 {
			who = []procid.ID{h.Owner}
		}
		for _, id := range who {
			b := lockstate.Blocker{Pid: id.Pid, Start: id.Start, Cmd: fs.procs.Cmdline(id)}
			b.Path, b.PathBytes = text(h.Path)
			all = append(all, b)
		}
	}
	return all
}

func (fs *FS) showLocksJSON() []byte {
	var b bytes.Buffer
	_ = json.Indent(&b, encode(fs.listing()), "", "  ") // it is JSON
	return b.Bytes()
}

func (fs *FS) showLocks() []byte {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	l := fs.listing()
	switch l.Mode {
	case "off":
		fmt.Fprintln(w, "# locking is disabled: nothing is enforced")
	case "observe":
		fmt.Fprintln(w, "# observing only: refusals are noted, not enforced")
	}
	fmt.Fprintln(w, "DIR\tKIND\tPROTOCOL\tTOKEN\tSINCE\tPID\tUID\tCOMMAND")
	for _, r := range l.Locks {
		pid := strconv.Itoa(r.Pid)
		if r.Client != "" && r.Cmd == "" {
			pid = "-" // who took the lease is gone
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%d\t%s\n", plain(r.Dir), r.Kind, r.Protocol, r.Token,
			r.Since.UTC().Format(time.RFC3339), pid, r.UID, ownerText(r))
		for _, k := range r.Blockers {
			fmt.Fprintf(w, "  open: %s\t\t\t\t\t%s\n", plain(k.Path), blockerText(k))
		}
	}
	for _, k := range l.Blockers {
		fmt.Fprintf(w, "%s\tleft-open\t\t\t\t%s\n", plain(k.Path), blockerText(k))
	}
	for _, o := range l.Orphans {
		fmt.Fprintf(w, "%s\torphan\t\t\t\t\t\t\n", plain(o.Path))
	}
	w.Flush()
	return b.Bytes()
}

// blockerText is the end of a row, from the process on.
func blockerText(b lockstate.Blocker) string {
	if b.Pid == 0 {
		return "-\t\tnot known"
	}
	return fmt.Sprintf("%d\t\t%s", b.Pid, brief(b.Cmd))
}

// ownerText tells whose lock a row is.
func ownerText(r lockstate.Row) string {
	if r.Client != "" {
		return fmt.Sprintf("client %s for %.1f s", brief(r.Client), r.Deadline)
	}
	return brief(r.Cmd)
}

// maxBrief is how long brief lets a text be, in bytes.
const maxBrief = 120

// brief is plain for as much of a command line as does not fill a screen.
func brief(s string) string {
	shown := ""
	if len(s) <= maxBrief {
		shown = plain(s)
	}
	for n := min(len(s), maxBrief-len("...")); shown == "" || len(shown) > maxBrief; n-- {
		if n == len(s) || utf8.RuneStart(s[n]) {
			shown = plain(s[:n] + "...")
		}
	}
	return shown
}

// printable is r, or a blank where r could end a line or drive a terminal.
func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return ' '
}

// unwritable returns why the state can't be written, nil if it can.
func (fs *FS) unwritable() *string { return cmp.Or(fs.reserveErr.Load(), fs.storeErr.Load()) }

func (fs *FS) showVersion() []byte {
	b := fmt.Appendf(nil, "stagefs %s\npid %d\nmounter %d\ntransport %s\n", fs.opts.Version, os.Getpid(), fs.uid, fs.kernel.Name())
	if !fs.opts.NoLocking {
		for _, name := range fs.opts.LockNames {
			b = fmt.Appendf(b, "lock-name %q\n", name)
		}
	}
	if dir, err := fs.opts.stateDir(); err == nil {
		b = fmt.Appendf(b, "state %s\n", plain(dir))
	}
	if reason := fs.unwritable(); reason != nil {
		b = fmt.Appendf(b, "unwritable %s\n", strings.Map(printable, *reason))
	}
	return b
}
