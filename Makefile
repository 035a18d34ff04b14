# make run DIR=/srv/static   sets up, builds, and serves DIR in the foreground
# make test                  sets up, and runs all tests

DIR ?=
ARGS ?=
DURATION ?= 10m
RACE ?=
TESTFLAGS ?= # -test.v tells of each test
PREFIX ?= /usr/local
BIN := bin/stagefs
QUICK ?=
MEMORY ?=
BENCH ?=
FIGURES ?= $(if $(QUICK)$(BENCH),bin/figures,tests/bench/figures)

# Everything is built as the program is, so that nothing is compiled twice.
export CGO_ENABLED := 0
FLAGS := -trimpath -tags urfave_cli_no_docs

# The commit is recorded where git can tell it, and no build fails because it can't.
VCS := $(shell git rev-parse HEAD >/dev/null 2>&1 && echo true || echo false)

# What the tests use as clients and tools, as Debian packages. gcc is for the
# race detector.
PACKAGES := acl attr bindfs bsdutils btrfs-progs e2fsprogs fuse3 gcc git libc6-dev libfile-nfslock-perl liblockfile-bin \
	lockfile-progs make ninja-build openjdk-17-jdk-headless perl procmail procps python3 python3-fasteners python3-filelock \
	python3-flufl.lock python3-lockfile \
	python3-oslo.concurrency rsync strace stress-ng systemd unzip util-linux xfsprogs zip

# What the benchmark compares with, and needs to do so.
BENCH_PACKAGES := bindfs e2fsprogs gcc git grep libc6-dev libfuse3-dev mergerfs pkg-config tar

.PHONY: build go run setup test unit unit-lockstate unit-others blackbox built blackbox-built blackbox-first blackbox-second blackbox-bench compat compat-beside compat-alone compat-first compat-second soak bench install uninstall clean

build: go
	go build $(FLAGS) -buildvcs=$(VCS) -o $(BIN) ./cmd/stagefs

# Go before 1.21 does not say that it is too old.
go:
	@case "$$(go version 2>/dev/null)" in ''|'go version go1.'[0-9].*|'go version go1.'1[0-9]*|'go version go1.20'*) \
		echo "needs Go $$(sed -n 's/^go //p' go.mod) or newer in the PATH, from https://go.dev/dl; there is: $$(go version 2>/dev/null || echo none)" >&2; exit 69; esac

# Root mounts without any helper; ordinary users need fusermount3.
run:
	@test -n "$(DIR)" || { echo "which directory? make run DIR=/srv/static [ARGS='--depth 2']" >&2; exit 64; }
	@if test "$$(id -u)" != 0 && ! command -v fusermount3 >/dev/null; then \
		echo "ordinary users mount through fusermount3: apt-get install fuse3, as root" >&2; exit 69; fi
	@$(MAKE) --no-print-directory build
	@test -e "$(DIR)" || mkdir -p "$(DIR)"
	@exec $(BIN) mount $(ARGS) -- "$(DIR)"

