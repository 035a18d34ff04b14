package fs

import (
	"bytes"
	"log/slog"
	"os"
	"reflect"
	"testing"
	"time"
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
		case "Log", "Replace", "Successor":
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
