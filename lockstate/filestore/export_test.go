package filestore

// OpenWatched is [Open] that tells of each step in which the files of a generation
// change: before it, where the disk is what changes, and when it is done.
func OpenWatched(stateDir, key string, step func(op, name string, done bool)) (*Store, error) {
	return Open(stateDir, Options{Key: key, steps: step})
}
