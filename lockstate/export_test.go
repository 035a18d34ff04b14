package lockstate

// Encode is Record.encode for the tests outside of the package.
func (rec *Record) Encode() ([]byte, error) { return rec.encode() }

// Plain reports whether encode does without reflection.
func (rec *Record) Plain() bool {
	_, ok := rec.appendPlain(nil)
	return ok
}
