package filestore_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// A journal that was cut off at the end of a line has none that is torn (S2): what it was
// once tells, and is no shorter in a journal that is whole.
func TestJournalCutOff(t *testing.T) {
	o := filestore.Options{Key: "key", Place: "here"}
	for _, left := range []int{0, 1, 2, 3} {
		dir := t.TempDir()
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
		text, err := os.ReadFile(journals[0])
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.SplitAfter(text, []byte("\n"))
		if err := os.WriteFile(journals[0], bytes.Join(lines[:left], nil), 0o600); err != nil {
			t.Fatal(err)
		}
		for again := range 2 {
			s, err = filestore.Open(dir, o)
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
