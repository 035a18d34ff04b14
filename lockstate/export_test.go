package lockstate

// Encode is Record.encode for the tests outside of the package.
func (rec *Record) Encode() ([]byte, error) { return rec.encode(nil, new(lineageText)) }

// Plain reports whether encode does without reflection.
func (rec *Record) Plain() bool {
	_, ok := rec.appendPlain(nil, new(lineageText))
	return ok
}

// Plain reads a record if that can be done without reflection.
func (x *RecordReader) Plain(data []byte) (rec Record, ok bool) { return x.plain(data) }

// Same is same.
func (rec *Record) Same(o *Record) bool { return rec.same(o) }
