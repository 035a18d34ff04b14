// Stagefs mounts a filesystem over a static directory that makes the lock files
// and directories of unmodified build tools binding for everyone.
//
// The command only wires: the mount is served by package fs, and the other commands
// are clients of the control directory, MOUNT/.stagefs.
//
// Standard output carries data, standard error everything that is said. The
// exit statuses are listed in exit.go and in the manual page below share/.
package main
