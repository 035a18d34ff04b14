package lockstate_test

import (
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
	"github.com/stagefs/stagefs/lockstate/storetest"
)

// reopened is what the next daemon finds: the table's records, in order.
func reopened(t *testing.T, store *storetest.Memory) []lockstate.Record {
	t.Helper()
	var all []lockstate.Record
	records := store.Reopen().Load()
	for _, token := range slices.Sorted(maps.Keys(records)) {
		if token >= lockstate.MemberBase {
			break
		}
		rec, err := new(lockstate.RecordReader).Read(token, records[token])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, rec)
	}
	return all
}

// members are those that the next daemon finds.
func members(t *testing.T, store *storetest.Memory) (all []lockstate.MemberRecord) {
	t.Helper()
	records := store.Reopen().Load()
	for _, number := range slices.Sorted(maps.Keys(records)) {
		if number < lockstate.MemberBase {
			continue
		}
		m, err := lockstate.ParseMember(number, records[number])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	return all
}

// TestMembers: each descendant that was seen as a holder is one for the next
// table, when nothing leads from it to the owner any more (H2); those who died
// leave no records for ever, and the end of the lock leaves none.
func TestMembers(t *testing.T) {
	store := storetest.NewMemory()
	dies := func(id procid.ID) bool { return id.Pid >= 1000 && id.Pid%10 != 0 }
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve, Gone: dies})
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
	d := tab.At("d")
	g, err := tab.Acquire(nil, lockstate.Request{Process: owner, Dir: d, Kind: lockstate.Implicit})
	if err != nil {
		t.Fatal(err)
	}
	l, _ := g.Commit()
	const first, n = 1000, 5000
	most := 0
	for pid := first; pid < first+n; pid++ {
		op, err := tab.Begin(lockstate.Change{Process: procid.Fake(procid.ID{Pid: pid, Start: 3}, owner), Dirs: []*lockstate.Dir{d}})
		if err != nil {
			t.Fatal(err)
		}
		op.End()
		if pid%100 == 99 {
			most = max(most, len(members(t, store)))
		}
	}
	if most > n/10*3+100 {
		t.Errorf("up to %d records of %d who live", most, n/10)
	}
	recs := members(t, store)
	next := store.Reopen()
	tab = lockstate.New(lockstate.Options{Store: next, Reserve: next.Reserve, LastToken: next.Tokens(), Gone: dies})
	d = tab.At("d")
	if _, err := tab.Restore(reopened(t, store)[0], nil, []string{"d"}, owner, nil); err != nil {
		t.Fatal(err)
	}
	for number, data := range next.Load() {
		if number >= lockstate.MemberBase {
			m, err := lockstate.ParseMember(number, data)
			if err != nil {
				t.Fatal(err)
			}
			tab.KnowMember(number, m)
		}
	}
	for pid := first; pid < first+n; pid += 10 {
		orphan := procid.Fake(procid.ID{Pid: pid, Start: 3}, nil)
		if !slices.Contains(recs, lockstate.MemberRecord{Token: l.Token, Member: orphan.ID()}) {
			t.Fatalf("no record of %v, who lives", orphan.ID())
		}
		op, err := tab.Begin(lockstate.Change{Process: orphan, Dirs: []*lockstate.Dir{d}})
		if err != nil {
			t.Fatalf("%v: %v", orphan.ID(), err)
		}
		op.End()
	}
	tab.End(l.Token, lockstate.Given)
	if left := members(t, next); len(left) != 0 {
		t.Errorf("%d records are left of a lock that has ended", len(left))
	}
}

