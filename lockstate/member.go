package lockstate

import (
	"encoding/json"
	"fmt"
	"maps"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A descendant that was seen as a holder stays one when those die that it
// descends from (H2). The next daemon finds no way from it to the owner then, so
// each has a record of its own beside that of the lock: which of them will need
// it, nobody hears.

// The store keeps these records under numbers from MemberBase to MemberEnd, which
// are above all tokens.
const (
	MemberBase = 1 << 60
	MemberEnd  = 1 << 61
)

// A MemberRecord is a descendant of a lock's owner as it outlives the daemon.
type MemberRecord struct {
	Token  uint64    `json:"of"`
	Member procid.ID `json:"member"`
}

// ParseMember reads a record that a table has put into its store under a number
// from MemberBase on.
func ParseMember(number uint64, data []byte) (m MemberRecord, err error) {
	if err = json.Unmarshal(data, &m); err == nil && (m.Token == 0 || m.Member.Pid <= 0) {
		err = fmt.Errorf("record %d of a holder makes no sense", number)
	}
	return m, err
}

const (
	// maxMembers bounds the memory of a row that lives long and sees many
	// processes: beyond it, those are forgotten that are dead, or all if nobody
	// tells.
	maxMembers = 1 << 14
	// fewMembers are recorded whether they live or not.
	fewMembers = 64
)

// remember notes that a process was seen as a holder.
func (r *row) remember(id procid.ID) {
	if _, known := r.members[id]; known {
		return
	}
	if r.members == nil {
		r.members = make(map[procid.ID]uint64)
	}
	r.members[id] = 0
	r.unnoted = append(r.unnoted, id)
}

// noteMembersLocked writes down who was seen since the last time.
func (t *Table) noteMembersLocked(r *row) {
	for _, id := range r.unnoted {
		if t.store == nil {
			break
		}
		data, err := json.Marshal(MemberRecord{r.token, id})
		if err != nil { // nothing in it can fail
			continue
		}
		r.members[id] = t.nextMember
		t.store.Put(t.nextMember, data)
		t.nextMember++
		r.noted++
		t.news.Store(true)
	}
	r.unnoted = nil
	switch {
	case t.gone == nil && len(r.members) > maxMembers:
		t.forgetMembersLocked(r)
	case t.gone != nil && (r.noted > r.enough+fewMembers || len(r.members) > r.enough+maxMembers):
		t.crowded = r
	}
}

// forgetMembersLocked deletes the records of all members, and forgets these.
func (t *Table) forgetMembersLocked(r *row) {
	for _, number := range r.members {
		if number != 0 {
			t.store.Delete(number)
		}
	}
	r.members, r.unnoted, r.noted = nil, nil, 0
}

// KnowMember tells that a process was seen as a holder, and that the store has the
// given record of it.
func (t *Table) KnowMember(number uint64, m MemberRecord) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[m.Token]
	if r == nil {
		return
	}
	if r.members == nil {
		r.members = make(map[procid.ID]uint64)
	}
	if r.members[m.Member] != 0 {
		t.store.Delete(number)
		return
	}
	r.members[m.Member] = number
	r.noted++
}

// tell makes what a decision has brought outlive the daemon. It makes system
// calls, and so wants to be called without t.mu.
func (t *Table) tell() {
	if t.news.Load() && t.news.Swap(false) {
		t.flush()
		t.prune()
	}
}

// prune deletes the records of members that are dead.
func (t *Table) prune() {
	t.mu.Lock()
	r := t.crowded
	t.crowded = nil
	if r == nil {
		t.mu.Unlock()
		return
	}
	r.enough = len(r.members) // nobody else begins meanwhile
	members := maps.Clone(r.members)
	t.mu.Unlock()

	dead := make([]procid.ID, 0, len(members))
	for id := range members {
		if t.gone(id) {
			dead = append(dead, id)
		}
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tokens[r.token] != r {
		return
	}
	for _, id := range dead {
		if number := r.members[id]; number != 0 {
			t.store.Delete(number)
			r.members[id] = 0
			r.noted--
		}
		// Those who are known by their ancestors alone may descend from it.
		if len(members) > maxMembers {
			delete(r.members, id)
		}
	}
	r.enough = 2 * r.noted
}
