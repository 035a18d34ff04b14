package fs

import (
	"bytes"
	"encoding"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestCarriedOptions: every option goes on with the next program, but for those
// that only mean something in a process.
func TestCarriedOptions(t *testing.T) {
	var o Options
	v := reflect.ValueOf(&o).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.String:
			f.SetString("x")
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int, reflect.Int64:
			f.SetInt(7)
		case reflect.Slice:
			f.Set(reflect.ValueOf([]string{"y"}))
		}
	}
	o.Log = slog.New(slog.DiscardHandler)
	o.Replace = func(_, _ *os.File) error { return nil }
	c := &carried{Format: HandoverFormat, Started: time.Now()}
	copyFields(&c.Options, o)
	var b bytes.Buffer
	if err := c.write(&b); err != nil {
		t.Fatal(err)
	}
	c, err := readCarried(&b)
	if err != nil {
		t.Fatal(err)
	}
	var got Options
	copyFields(&got, c.Options)
	gv := reflect.ValueOf(got)
	for i := range v.NumField() {
		switch name := v.Type().Field(i).Name; name {
		case "Log", "Mounted", "Replace", "Successor":
		default:
			if !reflect.DeepEqual(v.Field(i).Interface(), gv.Field(i).Interface()) {
				t.Errorf("option %s: %v, want %v; is it in carriedOptions?", name, gv.Field(i), v.Field(i))
			}
		}
	}
}

// TestCarriedDamaged: nothing that was cut off or has another format is taken for
// what a daemon has written down.
func TestCarriedDamaged(t *testing.T) {
	c := &carried{Format: HandoverFormat, Rows: nil, Nodes: []byte{1, 2, 3}}
	var b bytes.Buffer
	if err := c.write(&b); err != nil {
		t.Fatal(err)
	}
	for n := range b.Len() {
		if _, err := readCarried(bytes.NewReader(b.Bytes()[:n])); err == nil {
			t.Errorf("read from %d of %d bytes", n, b.Len())
		}
	}
	c.Format++
	b.Reset()
	if err := c.write(&b); err != nil {
		t.Fatal(err)
	}
	if _, err := readCarried(&b); err == nil {
		t.Error("read from another format")
	}
}

// TestCarriedShape: what is written down keeps its shape as long as
// [HandoverFormat] keeps its number. gob would drop a field that the next
// program does not know, and leave one empty that the daemon before did not
// write: neither says so. (What carryNodes writes by hand has to be watched by
// who changes it.)
func TestCarriedShape(t *testing.T) {
	var b strings.Builder
	fmt.Fprintf(&b, "format %d\n", HandoverFormat)
	shape(&b, reflect.TypeFor[carried](), make(map[reflect.Type]bool))
	got := b.String()
	const file = "testdata/carried.txt"
	if os.Getenv("STAGEFS_UPDATE") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("a daemon writes down something else (-%s +now). Raise HandoverFormat, unless no daemon with %d has been released, and run this test with STAGEFS_UPDATE=1:\n%s", file, HandoverFormat, d)
	}
}

// shape writes what gob makes of a type, and of those in it.
func shape(b *strings.Builder, typ reflect.Type, seen map[reflect.Type]bool) {
	switch typ.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		shape(b, typ.Elem(), seen)
	case reflect.Map:
		shape(b, typ.Key(), seen)
		shape(b, typ.Elem(), seen)
	case reflect.Struct:
		if seen[typ] {
			return
		}
		seen[typ] = true
		if typ.Implements(reflect.TypeFor[encoding.BinaryMarshaler]()) {
			return // its own business, such as time.Time's
		}
		for f := range fields(typ) {
			fmt.Fprintf(b, "%s.%s %s %s\n", typ, f.Name, f.Type, f.Type.Kind())
		}
		for f := range fields(typ) {
			shape(b, f.Type, seen)
		}
	}
}

// fields yields those that gob sees.
func fields(typ reflect.Type) iter.Seq[reflect.StructField] {
	return func(yield func(reflect.StructField) bool) {
		for i := range typ.NumField() {
			if f := typ.Field(i); f.IsExported() && !yield(f) {
				return
			}
		}
	}
}