// TestRecords: each change of a lock is in the store when the call returns.
func TestRecords(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve, World: "here"})
	parent := procid.Fake(procid.ID{Pid: 10, Start: 1}, nil)
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, parent)
	d := tab.At("a\xff\n\"", "b")
	take := func(q lockstate.Request) {
		t.Helper()
		q.Process, q.Dir, q.Kind = owner, d, lockstate.Explicit
		g, err := tab.Acquire(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := g.Commit(); !ok {
			t.Fatal("lost")
		}
	}
	take(lockstate.Request{Protocol: "create", File: "L\xfe"})
	take(lockstate.Request{Protocol: "flock", Key: "key"})
	recs := reopened(t, store)
	if len(recs) != 1 {
		t.Fatalf("%d records, want 1", len(recs))
	}
	rec := recs[0]
	if rec.Path != "a\xff\n\"/b" || rec.Owner != owner.ID() || rec.World != "here" || len(rec.Files) != 1 || rec.Files[0] != "L\xfe" || !rec.Keys || rec.Changed {
		t.Errorf("record %+v", rec)
	}
	if len(rec.Lineage) != 1 || rec.Lineage[0].ID != parent.ID() {
		t.Errorf("lineage %v", rec.Lineage)
	}

	child := procid.Fake(procid.ID{Pid: 12, Start: 3}, owner)
	op, err := tab.Begin(lockstate.Change{Process: child, Dirs: []*lockstate.Dir{d}})
	if err != nil {
		t.Fatal(err)
	}
	op.End()
	if rec := reopened(t, store)[0]; !rec.Changed {
		t.Errorf("record %+v after a change by a descendant", rec)
	}
	if m := members(t, store); !slices.Equal(m, []lockstate.MemberRecord{{Token: rec.Token, Member: child.ID()}}) {
		t.Errorf("members %+v, want the descendant", m)
	}

	to := tab.At("c")
	top := tab.At("a\xff\n\"")
	id := lockstate.FileID{Dev: 1, Ino: 2, Birth: 3}
	tab.Moving(top, id, to, "moved")
	rec = reopened(t, store)[0]
	if m := rec.Move; rec.Path != "a\xff\n\"/b" || m == nil || m.ID != id || m.From(string(rec.Path)) != "a\xff\n\"" || m.After() != "c/moved/b" {
		t.Errorf("while it moves: path %q, move %+v", rec.Path, rec.Move)
	}
	tab.Stays(top)
	if rec := reopened(t, store)[0]; rec.Move != nil {
		t.Errorf("it stayed: move %+v", rec.Move)
	}
	tab.Moving(top, id, to, "moved")
	tab.Move(top, to, "moved")
	if rec := reopened(t, store)[0]; rec.Path != "c/moved/b" || rec.Move != nil {
		t.Errorf("moved: path %q, move %+v", rec.Path, rec.Move)
	}

	if l, _ := tab.ReleaseFile(d, "L\xfe"); l.Token != 0 {
		t.Error("ended although the descriptor keeps it")
	}
	if rec := reopened(t, store)[0]; len(rec.Files) != 0 {
		t.Errorf("files %q", rec.Files)
	}
	if _, ended := tab.ReleaseKey("key"); !ended {
		t.Error("not ended")
	}
	if recs := reopened(t, store); len(recs) != 0 {
		t.Errorf("records %+v of a lock that has ended", recs)
	}
}

// TestRecordKeys: a record lists the files that descriptor locks are on, but of those of
// before few: who always has one would write ever more.
func TestRecordKeys(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve})
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
	lock := func(key int, ino uint64) {
		t.Helper()
		g, err := tab.Acquire(nil, lockstate.Request{
			Process: owner, Dir: tab.At("d"), Kind: lockstate.Explicit, Protocol: "fcntl", File: "L", Key: key,
			Opened: []lockstate.FileID{{Dev: 1, Ino: ino}},
		})
		if err != nil {
			t.Fatal(err)
		}
		g.Commit()
	}
	opened := func() (inos []uint64) {
		t.Helper()
		for _, id := range reopened(t, store)[0].Opened {
			inos = append(inos, id.Ino)
		}
		return inos
	}
	lock(1, 1)
	for i := 2; i <= 100; i++ {
		lock(i, uint64(i))
		if got, want := opened(), []uint64{1, uint64(i)}; !slices.Equal(got, want) {
			t.Fatalf("files %d are recorded, want %d", got, want)
		}
		tab.ReleaseKey(i)
	}
	if got := opened(); !slices.Equal(got, []uint64{1}) {
		t.Errorf("files %d are recorded when the others are unlocked, want [1]", got)
	}
	lock(2, 1) // two on one file
	tab.ReleaseKey(1)
	if got := opened(); !slices.Equal(got, []uint64{1}) {
		t.Errorf("files %d are recorded when one of two on a file is gone, want [1]", got)
	}
	for i := 10; i < 110; i++ {
		lock(i, uint64(i))
	}
	for i := 10; i < 109; i++ {
		tab.ReleaseKey(i)
		if n, most := len(opened()), 2+(109-i)*9/8; n > most {
			t.Fatalf("%d files are recorded while %d are locked", n, 1+109-i)
		}
	}
	if err := tab.Check(); err != nil {
		t.Error(err)
	}
}

