//go:build linux

package tests

// A scriptCase is what one or two agents do, a command a line; {} is the directory
// in which they do it. A line that begins with "2:" is the second agent's.
type scriptCase struct {
	name  string
	lines string
	uid   uint32
}

// asBacking are things that no lock concerns (M2).
func asBacking() []scriptCase {
	return []scriptCase{
		{name: "umask and owner", uid: nobody, lines: `
			umask 027
			creat {}/open/file wronly,creat,excl 0666
			creat {}/open/exec wronly,creat,excl 0777
			mkdir {}/open/dir 0777
			mknod {}/open/fifo fifo
			mknod {}/open/sock sock
			mknod {}/open/plain file
			symlink x {}/open/sym
			umask 077
			creat {}/open/private wronly,creat,excl 0666
			umask 0
			creat {}/open/suid wronly,creat,excl 06755
			mkdir {}/open/sticky 01777`},
		{name: "setgid directory", uid: nobody, lines: `
			creat {}/setgid/file wronly,creat,excl 02755
			mkdir {}/setgid/dir
			mkdir {}/setgid/dir/deeper
			mknod {}/setgid/fifo fifo
			open t {}/setgid tmpfile,rdwr
			linkfd t {}/setgid/tmp
			close t`},
		{name: "setgid directory as root", lines: `
			creat {}/setgid/file wronly,creat,excl 02755
			mkdir {}/setgid/dir 0750
			symlink x {}/setgid/sym`},
		{name: "ACL that comes and goes", lines: `
			creat {}/open/before wronly,creat,excl 0666
			getxattr {}/open/before system.posix_acl_access
			setfacl {}/open default
			creat {}/open/during wronly,creat,excl 0666
			mkdir {}/open/dir 0777
			creat {}/open/dir/file wronly,creat,excl 0640
			removexattr {}/open system.posix_acl_default
			creat {}/open/after wronly,creat,excl 0666
			mkdir {}/open/dir2 0777
			setfacl {}/open/before
			getxattr {}/open/before system.posix_acl_access`},
		{name: "SELinux labels that come and go", lines: `
			creat {}/open/file wronly,creat,excl 0666
			setxattr {}/open/file security.selinux system_u:object_r:etc_t:s0
			getxattr {}/open/file security.selinux
			creat {}/open/other wronly,creat,excl 0666
			getxattr {}/open/other security.selinux
			removexattr {}/open/file security.selinux
			getxattr {}/open/file security.selinux
			removexattr {}/open/other security.selinux`},
		{name: "xattrs that come and go", lines: `
			creat {}/open/file wronly,creat,excl 0666
			getxattr {}/open/file security.test
			getxattr {}/open/file user.test
			setxattr {}/open/file security.test one
			getxattr {}/open/file security.test
			setxattr {}/open/file user.test two
			removexattr {}/open/file security.test
			getxattr {}/open/file security.test
			getxattr {}/open/file user.test
			removexattr {}/open/file user.test
			getxattr {}/open/file user.test
			symlink file {}/open/link
			setxattr {}/open/link security.test three
			getxattr {}/open/link security.test`},
		{name: "default ACL", uid: nobody, lines: `
			umask 077
			creat {}/acl/file wronly,creat,excl 0666
			mkdir {}/acl/dir 0777
			creat {}/acl/dir/file wronly,creat,excl 0640
			mknod {}/acl/fifo fifo`},
		{name: "permissions", uid: nobody, lines: `
			creat {}/shut/new wronly,creat
			read {}/secret
			creat {}/secret wronly
			chmod {}/readable 0777
			chown {}/readable 65534 65534
			truncate {}/readable 0
			utimens {}/readable 5
			unlink {}/shut/file
			unlink {}/sticky/file
			rename {}/sticky/file {}/open/stolen
			link {}/secret {}/open/link
			readdir {}/unlistable
			read {}/unlistable/file
			mkdir {}/shut/dir
			setxattr {}/readable user.k v
			getxattr {}/readable user.k`},
		{name: "suid is dropped", uid: nobody, lines: `
			put {}/suid data append
			stat {}/suid
			truncate {}/suid2 1
			stat {}/suid2
			open h {}/suid3 rdwr
			fallocate h 0 0 9999
			close h
			stat {}/suid3`},
		{name: "chown drops suid", lines: `
			chown {}/suid 1 1
			stat {}/suid
			chmod {}/suid 06755
			put {}/suid data append
			stat {}/suid`},
		{name: "links", lines: `
			put {}/a one creat
			link {}/a {}/b
			stat {}/a
			put {}/b two append
			read {}/a
			unlink {}/a
			stat {}/b
			open h {}/b rdwr
			unlink {}/b
			write h three
			pread h 20 0
			linkfd h {}/c
			close h
			stat {}/b
			link {}/open {}/dirlink
			symlink loop {}/loop
			read {}/loop`},
		{name: "O_TMPFILE", lines: `
			open t {} tmpfile,rdwr 0640
			write t content
			linkfd t {}/tmp
			stat {}/tmp
			read {}/tmp
			close t
			open t {} tmpfile,wronly,excl
			linkfd t {}/never
			close t`},
		{name: "xattrs", lines: `
			put {}/f x creat
			setxattr {}/f user.one 1
			setxattr {}/f trusted.two 2
			setxattr {}/f security.three 3
			setxattr {}/f bogus.four 4
			getxattr {}/f user.one
			getxattr {}/f trusted.two
			getxattr {}/f user.none
			removexattr {}/f user.one
			removexattr {}/f user.one
			symlink f {}/s
			setxattr {}/s user.one 1`},
		{name: "renames", lines: `
			put {}/a a creat
			put {}/b b creat
			rename {}/a {}/b noreplace
			rename {}/a {}/b exchange
			read {}/a
			rename {}/a {}/none exchange
			rename {}/none {}/a
			mkdir {}/d
			mkdir {}/d/e
			rename {}/d {}/d/e/f
			rename {}/a {}/d
			rename {}/d {}/a
			rename {}/d {}/a exchange
			rename {}/b {}/w whiteout
			rmdir {}/a
			rename {}/w {}/.
			unlink {}/a
			rmdir {}/w`},
		{name: "holes", lines: `
			open h {}/f rdwr,creat
			pwrite h x 4096 0
			pwrite h y 4096 1048576
			seek h hole 0
			seek h data 4096
			fallocate h 3 0 4096
			seek h data 0
			fallocate h 0 0 4194304
			fallocate h 1 8388608 4096
			fallocate h 16 0 8192
			fallocate h 0x7000 0 1
			close h
			stat {}/f`},
		{name: "O_DIRECT", lines: `
			open h {}/f rdwr,creat,direct
			pwrite h x 8192 0
			pread h 4096 4096
			close h
			open h {}/f rdonly,direct
			pread h 4096 0
			close h`},
		{name: "mmap", lines: `
			open h {}/f rdwr,creat
			ftruncate h 4096
			mmap m h
			poke m hello
			read {}/f
			close h
			poke m world
			munmap m
			open h {}/f rdonly
			mmap m h`},
		{name: "O_APPEND", lines: `
			open a {}/f wronly,append,creat
			2:open b {}/f wronly,append
			write a 1
			2:write b 2
			write a 3
			2:write b 4
			close a
			2:close b
			read {}/f`},
		{name: "flock", lines: `
			open a {}/f rdwr,creat
			open b {}/f rdonly
			flock a
			flock b
			2:open c {}/f rdonly
			2:flock c
			close a
			2:flock c
			2:close c
			flock b`},
		{name: "fcntl locks", lines: `
			open a {}/f rdwr,creat
			setlk a wr
			2:open c {}/f rdwr
			2:setlk c wr
			2:setlk c rd
			2:getlk c wr
			setlk a rd
			2:setlk c rd
			2:setlk c un
			setlk a wr
			open b {}/f rdonly
			close b
			2:setlk c wr`},
		{name: "odd opens", lines: `
			creat {}/none rdonly
			creat {}/open wronly
			creat {}/open wronly,creat
			creat {}/open/. wronly,creat,excl
			symlink nowhere {}/dangling
			creat {}/dangling wronly,creat,excl
			creat {}/dangling wronly,creat
			read {}/nowhere
			creat {}/dangling wronly,nofollow
			creat {}/open rdonly,directory
			creat {}/readable rdonly,directory
			creat {}/readable/x wronly,creat
			creat {}/readable wronly,creat,excl
			mkdir {}/open
			rmdir {}
			rmdir {}/readable
			unlink {}/open
			mknod {}/open fifo`},
	}
}
