package lockstate_test

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestRecordEncode: what is written without reflection is what json.Marshal
// writes, and is written that way for the records that are plain.
func TestRecordEncode(t *testing.T) {
	id := rapid.Custom(func(t *rapid.T) procid.ID {
		return procid.ID{Pid: rapid.Int().Draw(t, "pid"), Start: rapid.Uint64().Draw(t, "start")}
	})
	word := rapid.StringMatching(`[ !#-%'-;=?-\[\]-~]*`)
	odd := rapid.OneOf(rapid.SampledFrom([]string{"\"", "\\", "<&>", "\x7f", "\x1f", "\xff", "é", "\u2028"}), rapid.String())
	oddBytes := rapid.OneOf(odd, rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
	const drawn = 31
	if n := reflect.TypeFor[lockstate.Record]().NumField(); n != drawn {
		t.Fatalf("a record has %d fields, and %d are tried here", n, drawn)
	}
	inode := rapid.Custom(func(t *rapid.T) lockstate.Inode {
		return lockstate.Inode{Ino: rapid.Uint64().Draw(t, "ino"), Birth: rapid.Int64().Draw(t, "birth")}
	})
	fileID := rapid.Custom(func(t *rapid.T) lockstate.FileID {
		return lockstate.FileID{Dev: rapid.Uint64().Draw(t, "dev"), Ino: rapid.Uint64().Draw(t, "file's ino"), Birth: rapid.Int64().Draw(t, "file's birth")}
	})
	plain := 0
	var reader lockstate.RecordReader
	rapid.Check(t, func(t *rapid.T) {
		text, raw := word, word
		if rapid.Bool().Draw(t, "odd") {
			text, raw = odd, oddBytes
		}
		bytes := rapid.Map(raw, func(s string) lockstate.Bytes { return lockstate.Bytes(s) })
		is := func(name string) bool { return rapid.Bool().Draw(t, name) }
		rec := lockstate.Record{
			Token: rapid.Uint64().Draw(t, "token"), World: text.Draw(t, "world"), Path: bytes.Draw(t, "path"),
			Kind: rapid.SampledFrom([]lockstate.Kind{lockstate.Implicit, lockstate.Explicit, lockstate.Shared}).Draw(t, "kind"), Protocol: text.Draw(t, "protocol"),
			Inode: inode.Draw(t, "inode"), Inodes: rapid.SliceOfN(inode, 0, 2).Draw(t, "inodes"),
			Owner: id.Draw(t, "owner"), UID: rapid.Uint32().Draw(t, "uid"),
			Since: time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "s"), rapid.Int64Range(0, 999999999).Draw(t, "ns")).In(rapid.SampledFrom([]*time.Location{time.UTC, time.FixedZone("", -3*3600-1800)}).Draw(t, "zone")),
			File:  bytes.Draw(t, "file"), Files: rapid.SliceOfN(bytes, 0, 2).Draw(t, "files"),
			Keys: is("keys"), Command: is("command"), Why: text.Draw(t, "why"), OnCrash: text.Draw(t, "on_crash"),
			New: is("new"), Changed: is("changed"), Revocable: is("revocable"), Sealed: is("sealed"), Fresh: is("fresh"),
		}
		for _, a := range rapid.SliceOfN(id, 0, 3).Draw(t, "lineage") {
			rec.Lineage = append(rec.Lineage, procid.Ancestor{ID: a, Reaper: is("reaper")})
		}
		switch rapid.IntRange(0, 9).Draw(t, "more") {
		case 0:
			rec.Members = []procid.ID{id.Draw(t, "member")}
			rec.Stagers = []procid.ID{id.Draw(t, "stager")}
		case 1:
			rec.Lease = &lockstate.LeaseRecord{
				Client: text.Draw(t, "client"), UID: rapid.Uint32().Draw(t, "client's uid"), TTL: time.Duration(rapid.Int64().Draw(t, "ttl")),
				Deadline: time.Duration(rapid.Int64().Draw(t, "deadline")), Until: time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "until"), 0).UTC(),
			}
			if is("joined") {
				rec.Lease.Joined = []procid.ID{id.Draw(t, "joined")}
			}
		case 2:
			kinds := []lockstate.ScopeKind{lockstate.GroupScope, lockstate.SessionScope, lockstate.CgroupScope}
			rec.Scope = &lockstate.Scope{Kind: rapid.SampledFrom(kinds).Draw(t, "scope"), ID: text.Draw(t, "scope's id"), Born: rapid.Uint64().Draw(t, "born")}
		case 3:
			rec.Foreign = []lockstate.FileID{{Dev: 1}}
		case 6:
			rec.Instead = rapid.Uint64Min(1).Draw(t, "instead")
		case 4:
			rec.Move = &lockstate.Move{}
		case 7:
			rec.Unlike = rapid.SliceOfN(bytes, 1, 2).Draw(t, "unlike")
		case 5:
			rec.Opened = rapid.SliceOfN(fileID, 1, 3).Draw(t, "opened")
		}
		want, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		got, err := rec.Encode()
		if err != nil || string(got) != string(want) {
			t.Fatalf("Encode() = %s, %v, want %s", got, err, want)
		}
		if rec.Plain() {
			plain++
		}
		read, ok := reader.Plain(got)
		if ok != rec.Plain() {
			t.Fatalf("Plain(%s) = %v, want %v", got, ok, rec.Plain())
		}
		if ok {
			checkAsJSON(t, got, read)
		}
	})
	if plain == 0 {
		t.Error("no record was plain")
	}
}