// TestRecordHandedOver: the next daemon finds the heir as the owner (R5), and who
// descends from it and waits is told.
func TestRecordHandedOver(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve})
	f := newFamily()
	g, err := tab.Acquire(nil, lockstate.Request{Process: f.grandchild, Dir: tab.At("d"), Protocol: "mkdir"})
	if err != nil {
		t.Fatal(err)
	}
	g.Commit()
	bell := tab.Bell()
	tab.Exit(f.grandchild.ID(), succeeded, alive(f.child))
	select {
	case <-bell:
	default:
		t.Error("nobody heard of it")
	}
	recs := reopened(t, store)
	if len(recs) != 1 || recs[0].Owner != f.child.ID() || len(recs[0].Lineage) == 0 || recs[0].Lineage[0].ID != f.parent.ID() {
		t.Errorf("records %+v, want one of %v, whose heir is %v", recs, f.child.ID(), f.parent.ID())
	}
}

// TestRestore: the next table has the lock that the record tells of.
func TestRestore(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve})
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
	for _, q := range []lockstate.Request{
		{Kind: lockstate.Implicit, Protocol: "mkdir"},
		{Kind: lockstate.Explicit, Protocol: "command", Command: true, Why: "w"},
	} {
		q.Process, q.Dir = owner, tab.At("d")
		g, err := tab.Acquire(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		g.Commit()
	}
	recs := reopened(t, store)
	if len(recs) != 1 { // A13: the second replaced the first
		t.Fatalf("%d records", len(recs))
	}
	next := store.Reopen()
	tab = lockstate.New(lockstate.Options{Store: next, Reserve: next.Reserve, LastToken: next.Tokens()})
	other := procid.Fake(procid.ID{Pid: 12, Start: 2}, nil)
	if _, err := tab.Restore(recs[0], nil, []string{"d"}, other, nil); err == nil {
		t.Error("restored for another process")
	}
	l, err := tab.Restore(recs[0], nil, []string{"d"}, owner, nil)
	if err != nil || l.Token != recs[0].Token || l.Why != "w" || !l.Command {
		t.Errorf("Restore() = %+v, %v", l, err)
	}
	if _, err := tab.Restore(recs[0], nil, []string{"e"}, owner, nil); err == nil {
		t.Error("restored twice")
	}
	if _, err := tab.Begin(lockstate.Change{Process: other, Dirs: []*lockstate.Dir{tab.At("d")}}); err == nil {
		t.Error("another process changes what is held")
	}
	g, err := tab.Acquire(nil, lockstate.Request{Process: other, Dir: tab.At("e"), Kind: lockstate.Explicit})
	if err != nil {
		t.Fatal(err)
	}
	if e, _ := g.Commit(); e.Token <= l.Token {
		t.Errorf("token %d after %d", e.Token, l.Token)
	}
	if err := tab.Check(); err != nil {
		t.Error(err)
	}
}

// TestRestoreOpened: which lock files only wait for a lock on a descriptor (A6) is known
// again, whatever the lock was taken by.
func TestRestoreOpened(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve})
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
	take := func(dir, protocol, file string, key any) {
		t.Helper()
		g, err := tab.Acquire(nil, lockstate.Request{Process: owner, Dir: tab.At(dir), Kind: lockstate.Explicit, Protocol: protocol, File: file, Key: key})
		if err != nil {
			t.Fatal(err)
		}
		g.Commit()
	}
	take("d", "create", "a", nil)
	take("d", "open", "b", nil)
	take("e", "open", "a", nil)
	take("e", "create", "b", nil)
	recs := reopened(t, store)
	next := store.Reopen()
	tab = lockstate.New(lockstate.Options{Store: next, Reserve: next.Reserve, LastToken: next.Tokens()})
	for _, rec := range recs {
		if _, err := tab.Restore(rec, nil, []string{string(rec.Path)}, owner, []string{"a", "b"}); err != nil {
			t.Fatal(err)
		}
	}
	for i, dir := range []string{"d", "e"} {
		for j, file := range []string{"a", "b"} {
			take(dir, "fcntl", file, [2]int{i, j})
		}
		if l, _ := tab.Lock(recs[i].Token); !slices.Equal(l.Files, []string{[]string{"a", "b"}[i]}) {
			t.Errorf("%s is kept by %q, want by what was not made by opening it", dir, l.Files)
		}
	}
}

