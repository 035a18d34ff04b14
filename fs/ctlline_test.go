package fs

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// TestCtlDocumented: the manual page tells of each command and each of its options.
func TestCtlDocumented(t *testing.T) {
	data, err := os.ReadFile("../cmd/stagefs/share/stagefs.1")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(strings.ReplaceAll(string(data), `\-`, "-"), "\n.Sh CONTROL COMMANDS\n")
	text, _, _ = strings.Cut(text, "\n.Sh ")
	of := make(map[string]string) // the headings of a command
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, ".It Cm "); ok {
			for part := range strings.SplitSeq(rest, ", Cm ") {
				verb, options, _ := strings.Cut(strings.TrimSpace(part), " ")
				of[verb] += " " + options + " "
			}
		}
	}
	for verb, options := range ctlOptions {
		told, ok := of[verb]
		if !ok {
			t.Errorf("the manual page does not tell of the command %s", verb)
		}
		for _, o := range strings.Fields(options) {
			if o = strings.TrimPrefix(o, "!"); !strings.Contains(told, " "+o+"= ") && !strings.Contains(told, " "+o+" ") {
				t.Errorf("the manual page does not tell of %s %s", verb, o)
			}
		}
	}
}

func TestParseCtl(t *testing.T) {
	for in, want := range map[string]ctlLine{
		"acquire a/b":                                   {verb: "acquire", dir: "a/b"},
		`acquire "a b"  shared   wait=5s`:               {verb: "acquire", dir: "a b", shared: true, wait: 5 * time.Second},
		`acquire a client="ci 1" ttl=1m wait=forever`:   {verb: "acquire", dir: "a", client: "ci 1", ttl: time.Minute, wait: forever},
		`acquire a why="say \"so\"\n" on-crash=destroy`: {verb: "acquire", dir: "a", why: "say \"so\"\n", onCrash: "destroy"},
		"acquire a owner=cgroup new":                    {verb: "acquire", dir: "a", owner: "cgroup", isNew: true},
		"renew a client=x":                              {verb: "renew", dir: "a", client: "x"},
		"renew a client=x ttl=10ms":                     {verb: "renew", dir: "a", client: "x", ttl: minTTL},
		"renew a client=x ttl=3":                        {verb: "renew", dir: "a", client: "x", ttl: 3 * time.Second},
		"wait a wait=.5":                                {verb: "wait", dir: "a", wait: 500 * time.Millisecond},
		"release a token=7 failed":                      {verb: "release", dir: "a", token: 7, failed: true},
		"wait a":                                        {verb: "wait", dir: "a", wait: forever},
		"wait a wait=0s":                                {verb: "wait", dir: "a"},
		"watch a token=18446744073709551615":            {verb: "watch", dir: "a", token: 1<<64 - 1},
		"break a it is client=x":                        {verb: "break", dir: "a", why: "it is client=x"},
		"check":                                         {verb: "check"},
		"check a":                                       {verb: "check", dir: "a"},
	} {
		if got, err := parseCtl(in); got != want || err != nil {
			t.Errorf("parseCtl(%q) = %+v, %v, want %+v", in, got, err, want)
		}
	}
}

// In a Go string, two IDs that are not UTF-8 would be one client's.
func TestParseCtlUTF8(t *testing.T) {
	for _, in := range []string{"acquire a client=\"x\xff\"", "acquire a client=\"\\x40\xfe\"", "acquire a why=\"\xff\""} {
		if got, err := parseCtl(in); err == nil {
			t.Errorf("parseCtl(%q) = %+v, want an error", in, got)
		}
	}
}

// Whatever is written, a line that is accepted says what it means within the
// bounds, and nothing panics.
func FuzzParseCtl(f *testing.F) {
	for _, s := range []string{
		"acquire a/b client=x ttl=16s wait=5s", `acquire "a b" why="x y" shared new`, "release a token=3 failed", "check", "break a why not",
		"renew a client=\"\xff\"", "watch a token=", "join a client=x client=y", "wait a wait=forever", "acquire a =", `acquire a why="`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		c, err := parseCtl(in)
		if err != nil {
			return
		}
		if c.dir == "" && in != strings.TrimRight(c.verb+" ", " ") && strings.TrimSpace(in) != "check" {
			t.Errorf("parseCtl(%q) has no directory", in)
		}
		if c.client != "" && (badClient(c.client) != nil || len(c.client) > MaxClient) {
			t.Errorf("parseCtl(%q): client %q", in, c.client)
		}
		if c.ttl != 0 && (c.ttl < minTTL || c.ttl > maxTTL || c.client == "") {
			t.Errorf("parseCtl(%q): ttl %v", in, c.ttl)
		}
		if c.wait < 0 || len(c.why) > maxWhy || !utf8.ValidString(c.why) {
			t.Errorf("parseCtl(%q): wait %v, why %q", in, c.wait, c.why)
		}
		if c.client != "" && c.verb == "renew" {
			again, err := parseCtl("renew " + strconv.Quote(c.dir) + " client=" + strconv.Quote(c.client))
			if again.dir != c.dir || again.client != c.client || err != nil {
				t.Errorf("parseCtl(%q) does not survive quoting: %+v, %v", in, again, err)
			}
		}
	})
}

func TestCutDir(t *testing.T) {
	for in, want := range map[string]struct{ dir, rest string }{
		"board/v1":              {"board/v1", ""},
		"board/v1/":             {"board/v1", ""},
		"board/v1 it is stuck":  {"board/v1", "it is stuck"},
		`"board/new\nline" why`: {"board/new\nline", "why"},
		`"caf\xe9" why not`:     {"caf\xe9", "why not"},
		`"with space/v2"`:       {"with space/v2", ""},
		".":                     {".", ""},
		"a/..b":                 {"a/..b", ""},
		"caf\xe9":               {"caf\xe9", ""},
	} {
		dir, rest, err := cutDir(in)
		if dir != want.dir || rest != want.rest || err != nil {
			t.Errorf("cutDir(%q) = %q, %q, %v, want %q, %q", in, dir, rest, err, want.dir, want.rest)
		}
	}
	for _, in := range []string{
		"", " ", "/", "/etc", "..", "../x", "a/../b", "a//b", "./a", "a/./b", "a\tb", "a\x00b", "a\x1b[31m",
		`"unfinished`, `""`, `"a\x00b"`, `"../x"`, strings.Repeat("a", 4096), "a\x7f", "dir why\r",
		"\"caf\xe9\"", "\"\\x40caf\xe9\" why", // not UTF-8: another directory's name would come of it
	} {
		if dir, rest, err := cutDir(in); err == nil {
			t.Errorf("cutDir(%q) = %q, %q, want an error", in, dir, rest)
		}
	}
}

// What is accepted names a place beneath the mount, and survives quoting.
func FuzzCutDir(f *testing.F) {
	for _, s := range []string{"a/b why", `"a\nb" c`, "..", `"\xff"`, "a b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		dir, _, err := cutDir(in)
		if err != nil {
			return
		}
		for _, name := range split(dir) {
			if name == "" || name == ".." || name == "." || strings.ContainsAny(name, "/\x00") {
				t.Errorf("cutDir(%q) = %q, which leads elsewhere", in, dir)
			}
		}
		again, _, err := cutDir(strconv.Quote(dir))
		if again != dir || err != nil {
			t.Errorf("cutDir(Quote(%q)) = %q, %v", dir, again, err)
		}
	})
}
