//go:build linux

package tests

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var upgrades = flag.Int("upgrades", 8, "how often TestS1ReplaceLoad and TestS1ReplaceOutage replace the daemon")

// goSources is the directory of a package of Go's library.
func goSources(t *testing.T, pkg string) string {
	r := run(t, "go", "env", "GOROOT")
	src := filepath.Join(strings.TrimSpace(r.Out), "src", pkg)
	if _, err := os.Stat(src); err != nil {
		t.Skipf("needs Go's sources: %v", err)
	}
	return src
}

// TestS1ReplaceTar: what is unpacked while the daemon is replaced again and
// again is byte for byte what was packed.
func TestS1ReplaceTar(t *testing.T) {
	src := goSources(t, "runtime")
	pack := filepath.Join(tempDir(t), "pack.tar")
	if r := run(t, "tar", "cf", pack, "-C", src, "."); r.Status != 0 {
		t.Fatal(r)
	}
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, os.Mkdir(m.At("out"), 0o755))
		// As often as it takes: one after the other is unpacked until the
		// daemon has been replaced 20 times.
		var over atomic.Bool
		unpacked := 0
		var failure string
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ; !over.Load() || unpacked == 0; unpacked++ {
				dir := m.At("out", itoa(unpacked))
				out, err := exec.Command("sh", "-c", `mkdir "$0" && tar xf "$1" -C "$0" && diff -r "$0" "$2" && rm -rf "$0"`, dir, pack, src).CombinedOutput()
				if err != nil {
					failure = string(out) + err.Error()
					return
				}
			}
		}()
		for range 20 {
			m.replace()
		}
		over.Store(true)
		<-done
		if failure != "" {
			t.Errorf("tree %d: %s", unpacked, failure)
		}
		t.Logf("%d trees unpacked, compared and removed during 20 replacements", unpacked)
	})
}

// TestS1ReplaceLoad: stagers take directories, write and read through handles
// that stay open, and give them back; rivals try to get in. However often the
// daemon is replaced, nobody gets an error, and no rival a word in.
func TestS1ReplaceLoad(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		const workers = 4
		var over atomic.Bool
		var wg sync.WaitGroup
		var turns, refusals atomic.Int64
		for i := range workers {
			holder, rival := agent(t), stranger(t)
			dir := m.At("D" + itoa(i))
			var held sync.RWMutex // a rival tries only while the holder surely holds
			holding := false
			wg.Go(func() {
				for n := 0; !over.Load(); n++ {
					want := strings.Repeat(itoa(n%10), 1000)
					ok := true
					for _, step := range [][]string{
						{"mkdir", dir, "0777"},
						{"chmod", dir, "511"},
						{"open", "f", dir + "/file", "rdwr,creat,excl"},
						{"write", "f", want},
					} {
						if got := holder.Try(step...); got != "ok" {
							t.Errorf("turn %d: %q = %s", n, step, got)
							ok = false
						}
					}
					held.Lock()
					holding = ok
					held.Unlock()
					for range 3 {
						if got := holder.Get("pread", "f", "2000", "0"); got != want {
							t.Errorf("turn %d: read %q", n, got)
						}
					}
					holder.want("ok", "creat", dir+"/other", "wronly,creat")
					held.Lock()
					holding = false
					for _, step := range [][]string{
						{"close", "f"},
						{"unlink", dir + "/file"},
						{"unlink", dir + "/other"},
						{"rmdir", dir},
					} {
						if got := holder.Try(step...); got != "ok" {
							t.Errorf("turn %d: %q = %s", n, step, got)
							ok = false
						}
					}
					held.Unlock()
					if !ok {
						return
					}
					turns.Add(1)
				}
			})
			wg.Go(func() {
				for !over.Load() {
					held.RLock()
					if holding {
						rival.want("EBUSY", "creat", dir+"/rival", "wronly,creat")
						rival.want("EBUSY", "put", dir+"/file", "rival", "wronly")
						refusals.Add(2)
					}
					held.RUnlock()
				}
			})
		}
		for range *upgrades {
			m.replace()
		}
		over.Store(true)
		wg.Wait()
		t.Logf("%d turns, %d refusals, %d replacements", turns.Load(), refusals.Load(), *upgrades)
	})
}

// TestS1ReplaceOutage tells how long a client waits at the most while the daemon
// is replaced, under load.
func TestS1ReplaceOutage(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, os.Mkdir(m.At("D"), 0o755))
		load := exec.Command("sh", "-c", `while :; do cp -r "$1"/. "$0/tree" && rm -rf "$0/tree"; done`, m.At("D"), goSources(t, "fmt"))
		startCmd(t, load)
		var worst atomic.Int64 // since it was last reset
		var over atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			for !over.Load() {
				began := time.Now()
				if err := os.WriteFile(m.At("D", "mine"), nil, 0o644); err != nil {
					t.Errorf("create: %v", err)
					return
				}
				if err := os.Remove(m.At("D", "mine")); err != nil {
					t.Errorf("remove: %v", err)
					return
				}
				if took := int64(time.Since(began)); took > worst.Load() {
					worst.Store(took)
				}
			}
		})
		var stalls, quiet []time.Duration
		for range *upgrades {
			worst.Store(0)
			time.Sleep(20 * time.Millisecond) // as long as a replacement, without one
			quiet = append(quiet, time.Duration(worst.Swap(0)))
			m.replace()
			stalls = append(stalls, time.Duration(worst.Load()))
		}
		over.Store(true)
		wg.Wait()
		slices.Sort(stalls)
		slices.Sort(quiet)
		n := len(stalls)
		t.Logf("longest create and remove during each of %d replacements: median %v, max %v; without: median %v, max %v",
			n, stalls[n/2], stalls[n-1], quiet[n/2], quiet[n-1])
	})
}
