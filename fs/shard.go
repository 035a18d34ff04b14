package fs

// A shard is one of the maps that a table is made of, each with a mutex: opening and
// closing files is most of what many processes do at a time.
type shard[K comparable, V any] struct {
	mu spinMutex
	of map[K]V // protected by mu
	_  [cacheLine]byte
}

// cacheLine keeps what other processors change apart, in bytes.
const cacheLine = 64

// tableShards is how many shards a table has.
const tableShards = 64
