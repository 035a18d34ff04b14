package fs

// knownFiles returns numbers of regular files that the kernel most likely
// knows: open ones first. The transport needs one to get a queue moving.
func (fs *FS) knownFiles() []uint64 {
	const enough = 64
	var ids []uint64
	fs.handles.any(func(h *handle) bool {
		if h.node != nil && h.node.isFile() {
			ids = append(ids, h.node.id)
		}
		return len(ids) == enough
	})
	ids = append(ids, fs.control.known(enough)...)
	fs.nodes.mu.RLock()
	defer fs.nodes.mu.RUnlock()
	for n := range fs.nodes.byID.all {
		if len(ids) >= 2*enough {
			break
		}
		if n.isFile() && n.lookups > 0 {
			ids = append(ids, n.id)
		}
	}
	return ids
}