// TestRestoreTwin: a lock that was being ended when the daemon died, and that its owner
// had taken again, is not there twice. The lock files that are left are the newer one's.
// So it is if the older one was not ended after all.
func TestRestoreTwin(t *testing.T) {
	for name, q := range map[string]lockstate.Request{
		"exclusive": {Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "c"},
		"shared":    {Kind: lockstate.Shared, Protocol: "command", Command: true, Client: "c"},
		"process":   {Kind: lockstate.Explicit, Protocol: "command", Command: true},
	} {
		t.Run(name, func(t *testing.T) {
			store := storetest.NewMemory()
			tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve})
			owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
			acquire := func(tab *lockstate.Table, q lockstate.Request) lockstate.Lock {
				t.Helper()
				q.Process, q.Dir = owner, tab.At("d")
				g, err := tab.Acquire(nil, q)
				if err != nil {
					t.Fatal(err)
				}
				l, _ := g.Commit()
				return l
			}
			acquire(tab, q)
			more := q
			more.File, more.Command, more.Protocol = "more", false, "create"
			old := acquire(tab, more)
			tab.Doom(old.Token)
			again := acquire(tab, q)
			if again.Token == old.Token {
				t.Fatalf("taken again: token %d still", old.Token)
			}
			recs := reopened(t, store)
			if len(recs) != 2 {
				t.Fatalf("%d records, want both", len(recs))
			}
			next, before := store.Reopen(), tab
			tab = lockstate.New(lockstate.Options{Store: next, Reserve: next.Reserve, LastToken: next.Tokens()})
			for _, rec := range recs {
				var files []string
				for _, f := range rec.Files {
					files = append(files, string(f))
				}
				if _, err := tab.Restore(rec, &rec, []string{"d"}, owner, files); err != nil {
					t.Fatal(err)
				}
			}
			all := tab.Locks()
			if len(all) != 1 || all[0].Token != again.Token || !slices.Equal(all[0].Files, old.Files) {
				t.Errorf("restored: %+v, want token %d alone, with %q", all, again.Token, old.Files)
			}
			if kept := reopened(t, next); len(kept) != 1 || kept[0].Token != again.Token || len(kept[0].Files) != len(old.Files) {
				t.Errorf("kept: %+v, want the same", kept)
			}
			if err := tab.Check(); err != nil {
				t.Error(err)
			}
			before.Remains(old.Token)
			all = before.Locks()
			if len(all) != 1 || all[0].Token != again.Token || !slices.Equal(all[0].Files, old.Files) {
				t.Errorf("where it remained: %+v, want token %d alone, with %q", all, again.Token, old.Files)
			}
			if err := before.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// putStore counts what is written.
type putStore struct {
	*storetest.Memory
	puts int
}

func (s *putStore) Put(token uint64, record []byte) {
	s.puts++
	s.Memory.Put(token, record)
}

// TestRestoreKept: a lock that is in force as it was kept is not written again, and
// any other one is.
func TestRestoreKept(t *testing.T) {
	store := storetest.NewMemory()
	tab := lockstate.New(lockstate.Options{Store: store, Reserve: store.Reserve, World: "w"})
	owner := procid.Fake(procid.ID{Pid: 11, Start: 2}, nil)
	for _, q := range []lockstate.Request{
		{Dir: tab.At("d"), Kind: lockstate.Implicit, Protocol: "mkdir", New: true},
		{Dir: tab.At("e"), Kind: lockstate.Explicit, Protocol: "excl", File: "lock"},
		{Dir: tab.At("f"), Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "c", TTL: time.Hour},
	} {
		q.Process = owner
		g, err := tab.Acquire(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		g.Commit()
	}
	for name, c := range map[string]struct {
		change func(rec *lockstate.Record)
		path   string // "": as it was
		puts   bool
	}{
		"as it was":              {func(*lockstate.Record) {}, "", false},
		"another inode":          {func(rec *lockstate.Record) { rec.Inode.Ino++ }, "", true},
		"renamed":                {func(*lockstate.Record) {}, "g", true},
		"not to be trusted":      {func(rec *lockstate.Record) { rec.Fresh = !rec.Fresh }, "", true},
		"another boot":           {func(rec *lockstate.Record) { rec.OnCrash = lockstate.Keep }, "", true},
		"was changed under it":   {func(rec *lockstate.Record) { rec.Changed = true }, "", true},
		"sealed, since it ended": {func(rec *lockstate.Record) { rec.Sealed = true }, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, kept := range reopened(t, store) {
				if kept.Lease != nil && !c.puts {
					continue // always written
				}
				next := &putStore{Memory: store.Reopen()}
				tab := lockstate.New(lockstate.Options{Store: next, Reserve: next.Reserve, LastToken: next.Tokens(), World: "w"})
				rec, path := kept, string(kept.Path)
				c.change(&rec)
				if c.path != "" {
					path = c.path
				}
				var files []string
				for _, f := range rec.Files {
					files = append(files, string(f))
				}
				if _, err := tab.Restore(rec, &kept, []string{path}, owner, files); err != nil {
					t.Fatal(err)
				}
				if (next.puts > 0) != c.puts {
					t.Errorf("%s: written %d times, want %v", kept.Path, next.puts, c.puts)
				}
				// Whatever was written, the next one finds the same.
				again := &putStore{Memory: next.Reopen()}
				for _, now := range reopened(t, next.Memory) {
					if now.Token != kept.Token || now.Lease != nil {
						continue
					}
					tab := lockstate.New(lockstate.Options{Store: again, Reserve: again.Reserve, LastToken: again.Tokens(), World: "w"})
					if _, err := tab.Restore(now, &now, []string{path}, owner, files); err != nil || again.puts > 0 {
						t.Errorf("%s: then: %v, written %d times", kept.Path, err, again.puts)
					}
				}
			}
		})
	}
}

// TestRecordSame: no field of a record is forgotten when two are compared.
func TestRecordSame(t *testing.T) {
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Interface().(type) {
		case time.Time:
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
			return
		case procid.ID:
			v.Set(reflect.ValueOf(procid.ID{Pid: 1}))
			return
		}
		switch v.Kind() {
		case reflect.Bool:
			v.SetBool(true)
		case reflect.String:
			v.SetString("x")
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			fill(v.Index(0))
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem())
		case reflect.Struct:
			fill(v.Field(v.NumField() - 1))
		case reflect.Int, reflect.Int64:
			v.SetInt(1)
		default:
			v.SetUint(1)
		}
	}
	special := map[string]bool{"Move": true, "Unlike": true, "Opened": true, "Members": true, "Stagers": true, "Foreign": true, "Lease": true}
	var whole lockstate.Record
	for i := range reflect.TypeFor[lockstate.Record]().NumField() {
		var empty, full lockstate.Record
		name := reflect.TypeFor[lockstate.Record]().Field(i).Name
		fill(reflect.ValueOf(&full).Elem().Field(i))
		if empty.Same(&full) || full.Same(&empty) {
			t.Errorf("%s doesn't matter", name)
		}
		if again := full; again.Same(&full) == special[name] {
			t.Errorf("%s: Same = %v", name, special[name])
		}
		if !special[name] {
			fill(reflect.ValueOf(&whole).Elem().Field(i))
		}
	}
	other := whole
	other.Lineage, other.Files = slices.Clone(whole.Lineage), slices.Clone(whole.Files)
	if !whole.Same(&other) {
		t.Error("the same is not the same")
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"token":1,"path":"a"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		rec, err := new(lockstate.RecordReader).Read(1, data)
		if err != nil {
			return
		}
		tab := lockstate.New(lockstate.Options{LastToken: 1})
		tab.Restore(rec, nil, []string{"a"}, procid.Fake(rec.Owner, nil), nil)
		if err := tab.Check(); err != nil {
			t.Error(err)
		}
	})
}
