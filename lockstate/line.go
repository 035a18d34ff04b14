package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A line is those to whom locks of one owner may pass, one after the other (R5). Most
// locks of a process have the same: so a lock costs no entry for each of them.
type line struct {
	lineKey
	heirs []procid.Ancestor
	rows  int // that are in it
}

// A lineKey tells lines apart: nobody changes a lineage, and most owners have but one.
type lineKey struct {
	owner procid.ID
	next  *procid.Ancestor
	n     int
}

// lines are all lines.
type lines struct {
	all map[lineKey]*line
	of  map[procid.ID]map[*line]struct{} // by each process that is in line
}

func newLines() lines {
	return lines{make(map[lineKey]*line), make(map[procid.ID]map[*line]struct{})}
}

// join returns the line of a lock, which counts it, or nil if the lock passes to nobody.
func (s *lines) join(owner procid.ID, lineage []procid.Ancestor) *line {
	n := slices.IndexFunc(lineage, func(h procid.Ancestor) bool { return h.Reaper })
	if n < 0 {
		n = len(lineage)
	}
	if n == 0 {
		return nil
	}
	key := lineKey{owner, &lineage[0], n}
	l := s.all[key]
	if l == nil {
		l = &line{lineKey: key, heirs: lineage[:n]}
		s.all[key] = l
		for _, h := range l.heirs {
			if s.of[h.ID] == nil {
				s.of[h.ID] = make(map[*line]struct{})
			}
			s.of[h.ID][l] = struct{}{}
		}
	}
	l.rows++
	return l
}

// leave is what undoes join.
func (s *lines) leave(l *line) {
	if l == nil {
		return
	}
	if l.rows--; l.rows > 0 {
		return
	}
	delete(s.all, l.lineKey)
	for _, h := range l.heirs {
		if delete(s.of[h.ID], l); len(s.of[h.ID]) == 0 {
			delete(s.of, h.ID)
		}
	}
}