# Installs what is missing of PACKAGES if it may; says what will be skipped if not.
# The mode of /dev/fuse is what udev sets: without it ordinary users can't mount.
setup:
	@if test "$$(id -u)" = 0 && test -c /dev/fuse && test "$$(stat -c %a /dev/fuse)" != 666; then \
		echo "setup: chmod 666 /dev/fuse"; chmod 666 /dev/fuse; fi
	@if test "$$(id -u)" = 0 && ! unshare --user true 2>/dev/null; then \
		echo "setup: no user namespace can be made, as in a chroot: tests that need one will fail; enter it by pivot_root(8) instead" >&2; fi
	@command -v dpkg-query >/dev/null || { echo "setup: no Debian system; tests skip what they miss: $(PACKAGES)"; exit 0; }; \
	missing=; for p in $(PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	if test -z "$$missing"; then exit 0; fi; \
	if test "$$(id -u)" = 0; then \
		echo "setup: installing$$missing"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -q && apt-get install -q -y --no-install-recommends $$missing; \
	else \
		echo "setup: not root, so not installed, and tests that need it are skipped:$$missing"; \
	fi

# While units wait, as they do half of the time, the binaries of what comes next are built.
test: go setup
	@$(MAKE) --no-print-directory -j3 unit-lockstate unit-others built
	@$(MAKE) --no-print-directory blackbox-built

unit:
	@$(MAKE) --no-print-directory -j2 unit-lockstate unit-others
# Under the race detector, where there is the gcc that it needs.
unit-lockstate:
	@if command -v gcc >/dev/null; then set -x; CGO_ENABLED=1 go test -vet=off -race ./lockstate/...; \
	else set -x; go test -vet=off $(FLAGS) ./lockstate/...; fi
unit-others:
	go vet $(FLAGS) ./...
	go test -vet=off $(FLAGS) ./cmd/... ./fs/...

# The real binary on real mounts; as an ordinary user, most of it is skipped. Half of the
# time the tests wait for something: so two halves of them run at once, and some beside.
blackbox: built
	@$(MAKE) --no-print-directory blackbox-built
built: build
	go test -c -vet=off $(FLAGS) -ldflags=-w -o bin/tests.test ./tests
blackbox-built:
	@$(MAKE) --no-print-directory -j3 blackbox-first blackbox-second blackbox-bench
	cd tests && $(TESTS) -test.timeout 10m -test.run '$(ALONE)'
	@$(MAKE) --no-print-directory compat-alone

TESTS := STAGEFS_BIN='$(CURDIR)/$(BIN)' '$(CURDIR)/bin/tests.test' $(TESTFLAGS)
COMPAT := STAGEFS_MOUNT_OPTS=--compat $(TESTS) -test.timeout 10m

# Some have processes get the numbers of dead ones, which others may still have in mind,
# or the kernel drop its caches.
ALONE := ^Test(M2StressIO|M2HandleForgotten|AttackPidReuse|H2Numbers|H2Flood)$$
# They do little but wait, or look at no process or mount but their own.
WAITS = ^Test(M1Second|M1OverlapForgedBeside|M4Bound|S1AttackMidway|StaleMount|TTLLockRenewed|TransportTerminated|M2$(FILES)|Fault$(FAULTS))$$
FILES := (AppendedWhileTruncated|GoBuild|Privileges|Probes|Stress|WrittenWhileOpened|WrittenWhileTruncated)
FAULTS := (Another|LineHeldBack|LineOfUser|LogReader|PagesHeldAlone|PagesHeldReplace|ReleaseNoDaemon|StateRemoved)
# What mounts with --strict must not meet those whom TestFaultExec keeps in execve(2).
FIRST := ^Test([B-GI-K]|A[^57]|M2[^P]|M5|MountH|S1Descriptors|S1Volume)
blackbox-first:
	cd tests && $(TESTS) -test.timeout 40m -test.run '$(FIRST)' -test.skip '$(ALONE)|$(WAITS)'
blackbox-second:
	cd tests && $(TESTS) -test.timeout 40m -test.skip '$(FIRST)|$(ALONE)|$(WAITS)'
# Again, as on Linux 5.10, what depends on knowing processes. There the kernel tells how
# they end in the first PID namespace alone, whose number is PROC_PID_INIT_INO.
compat: compat-beside
	@$(MAKE) --no-print-directory compat-alone
compat-beside:
	@if $(TOLD); then $(MAKE) --no-print-directory compat-first compat-second; \
	else echo "not again as on Linux 5.10, which does not tell in a container how processes end"; fi
compat-alone:
	@if $(TOLD); then set -x; cd tests && $(COMPAT) -test.run '^TestH2(Numbers|Flood)$$'; fi
TOLD := test "$$(readlink /proc/self/ns/pid)" = 'pid:[4026531836]'
compat-first:
	cd tests && $(COMPAT) -test.run 'TestR4|TestR5|TestH4|TestA8Clients' -test.skip '$(ALONE)'
compat-second:
	cd tests && $(COMPAT) -test.run 'TestH1|TestH2' -test.skip '$(ALONE)'
blackbox-bench:
	STAGEFS_BIN='$(CURDIR)/$(BIN)' go test -vet=off $(FLAGS) ./tests/bench/... ./tests/systems/...
	cd tests && $(TESTS) -test.timeout 10m -test.run '$(WAITS)'
	@$(MAKE) --no-print-directory compat-beside

# The stagers and rivals of the tests, for as long as one likes, and the soak under
# faults beside them; RACE=1 has the race detector watch the daemon.
soak: setup build
	@if test -n "$(RACE)"; then CGO_ENABLED=1 go build -race -trimpath -tags urfave_cli_no_docs -buildvcs=$(VCS) -o $(BIN).race ./cmd/stagefs; fi
	STAGEFS_BIN='$(CURDIR)/$(BIN)$(if $(RACE),.race)' go test ./tests -count=1 -v -run 'TestSoak|TestM2Stress' -soak=$(DURATION) -timeout 0

# Figures as text on standard output, samples and plot in tests/bench/figures; QUICK=1
# for a look in less than four minutes, MEMORY=1 also walks a million files, BENCH='--rows "rename|stat"' for more.
# The mount is measured beside the bare directory and what BENCH_PACKAGES brings.
bench: build
	@$(MAKE) --no-print-directory setup PACKAGES="$(BENCH_PACKAGES)" || echo "bench: goes on without what could not be installed" >&2
	@go build -o bin/bench ./tests/bench
	@mkdir -p $(FIGURES)
	@bin/bench --stagefs $(BIN) --json $(FIGURES)/bench.json --svg $(FIGURES)/bench.svg \
		$(if $(QUICK),--profile quick --budget 2m --subjects '^(stagefs|bindfs|loopback|passthrough_hp$$)') $(if $(MEMORY),--memory) $(BENCH)

install: build
	install -D -m 755 $(BIN) "$(DESTDIR)$(PREFIX)/bin/stagefs"
	install -D -m 644 cmd/stagefs/share/stagefs.1 "$(DESTDIR)$(PREFIX)/share/man/man1/stagefs.1"
	install -D -m 644 cmd/stagefs/share/stagefs.bash "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/stagefs"
	install -D -m 644 cmd/stagefs/share/stagefs@.service "$(DESTDIR)$(PREFIX)/lib/systemd/system/stagefs@.service"
	sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' "$(DESTDIR)$(PREFIX)/lib/systemd/system/stagefs@.service"

uninstall:
	cd "$(DESTDIR)$(PREFIX)" && rm -f bin/stagefs share/man/man1/stagefs.1 share/bash-completion/completions/stagefs lib/systemd/system/stagefs@.service

clean:
	rm -rf bin
