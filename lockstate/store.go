package lockstate

// A Store keeps what must outlive the daemon: how far the tokens have come and
// the locks in force (S1). Package storetest is what every store must pass.
//
// Put and Delete take effect in the order in which they are called, and return
// at once: they may be called with Table.mu held. Flush and Sync may block. All
// methods may be called concurrently.
type Store interface {
	// Tokens returns the mark: tokens up to it may have been given out.
	Tokens() uint64
	// Reserve raises the mark, durably: also through a power cut.
	Reserve(upTo uint64) error

	// Load returns the records that the store held when it was opened, by
	// token.
	Load() map[uint64][]byte
	// Put keeps the record of a lock, in place of an earlier one with the
	// same token. A record is one line of text, which stays the caller's.
	Put(token uint64, record []byte)
	// Delete forgets the record of a lock.
	Delete(token uint64)
	// Flush returns when all that was put and deleted before outlives the
	// daemon. An error says that the store can keep nothing at the moment;
	// it goes on trying by itself, and misses nothing.
	Flush() error
	// Sync returns when it outlives a power cut as well.
	Sync() error

	// Warnings tells what was found damaged when the store was opened (S2).
	Warnings() []string
	// Complete reports whether all was there that had been flushed, as far
	// as can be told.
	Complete() bool
	Close() error
}
