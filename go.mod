module github.com/stagefs/stagefs

go 1.26

require (
	github.com/gofrs/flock v0.13.1
	github.com/hanwen/go-fuse/v2 v2.12.1
	github.com/urfave/cli/v2 v2.27.7
	golang.org/x/sys v0.49.0
)
