package tests

import "testing"

// W5: names that everyone may create and touch although the directory is held.
func TestW5(t *testing.T) {
	m := mount(t, "--shared-name", "staged.timestamp", "--shared-name", "*.seen")
	openDir(t, m.Back("D"))
	owner, other := agent(t), stranger(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	other.want("EBUSY", "creat", m.At("D/content"), "wronly,creat")

	for _, name := range []string{"staged.timestamp", "rack7.seen"} {
		path := m.At("D", name)
		other.must("creat", path, "wronly,creat")
		other.must("utimens", path)
		other.must("open", "h", path, "wronly,trunc")
		other.must("write", "h", "now\n")
		// A handle on it stands in nobody's way.
		owner.must("unlink", m.At("D/devserver"))
		owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
		other.must("close", "h")
		owner.must("utimens", path)
		// It is still the holder's to remove, and not a way around the lock.
		other.want("EBUSY", "unlink", path)
		other.want("EBUSY", "rename", path, m.At("D/content"))
		other.want("EBUSY", "link", path, m.At("D/content"))
		other.want("EBUSY", "rename", m.At("D"), m.At("E"))
	}
	// What gets another name is content.
	path := m.At("D/staged.timestamp")
	owner.must("link", path, m.At("D/content"))
	other.want("EBUSY", "open", "h", path, "wronly")
}

// TestW5Crash: what somebody else has created under a shared name is not cleared away
// with what a crashed owner has made (R7), whether the directory was there before or not.
// What a holder has created there is.
func TestW5Crash(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--shared-name", "*.seen", "--on-crash", policy)
			openDir(t, m.Back("was"))
			owner, other := agent(t), stranger(t)
			owner.must("creat", m.At("was/devserver"), "wronly,creat,excl")
			owner.must("mkdir", m.At("made"))
			owner.must("chmod", m.At("made"), "0777")
			for _, d := range []string{"was", "made"} {
				other.must("put", m.At(d, "a.seen"), "other", "creat")
				owner.must("put", m.At(d, "a.seen"), "owner", "trunc")
				owner.must("put", m.At(d, "b.seen"), "owner", "creat")
				owner.Child().must("put", m.At(d, "c.seen"), "child", "creat")
				owner.must("put", m.At(d, "content"), "owner", "creat")
			}
			owner.Kill()
			for _, d := range []string{"was", "made"} {
				m.awaitFree(d)
				wantTree(t, m.Back(d), []string{"a.seen=owner"})
			}
		})
	}
}
