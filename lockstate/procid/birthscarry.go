//go:build linux

package procid

// A CarriedBirth is what a resolver knows of a process that was not seen, for the
// daemon that goes on in its place.
type CarriedBirth struct {
	Pid   int
	At    uint64 // CLOCK_BOOTTIME ns
	Above []ID   // from whom it descends, nearest first, but for the unseen
	// Between: some of these may live, below the first.
	Between bool
}

// CarryBirths returns what is known of processes that were not seen.
func (r *Resolver) CarryBirths() (all []CarriedBirth) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rings == nil {
		return nil
	}
	r.hearBirthsLocked()
	b.leave()
	for pid, l := range b.left {
		all = append(all, CarriedBirth{pid, l.at, append([]ID{l.maker.id}, l.maker.chain...), l.between})
	}
	return all
}

// TakeUpBirths makes a resolver know what an earlier one did. It comes after
// FollowBirths.
func (r *Resolver) TakeUpBirths(all []CarriedBirth) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range all {
		if b.rings != nil && len(c.Above) > 0 {
			b.left[c.Pid] = leaf{c.At, &Process{id: c.Above[0], chain: c.Above[1:], from: r}, c.Between}
		}
	}
}
