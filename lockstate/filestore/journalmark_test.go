package filestore_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// journalOf returns the journal of a store that had three records, and what is in it.
func journalOf(t *testing.T, dir string, o filestore.Options) (name string, text []byte) {
	t.Helper()
	s, err := filestore.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	for token := range uint64(3) {
		s.Put(token+1, []byte(`{"a":"record"}`))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	journals, err := filepath.Glob(filepath.Join(dir, "key.journal.*"))
	if err != nil || len(journals) != 1 {
		t.Fatalf("journals %q, %v", journals, err)
	}
	text, err = os.ReadFile(journals[0])
	if err != nil {
		t.Fatal(err)
	}
	return journals[0], text
}

// A journal that was cut off at the end of a line has none that is torn (S2): what it was
// once tells, and is no shorter in a journal that is whole. So it does after a reboot,
// which makes the place another one.
func TestJournalCutOff(t *testing.T) {
	for _, then := range []string{"here", "there, after a reboot"} {
		t.Run(then, func(t *testing.T) { wantCutOff(t, then) })
	}
}

func wantCutOff(t *testing.T, then string) {
	o := filestore.Options{Key: "key", Place: "here"}
	for _, left := range []int{0, 1, 2, 3} {
		o.Place = "here"
		dir := t.TempDir()
		journal, text := journalOf(t, dir, o)
		lines := bytes.SplitAfter(text, []byte("\n"))
		if err := os.WriteFile(journal, bytes.Join(lines[:left], nil), 0o600); err != nil {
			t.Fatal(err)
		}
		o.Place = then
		for again := range 2 {
			s, err := filestore.Open(dir, o)
			if err != nil {
				t.Fatal(err)
			}
			cut := left < 3 && again == 0
			said := strings.Join(s.Warnings(), "; ")
			if len(s.Load()) != left || s.Complete() == cut || strings.Contains(said, "damaged in one place, set aside") != cut || !cut && said != "" {
				t.Errorf("%d lines left, time %d: %d records, Complete() = %v, Warnings() = %q", left, again, len(s.Load()), s.Complete(), said)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A power cut may leave a journal longer than what reached the disk of it: what was never
// written is zeros. That is a line cut off behind what was on the disk, and damage within.
func TestJournalBlankEnd(t *testing.T) {
	o := filestore.Options{Key: "key", Place: "here"}
	for _, row := range []struct {
		name, end string // of the journal, from what was on the disk on
		lost      int    // lines before it, which are zeros as well
		said      string
	}{
		{"zeros alone", "\x00\x00\x00", 0, "ends in the middle of a line"},
		{"a piece of a line", "3f2a91cc P 7 {\x00\x00", 0, "ends in the middle of a line"},
		{"zeros within", "3f2a\x00\x00cc P 7 {\x00\x00", 0, "damaged in one place"},
		{"what was on the disk", "\x00\x00\x00", 1, "damaged in one place"},
	} {
		dir := t.TempDir()
		journal, text := journalOf(t, dir, o)
		kept := bytes.Join(bytes.SplitAfter(text, []byte("\n"))[:3-row.lost], nil)
		text = append(append(kept, make([]byte, len(text)-len(kept))...), row.end...)
		if err := os.WriteFile(journal, text, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := filestore.Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(s.Warnings(), "; ")
		damaged := strings.Contains(row.said, "damaged")
		if len(s.Load()) != 3-row.lost || s.Complete() == damaged || !strings.Contains(said, row.said) {
			t.Errorf("%s: %d records, Complete() = %v, Warnings() = %q", row.name, len(s.Load()), s.Complete(), said)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
