package transport

// Opcodes of requests, from linux/fuse.h.
const (
	OpLookup          = 1
	OpForget          = 2
	OpGetAttr         = 3
	OpSetAttr         = 4
	OpReadlink        = 5
	OpSymlink         = 6
	OpMknod           = 8
	OpMkdir           = 9
	OpUnlink          = 10
	OpRmdir           = 11
	OpRename          = 12
	OpLink            = 13
	OpOpen            = 14
	OpRead            = 15
	OpWrite           = 16
	OpStatfs          = 17
	OpRelease         = 18
	OpFsync           = 20
	OpSetXattr        = 21
	OpGetXattr        = 22
	OpListXattr       = 23
	OpRemoveXattr     = 24
	OpFlush           = 25
	OpInit            = 26
	OpOpenDir         = 27
	OpReadDir         = 28
	OpReleaseDir      = 29
	OpFsyncDir        = 30
	OpGetlk           = 31
	OpSetlk           = 32
	OpSetlkw          = 33
	OpAccess          = 34
	OpCreate          = 35
	OpInterrupt       = 36
	OpBmap            = 37
	OpDestroy         = 38
	OpIoctl           = 39
	OpPoll            = 40
	OpNotifyReply     = 41
	OpBatchForget     = 42
	OpFallocate       = 43
	OpReadDirPlus     = 44
	OpRename2         = 45
	OpLseek           = 46
	OpCopyFileRange   = 47
	OpSetupmapping    = 48
	OpSyncfs          = 50
	OpTmpfile         = 51
	OpStatx           = 52
	OpCopyFileRange64 = 53
)
