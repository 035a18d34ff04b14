package lockstate

import "time"

// An Event is something that happened to a lock, as the events file tells it.
// Each "acquired" is followed by one "released" or "broken" with the same
// token, whatever happens in between.
type Event struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"`
	Dir      string    `json:"dir"`
	DirBytes []byte    `json:"dir_bytes,omitempty"` // the path, when it is not valid UTF-8
	Token    uint64    `json:"token,omitempty"`
	Pid      int       `json:"pid,omitempty"` // the owner; or who was refused, or waits
	Client   string    `json:"client,omitempty"`
	Kind     string    `json:"kind,omitempty"`
	Protocol string    `json:"protocol,omitempty"` // how it was taken, or was to be; or the operation that was refused
	Reason   string    `json:"reason,omitempty"`   // why it ended; or the errno of a refusal
	By       int       `json:"by,omitempty"`       // who ended it, handed it over, or stood in the way
	Why      string    `json:"why,omitempty"`
	Count    uint64    `json:"count,omitempty"` // of "lost-events": how many the reader was too slow for
}

// What happens.
const (
	EventAcquired    = "acquired"
	EventRefused     = "refused"
	EventWaiting     = "waiting"
	EventHandedOver  = "handed-over"
	EventReleased    = "released"
	EventLost        = "lost" // besides: its holders did not give it back
	EventBroken      = "broken"
	EventQuarantined = "quarantined"
	EventDestroyed   = "destroyed"
	EventsMissed     = "lost-events"
)

// Tell puts an event of the caller's in order with those of the table. Where d
// is not nil the event is about d.
func (t *Table) Tell(d *Dir, e Event) {
	if t.notify == nil || t.listeners.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if d != nil {
		e.Dir = d.path()
	}
	t.notify(e)
}

// Listen tells that so many more want to hear of events. With none, none are
// told.
func (t *Table) Listen(more int) { t.listeners.Add(int32(more)) }

// tellLocked tells what happened to r.
func (t *Table) tellLocked(event string, r *row, how Ending) {
	if t.notify == nil || t.listeners.Load() == 0 {
		return
	}
	e := Event{
		Event: event, Dir: r.dir.path(), Token: r.token, Pid: r.owner.ID().Pid, Kind: r.kind.String(), Protocol: r.protocol,
		Reason: string(how.Reason), By: how.By, Why: how.Why,
	}
	if r.lease != nil {
		e.Client = r.lease.client
		if r.kind == Explicit {
			e.Kind = "lease"
		}
	}
	t.notify(e)
}

// tellEndLocked tells how r has ended.
func (t *Table) tellEndLocked(r *row, how Ending) {
	if r.pending {
		return // nobody was told that it began
	}
	switch how.Reason {
	case Broken:
		t.tellLocked(EventBroken, r, how)
		t.tellLocked(EventLost, r, how)
	case Expired:
		t.tellLocked(EventReleased, r, how)
		t.tellLocked(EventLost, r, how)
	default:
		t.tellLocked(EventReleased, r, how)
	}
}
