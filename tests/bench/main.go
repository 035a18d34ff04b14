//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	switch {
	case os.Getenv(envJob) != "":
		os.Exit(jobMain(os.Getenv(envJob)))
	case os.Getenv(envJanitor) != "":
		os.Exit(janitorMain(os.Getenv(envJanitor)))
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer cancel()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// options are the command line.
type options struct {
	stagefs  string
	dir      string
	image    string
	profile  string
	rounds   int
	budget   time.Duration
	rows     *regexp.Regexp
	subjects *regexp.Regexp
	peers    []string
	states   bool
	memory   bool
	json     string
	svg      string
	from     string
}

func parse(args []string, errs io.Writer) (options, error) {
	o := options{rows: regexp.MustCompile(""), subjects: regexp.MustCompile("")}
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(errs)
	f.StringVar(&o.stagefs, "stagefs", "bin/stagefs", "the stagefs `binary`")
	f.StringVar(&o.dir, "dir", "/var/tmp", "`directory` in which everything is made, on the filesystem to be measured")
	f.StringVar(&o.image, "image", imageAuto, "whether to measure in an ext4 image in that directory: `auto|always|never`; auto: where that is an ext4 without a journal")
	f.StringVar(&o.profile, "profile", "full", "how much work: `full|quick|tiny`")
	f.IntVar(&o.rounds, "rounds", 0, "how many `rounds`; default: as the profile says")
	f.DurationVar(&o.budget, "budget", 29*time.Minute, "begin no round that would end after this `time`")
	pattern := func(into **regexp.Regexp) func(string) error {
		return func(s string) (err error) { *into, err = regexp.Compile(s); return err }
	}
	f.Func("rows", "only the rows that match this `regexp`", pattern(&o.rows))
	f.Func("subjects", "only the subjects that match this `regexp`; the bare directory always", pattern(&o.subjects))
	f.Func("peer", "`name=command` of a further subject, in the foreground; {src} and {mnt} are filled in; repeatable", func(s string) error {
		name, command, _ := strings.Cut(s, "=")
		if name == "" || !strings.Contains(command, "{src}") || !strings.Contains(command, "{mnt}") {
			return errors.New("must be name=command, the command with {src} and {mnt}")
		}
		o.peers = append(o.peers, s)
		return nil
	})
	f.BoolVar(&o.states, "states", true, "also measure stagefs where the caller, its parent or many others hold locks")
	f.BoolVar(&o.memory, "memory", false, "also measure the daemons' memory after a walk over a million files (full), which takes minutes")
	f.StringVar(&o.json, "json", "", "write all samples to this `file`")
	f.StringVar(&o.svg, "svg", "", "write a plot to this `file`")
	f.StringVar(&o.from, "from", "", "measure nothing: report the samples in this JSON `file`")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	size, known := profiles()[o.profile]
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case !known:
		return o, fmt.Errorf("no profile %q: full, quick or tiny", o.profile)
	case o.image != imageAuto && o.image != imageAlways && o.image != imageNever:
		return o, fmt.Errorf("no image %q: auto, always or never", o.image)
	case o.rounds < 0:
		return o, fmt.Errorf("%d rounds?", o.rounds)
	case o.rounds == 0:
		o.rounds = size.Rounds
	}
	return o, nil
}

func run(ctx context.Context, args []string, out, errs io.Writer) int {
	o, err := parse(args, errs)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(errs, "bench:", err)
		return 2
	}
	res, err := results(ctx, o, errs)
	if err != nil {
		fmt.Fprintln(errs, "bench:", err)
	}
	if res == nil && ctx.Err() == nil {
		return 1
	}
	var bad error
	if res != nil {
		bad = errors.Join(err, report(out, res), save(o, res))
	}
	switch {
	case ctx.Err() != nil:
		return 130
	case bad != nil:
		fmt.Fprintln(errs, "bench:", bad)
		return 1
	}
	return 0
}

// results measures, or reads what was measured. After an interruption there are
// results and an error.
func results(ctx context.Context, o options, errs io.Writer) (*Results, error) {
	if o.from == "" {
		return measure(ctx, o, errs)
	}
	text, err := os.ReadFile(o.from)
	if err != nil {
		return nil, err
	}
	res := new(Results)
	if err := json.Unmarshal(text, res); err != nil {
		return nil, fmt.Errorf("%s: %w", o.from, err)
	}
	return res, nil
}

func save(o options, res *Results) error {
	var errs []error
	if o.json != "" {
		text, err := json.Marshal(res)
		// A sample a line: to be read by people, and compared by line.
		text = append(bytes.ReplaceAll(text, []byte(`,{"`), []byte(",\n{\"")), '\n')
		errs = append(errs, err, os.WriteFile(o.json, text, 0o644))
	}
	if o.svg != "" {
		errs = append(errs, os.WriteFile(o.svg, plot(res), 0o644))
	}
	return errors.Join(errs...)
}

func measure(ctx context.Context, o options, errs io.Writer) (res *Results, err error) {
	if os.Getuid() != 0 {
		return nil, errors.New("must be root, to mount for all and to drop caches")
	}
	if o.stagefs, err = filepath.Abs(o.stagefs); err != nil {
		return nil, err
	}
	if _, err := os.Stat(o.stagefs); err != nil {
		return nil, fmt.Errorf("%w; run make build, or say --stagefs", err)
	}
	raiseFiles()
	unix.Umask(0o022)
	root, err := os.MkdirTemp(o.dir, "stagefs-bench-")
	if err != nil {
		return nil, err
	}
	if root, err = filepath.EvalSymlinks(root); err != nil {
		return nil, err
	}
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	clear, err := startJanitor(root)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	defer func() { err = errors.Join(err, clear()) }()
	size := profiles()[o.profile]
	image, without := inImage(ctx, root, o.image, size)
	if without != nil && o.image != imageAuto {
		return nil, without
	}
	bin := filepath.Join(root, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return nil, err
	}
	kit, err := prepare(ctx, root, size)
	if err != nil {
		return nil, err
	}
	res = newResults(o, root)
	if image {
		res.Machine.Filesystem += " image"
	}
	found, notes := subjects(o, bin)
	res.Subjects = found
	r := &runner{o: o, kit: kit, talk: errs, res: res}
	if without != nil {
		r.note("on an ext4 without a journal, rows that make files depend on those before them: %v", without)
	}
	for _, n := range notes {
		r.note("%s", n)
	}
	err = r.rounds(ctx, found)
	if err == nil && o.memory {
		err = r.memory(ctx, found)
	}
	res.finish()
	return res, err
}
