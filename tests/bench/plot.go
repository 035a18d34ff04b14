//go:build linux

package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Measures of the plot, in pixels.
const (
	plotWidth = 860
	plotLeft  = 150 // of the bars; names stand before
	plotRight = 810
	plotTop   = 74
	barHigh   = 6
	rowGap    = 9
)

// plotted are the subjects that the plot shows, at most, and in this order.
func plotted() []string {
	return []string{oursName, oursName + " threads", "bindfs", "passthrough_hp", "loopback"}
}

// plotStyle has the colours for light and for dark surroundings.
const plotStyle = `
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 }
.small { font-size: 10.5px; fill: #59636e }
.grid { stroke: #d1d9e0 }
.one { stroke: #59636e }
.spread { stroke: #1f2328 }
.s0 { fill: #0969da } .s1 { fill: #54aeff } .s2 { fill: #1a7f37 } .s3 { fill: #9a6700 } .s4 { fill: #bc4c00 }
.goal { fill: #cf222e }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.grid { stroke: #3d444d }
.one { stroke: #9198a1 }
.spread { stroke: #f0f6fc }
.s0 { fill: #4493f8 } .s1 { fill: #a5d6ff } .s2 { fill: #3fb950 } .s3 { fill: #d29922 } .s4 { fill: #f0883e }
.goal { fill: #f85149 }
}
`

// plot draws the ratios to the bare directory as an SVG: a bar a subject,
// from 1 on a logarithmic scale, with the goal as a mark.
func plot(r *Results) []byte {
	var names []string
	for _, name := range plotted() {
		if slices.ContainsFunc(r.Subjects, func(s subject) bool { return s.Name == name }) {
			names = append(names, name)
		}
	}
	var rows []string
	least, most := 0.8, 4.0
	for _, row := range r.rows() {
		if strings.HasSuffix(row, atOnce) {
			continue // in the tables; the plot is long enough
		}
		shown := false
		for _, name := range names {
			if x, ok := r.ratio(row, name, stateFree); ok {
				shown = true
				least, most = min(least, x.Spread.Median), max(most, x.Spread.Median, x.Spread.Max)
			}
		}
		if shown {
			rows = append(rows, row)
		}
	}
	scale := func(x float64) float64 {
		at := math.Log(max(x, least)/least) / math.Log(most/least)
		return plotLeft + at*(plotRight-plotLeft)
	}
	rowHigh := barHigh*len(names) + rowGap
	bottom := plotTop + rowHigh*len(rows)

	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`, plotWidth, bottom+44, plotWidth, bottom+44)
	fmt.Fprintf(&b, "\n<title>Time of stagefs and other FUSE filesystems, relative to the bare directory</title>\n<style>%s</style>\n", plotStyle)
	fmt.Fprintf(&b, `<text class="title" x="8" y="20">Time relative to the bare directory (%s), median of %d rounds; less is better</text>`+"\n", escape(r.Machine.Filesystem), r.Rounds)
	x := 8.0
	for i, name := range names {
		fmt.Fprintf(&b, `<rect class="s%d" x="%.0f" y="33" width="12" height="10"/><text x="%.0f" y="42">%s</text>`+"\n", class(name), x, x+17, escape(name))
		x += 40 + 7*float64(len(names[i]))
	}
	fmt.Fprintf(&b, `<path class="goal" d="M%.1f 32v12h3v-12z"/><text x="%.0f" y="42">goal</text>`+"\n", x, x+9)
	for tick := 1.0; tick <= most; tick *= 2 {
		kind := "grid"
		if tick == 1 {
			kind = "one"
		}
		at := scale(tick)
		fmt.Fprintf(&b, `<line class="%s" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/><text class="small" x="%.1f" y="%d" text-anchor="middle">%g×</text>`+"\n",
			kind, at, plotTop-6, at, bottom, at, plotTop-10, tick)
	}
	for i, row := range rows {
		plotRow(&b, r, row, names, plotTop+i*rowHigh, scale)
	}
	for i, line := range []string{
		fmt.Sprintf("%s, %s, Linux %s, %d cores; the line across a stagefs bar goes from the smallest to the largest ratio",
			r.Version, r.Began.Format("2006-01-02"), r.Machine.Kernel, r.Machine.Cores),
		fmt.Sprintf("profile %s; the machine's load was %s before and %s after (1, 5, 15 minutes)", r.Profile, r.LoadThen, r.LoadNow),
	} {
		fmt.Fprintf(&b, `<text class="small" x="8" y="%d">%s</text>`+"\n", bottom+18+14*i, escape(line))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func plotRow(b *bytes.Buffer, r *Results, row string, names []string, top int, scale func(float64) float64) {
	high := barHigh * len(names)
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", plotLeft-8, top+high/2+4, escape(row))
	for i, name := range names {
		x, ok := r.ratio(row, name, stateFree)
		if !ok {
			continue
		}
		from, to := scale(1), scale(x.Spread.Median)
		if from > to {
			from, to = to, from
		}
		y := top + i*barHigh
		fmt.Fprintf(b, `<rect class="s%d" x="%.1f" y="%d" width="%.1f" height="%d"><title>%s</title></rect>`+"\n",
			class(name), from, y, max(to-from, 1), barHigh-1, escape(row+", "+name+": "+cell(x.Spread)))
		if name == oursName {
			mid := float64(y) + (barHigh-1)/2.0
			fmt.Fprintf(b, `<line class="spread" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", scale(x.Spread.Min), mid, scale(x.Spread.Max), mid)
			if x.Limit > 0 {
				fmt.Fprintf(b, `<path class="goal" d="M%.1f %dv%dh2v-%dz"/>`+"\n", scale(x.Limit), top-1, high+1, high+1)
			}
		}
	}
}

// class is the number of a subject's colour, the same in every plot.
func class(name string) int { return slices.Index(plotted(), name) }

func escape(s string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(s))
	return b.String()
}
