package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// keepLocked notes one more reason for which r is kept.
func (t *Table) keepLocked(r *row, q *Request) {
	r.remains = false
	r.stay() // another one of its scope has taken it before its owner was dead (H3)
	switch {
	case q.Command:
		r.command = true
		if q.Why != "" {
			r.why = q.Why
		}
		if q.OnCrash != "" {
			t.setOnCrashLocked(r, q.OnCrash)
		}
	case q.Key != nil:
		if r.lostKey { // that on this file is in force again, another one is not
			r.lost = slices.DeleteFunc(r.lost, func(f FileID) bool {
				return slices.ContainsFunc(q.Opened, func(o FileID) bool { return o.Ino == f.Ino })
			})
			r.lostKey = len(r.lost) > 0
		}
		t.rekeyLocked(r, q.Key, q.Opened)
		if t.unopenLocked(r, q.Process.ID(), q.File) && r.protocol == byOpen {
			r.protocol = q.Protocol
		}
	case q.File != "":
		if i := r.fileAt(q.File); i >= 0 { // it was gone, and nobody has said so
			r.files[i].opened = q.lockFile().opened
		} else {
			r.files = append(r.files, q.lockFile())
		}
	}
}

// stay takes back that what kept r is gone.
func (r *row) stay() {
	if r.leaving {
		r.leaving, r.opened = false, nil
	}
}

// unopenLocked has a lock file keep no lock any more that r's owner, or the process by which
// it is kept by now, made by opening it: that only waited for the lock on the descriptor,
// which keeps r (A6). It reports whether there is such a file.
func (t *Table) unopenLocked(r *row, by procid.ID, file string) (some bool) {
	for _, old := range slices.Clone(r.dir.rows) {
		i := old.fileAt(file)
		if i < 0 || !old.files[i].opened || old != r && (r.kind != Shared || !r.isOf(old, by)) {
			continue
		}
		some = true
		old.files = slices.Delete(old.files, i, i+1)
		if old != r {
			t.endUnkeptLocked(old, Replaced)
		}
	}
	return some
}

// rekeyLocked makes k, which is on some files, keep r, and no other row: a lock that was
// converted.
func (t *Table) rekeyLocked(r *row, k any, files []FileID) {
	if old := t.keys[k]; old != nil && old != r {
		t.dropKeyLocked(old, k)
	}
	r.setKey(k, files)
	t.keys[k] = r
}

func (r *row) setKey(k any, files []FileID) {
	if r.keys == nil {
		r.keys = make(map[any][]FileID)
	}
	r.open(files)
	r.close(r.keys[k])
	r.keys[k] = files
}

// dropKeyLocked ends r if nothing else keeps it.
func (t *Table) dropKeyLocked(r *row, k any) bool {
	r.close(r.keys[k])
	delete(r.keys, k)
	delete(t.keys, k)
	if len(r.keys) > 0 && r.unsaid <= len(r.opened)/fewUnsaid {
		return false // a record lists all: one who has very many would write it anew for each
	}
	return t.endUnkeptLocked(r, Unlocked)
}

// fewUnsaid: of so many files in a record, one may be too much there. The next daemon takes
// a lock to be kept by it while it is open.
const fewUnsaid = 8

// unkeyLocked has no descriptor lock lead to r any more, and returns those that did.
func (t *Table) unkeyLocked(r *row) (keys []any) {
	for k := range r.keys {
		if t.keys[k] == r { // of a pending one it still is what the descriptor has
			delete(t.keys, k)
			keys = append(keys, k)
		}
	}
	return keys
}

// endUnkeptLocked ends r, which something keeps no longer, if nothing else does.
func (t *Table) endUnkeptLocked(r *row, why Reason) bool {
	if r.kept() {
		t.noteLocked(r)
		return false
	}
	t.endLocked(r, Ending{Reason: why})
	return true
}

// FileIs tells what the backing calls the lock file with a name in d, which was
// another one before, perhaps. The zero Inode: it is not known.
func (t *Table) FileIs(d *Dir, name string, is Inode) {
	t.mu.Lock()
	anew := t.fileIsLocked(d, name, is)
	t.mu.Unlock()
	if anew {
		t.flush()
	}
}

// fileIsLocked takes note of that. A file that is made anew keeps all the locks
// that the one of its name kept.
func (t *Table) fileIsLocked(d *Dir, name string, is Inode) (anew bool) {
	for _, r := range d.rows {
		i := r.fileAt(name)
		if i < 0 || r.files[i].inode == is {
			continue
		}
		anew = anew || r.files[i].inode != Inode{}
		r.files[i].inode = is
		t.noteLocked(r)
	}
	return anew
}

// LinkedFiles returns what the backing calls the files that were linked to their names
// and keep locks on d, as long as nothing was changed under these.
func (t *Table) LinkedFiles(d *Dir) (all []Inode) {
	if t.rows.Load() == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range d.rows {
		if r.protocol == "link" && !r.changed {
			for _, f := range r.files {
				all = append(all, f.inode)
			}
		}
	}
	return all
}