// checkAsJSON compares a record with what JSON makes of its text.
func checkAsJSON(t interface {
	Helper()
	Fatalf(string, ...any)
}, text []byte, got lockstate.Record,
) {
	t.Helper()
	var want lockstate.Record
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatalf("%s was read, but: %v", text, err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(procid.ID{})); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", text, diff)
	}
}

// FuzzRecordRead: what is read without reflection means what JSON makes of it.
func FuzzRecordRead(f *testing.F) {
	rec := lockstate.Record{
		Token: 1, World: "w", Path: "a/b", Inode: lockstate.Inode{Ino: 2, Birth: -3}, Protocol: "mkdir", Owner: procid.ID{Pid: 4, Start: 5}, Since: time.Unix(6, 7).UTC(),
		Lineage: []procid.Ancestor{{ID: procid.ID{Pid: 8}}, {ID: procid.ID{Pid: 1}, Reaper: true}}, File: "f", Files: []lockstate.Bytes{"f", "g"},
		Inodes: []lockstate.Inode{{Ino: 9}, {}}, Opened: []lockstate.FileID{{Dev: 1, Ino: 2, Birth: -4}, {}}, Why: "so", Scope: &lockstate.Scope{ID: "s"}, Lease: &lockstate.LeaseRecord{Client: "c", TTL: 1},
	}
	for _, bare := range []bool{false, true} {
		if bare {
			rec = lockstate.Record{Token: 1, Path: "a"}
		}
		data, err := rec.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var x lockstate.RecordReader
		for range 2 { // the second time with what is known
			if rec, ok := x.Plain(data); ok {
				checkAsJSON(t, data, rec)
			}
		}
	})
}

func BenchmarkRecordRead(b *testing.B) {
	rec := lockstate.Record{Token: 1, World: "4cc86a5e-0000-0000-0000-000000000000:4026531836", Path: "board/version", Protocol: "mkdir", Owner: procid.ID{Pid: 12345, Start: 99999}, Since: time.Now().UTC()}
	for i := range 5 {
		rec.Lineage = append(rec.Lineage, procid.Ancestor{ID: procid.ID{Pid: 1000 + i, Start: 5555}})
	}
	data, err := rec.Encode()
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(data)))
	var x lockstate.RecordReader
	for b.Loop() {
		if _, err := x.Read(1, data); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRecordEncode(b *testing.B) {
	rec := lockstate.Record{Token: 1234, World: "4cc86a5e-0000-0000-0000-000000000000:4026531836", Path: "board/version", Protocol: "mkdir", Owner: procid.ID{Pid: 12345, Start: 99999}, Since: time.Now()}
	for i := range 5 {
		rec.Lineage = append(rec.Lineage, procid.Ancestor{ID: procid.ID{Pid: 1000 + i, Start: 5555}})
	}
	for b.Loop() {
		if _, err := rec.Encode(); err != nil {
			b.Fatal(err)
		}
	}
}
