package fs

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Continue goes on in place of the daemon that this process was before. Of o,
// only what does not outlive a program counts: Log, Replace and Version. If it
// fails, the mount has to be made anew: nothing of the old one can be used.
func Continue(state io.Reader, o Options) (*Server, error) {
	c, err := readCarried(state)
	if err != nil {
		return nil, err
	}
	c.Options.Version = o.Version
	copyFields(&o, c.Options)
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.setDefaults()
	obeyMemoryLimit()
	s := &Server{ready: make(chan struct{}), done: make(chan struct{}), mountpoint: c.Mountpoint}
	if err := s.becomeDaemon(); err != nil {
		return nil, err
	}
	if s.world, err = world(); err != nil {
		return nil, err
	}
	if s.store, err = filestore.Continue(c.State); err != nil {
		return nil, err
	}
	s.warnings = append(s.warnings, s.store.Warnings()...)
	procs, err := newResolver(&o)
	if err != nil {
		return nil, err
	}
	procs.TakeUp(c.Procs)
	procs.KeepOn(o.Shelf, false)
	if err := s.newFS(o, c.Root, procs); err != nil {
		return nil, err
	}
	procs.TakeUpBirths(c.Births)
	// All of these are known, and recorded anew.
	_, open := s.fs.leftHot(s.store)
	var left map[uint64][]byte
	if !o.NoLocking {
		left = s.fs.cands.start(s.store, s.world)
	} else if open {
		_ = s.fs.hot.layOpen() // if there is no room, the record of the program before stays
	}
	if err := s.takeUp(c); err != nil {
		return nil, err
	}
	if !o.NoLocking { // else nothing of it is known here: it is for the next daemon with locks
		s.forgetLeft(left)
	}
	s.store.Unload()
	if o.Mountpoint == "" {
		claimAgain(c.Root, c.MountID)
	}
	if s.fs.privileged {
		raisePriority()
	}
	s.fs.log.Info("goes on", "version", o.Version, "pid", os.Getpid(), "handles", len(c.Handles), "locks", s.fs.table.Len(), "transport", s.transport.Name())
	go s.serve()
	close(s.ready)
	return s, nil
}

// forgetLeft deletes the records of what is over, or has been recorded anew.
func (s *Server) forgetLeft(cands map[uint64][]byte) {
	for id := range cands {
		s.fs.cands.unrecord(id)
	}
	for number := range s.store.Load() {
		// What the disk was too full to say of other locks: they are over.
		if number < lockstate.MemberBase && !s.fs.table.HasToken(number) || number >= lockstate.MemberBase && number < lockstate.MemberEnd {
			s.store.Delete(number)
		}
	}
}

// takeUp makes everything again that the daemon before had.
func (s *Server) takeUp(c *carried) error {
	fs := s.fs
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.ns.Lock()
	defer fs.ns.Unlock()
	fs.started, fs.mountID = c.Started, c.MountID
	var err error
	if fs.mountDev, err = devOf(c.MountID); err != nil {
		return err
	}
	fs.pass.on.Store(c.Passing)
	fs.pass.dev = c.PassDev
	fs.linger.start(fs)
	cands := fs.newCandidates(c.Candidates)
	if err := fs.takeUpNodes(c.Nodes, c.NextNode, c.Settled, cands); err != nil {
		return err
	}
	fs.takeUpNumbered(c.Numbered)
	if err := fs.takeUpRows(c); err != nil {
		return err
	}
	if err := errors.Join(fs.takeUpCandidates(c.Candidates, cands), fs.takeUpHandles(c, cands)); err != nil {
		return err
	}
	fs.hot.found()
	fs.advisory.TakeUp(c.Advisory)
	fs.denials.takeUp(c.Denials, c.Denied)
	fs.events.takeUp(c.Events, c.NextEvent)
	fs.control.takeUp(c.Control)
	fs.orphans.takeUp(fs, c.Orphans, c.Scanned)
	fs.replacing.unique = c.Replacing
	for _, id := range c.Watched {
		// Whoever has died meanwhile is told of at once, and waits for
		// reapMu.
		p := fs.procAgain(&carriedProc{ID: id})
		if err := fs.watch(p); err != nil {
			fs.log.Warn("the end of a process may be noticed late", "pid", id.Pid, "err", err)
		}
	}
	if s.transport, err = transport.Continue(&c.Transport, s.transportOptions(fs.mountOptions())); err != nil {
		return err
	}
	if err := fs.expiry.start(fs); err != nil {
		return err
	}
	fs.clearings.Go(fs.emptyTrash)
	return setInherited(carriedFDs(c), false)
}

// takeUpRows puts the locks back.
func (fs *FS) takeUpRows(c *carried) error {
	fs.table.TakeUpTokens(c.LastToken)
	keys := make(map[uint64][]lockstate.CarriedKey)
	for _, k := range c.Keys {
		keys[k.Token] = append(keys[k.Token], lockstate.CarriedKey{Key: fdKey{k.Node, k.Flock, k.ID}, Files: k.Files})
	}
	for row, err := range lockstate.CarriedRows(c.RowText, c.Rows) {
		if err != nil {
			return err
		}
		rec := row.Record
		owner := fs.procs.Process(rec.Owner)
		if owner == nil {
			owner = procid.Recorded(rec.Owner, rec.UID, rec.Lineage)
		}
		if row.Record.Inode == (lockstate.Inode{}) { // an older version did not know it
			var st unix.Statx_t
			if fs.statIn(string(rec.Path), "", &st) == nil {
				row.Record.Inode = fs.inodeOf(&st)
			}
		}
		if err := fs.table.TakeUpRow(row, split(string(rec.Path)), owner, keys[rec.Token]); err != nil {
			return fmt.Errorf("lock of %s: %w", plain(string(rec.Path)), err)
		}
	}
	fs.table.TakeUpStats(c.Stats)
	fs.table.Flush()
	fs.nodes.locksThere()
	return nil
}

// carriedFDs returns the descriptors that were inherited for c, but for those of
// processes: the resolver has them, and may have closed some by now.
func carriedFDs(c *carried) []int {
	fds := []int{c.Transport.FD, c.Root}
	for _, f := range c.Files {
		fds = append(fds, f.FD)
	}
	for _, h := range c.Handles {
		fds = append(fds, h.FD)
	}
	return fds
}
