// Draw the charts with plotly, in the page's colours. The legends are elements of the page.
"use strict";

const Charts = (() => {
  let data = null;
  let axis = "tokens";

  /** Returns a colour of the page in the present theme. */
  function colour(name, alpha = 1) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color.match(/[\d.]+/g);
    probe.remove();
    return `rgba(${found.slice(0, 3).join(",")},${alpha})`;
  }

  function layout(changes) {
    const line = colour("line"), muted = colour("muted");
    const side = {
      gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: muted, size: 11 }, automargin: true,
      title: { font: { color: muted, size: 11.5 }, standoff: 6 }, nticks: 6,
    };
    const { xaxis, yaxis, ...others } = changes;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 8, r: 10, t: 8, b: 8 }, hovermode: "x unified", uirevision: axis,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 12 },
      hoverlabel: { bgcolor: colour("card"), bordercolor: line, font: { color: colour("text"), size: 12 } },
      xaxis: { ...side, showgrid: false, zeroline: false, ...xaxis, title: { ...side.title, ...xaxis?.title } },
      yaxis: { ...side, zeroline: false, ...yaxis, title: { ...side.title, ...yaxis?.title } },
      ...others,
      ...(others.yaxis2 ? { yaxis2: { ...side, ...others.yaxis2, title: { ...side.title, ...others.yaxis2.title } } } : {}),
    };
  }

  /** Draws the traces. Shows the text `nothing` instead if they have no points. */
  function draw(id, traces, changes, nothing) {
    const place = document.getElementById(id);
    const empty = !traces.some((trace) => (trace.y ?? []).some((value) => value !== null && value !== undefined));
    if (empty) {
      if (place.dataset.drawn) Plotly.purge(place);
      delete place.dataset.drawn;
      const words = document.createElement("p");
      words.className = "nothing";
      words.textContent = nothing;
      place.replaceChildren(words);
      return;
    }
    if (!place.dataset.drawn) place.replaceChildren();
    place.dataset.drawn = "yes";
    Plotly.react(place, traces, layout(changes), { displayModeBar: false, responsive: true });
  }

  /** Shows a legend. Each entry is [colour, words, value, block]; a block is a filled mark instead of a line. */
  function legend(id, entries) {
    const place = document.getElementById(id);
    place.replaceChildren(...entries.map(([swatch, words, value, block]) => {
      const item = document.createElement("span"), mark = document.createElement("i");
      mark.style.setProperty("--swatch", `var(--${swatch})`);
      if (block) mark.className = "block";
      item.append(...(swatch ? [mark] : []), words);
      if (value !== undefined && value !== "") {
        const bold = document.createElement("b");
        bold.textContent = value;
        item.append(bold);
      }
      return item;
    }));
  }

  function line(name, x, y, swatch, more = {}) {
    const { line: drawn, ...others } = more;
    return { name, x, y, type: "scatter", mode: "lines", line: { color: colour(swatch), width: 2, ...drawn }, ...others };
  }

  const last = (values) => values.length ? values[values.length - 1] : null;
  const fixed = (value, digits) => value === null || value === undefined ? "–" : value.toFixed(digits);
  const across = (words) => axis === "tokens"
    ? { title: { text: words }, tickformat: "~s", hoverformat: ".4s" }
    : { title: { text: "round" }, tickformat: ",d", hoverformat: ",d" };

  /** Returns the y range without the first steep fall, which would flatten the rest; undefined if there are few points. */
  function settled(x, y, ...others) {
    const begin = x[0] + 0.08 * (last(x) - x[0]);
    const known = [y, ...others].flatMap((values) => values.filter((value, n) => value !== null && x[n] >= begin));
    if (x.length < 12 || known.length < 6) return undefined;
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const room = Math.max(0.005, (high - low) * 0.08);
    return [low - room, high + room];
  }

  function bits() {
    const { evaluations } = data;
    const x = evaluations[axis];
    const range = settled(x, evaluations.bits_per_byte);
    draw("chart-bits", [line("bits per byte", x, evaluations.bits_per_byte, "s1", {
      mode: x.length > 60 ? "lines" : "lines+markers", marker: { size: 5 }, hovertemplate: "%{y:.4f}",
    })], { xaxis: across("tokens trained"), yaxis: { range } },
    "There is no evaluation yet. Run `archipelago evaluate`; `up` runs it for you.");
    const known = evaluations.bits_per_byte.filter((value) => value !== null);
    legend("legend-bits", known.length ? [["s1", "newest", fixed(last(known), 4)], ["", "best", fixed(Math.min(...known), 4)]] : []);
  }

  /** Returns points on a line where a merger took over or an operator's change took effect. Hovering shows the event. */
  function marks(x, y) {
    const { marks } = data, at = marks[axis].map((value) => Math.max(0, x.findIndex((other) => other >= value)));
    return {
      name: "", x: marks[axis], y: at.map((n) => y[n]), text: marks.text, type: "scatter", mode: "markers",
      marker: { symbol: "diamond", size: 8, color: colour("s4"), line: { color: colour("card"), width: 1.5 } }, hovertemplate: "%{text}<extra></extra>",
    };
  }

  function loss() {
    const { lines } = data;
    draw("chart-loss", [
      line("as measured", lines[axis], lines.loss, "s1", { line: { color: colour("s1", 0.3), width: 1 }, hovertemplate: "%{y:.4f}" }),
      line("smoothed", lines[axis], lines.smooth, "s1", { hovertemplate: "%{y:.4f}" }),
      marks(lines[axis], lines.smooth),
    ], { xaxis: across("tokens merged"), yaxis: { range: settled(lines[axis], lines.smooth, lines.loss) } }, "No round has closed yet.");
    legend("legend-loss", lines.round.length ? [["s1", "smoothed", fixed(last(lines.smooth), 4)],
      ...(data.marks.round.length ? [["s4", "steered, or taken over", "", true]] : [])] : []);
  }

  function islands() {
    const { lines } = data;
    const step = { line: { shape: "hv" } };
    draw("chart-islands", [
      line("size", lines.round, lines.size, "s0", { line: { shape: "hv", dash: "dot", width: 1.8 } }),
      line("live", lines.round, lines.live, "s1", step),
      line("participating", lines.round, lines.participating, "s3", step),
    ], {
      xaxis: { title: { text: "round" }, tickformat: ",d" },
      yaxis: { rangemode: "tozero", tickformat: ",d", range: [0, Math.max(1, ...lines.size) * 1.12], dtick: Math.ceil(Math.max(1, ...lines.size) / 5) },
    }, "No round has closed yet.");
    legend("legend-islands", lines.round.length
      ? [["s0", "size", last(lines.size)], ["s1", "live", last(lines.live)], ["s3", "participating", last(lines.participating)]] : []);
  }

  function rounds() {
    const { details } = data;
    const ms = (values) => values.map((value) => value === null ? null : value * 1e3);
    const bar = (name, values, swatch) => ({
      name, x: details.round, y: ms(values), type: "bar", marker: { color: colour(swatch), line: { width: 0 } }, hovertemplate: "%{y:.0f} ms",
    });
    draw("chart-rounds", [
      bar("until the quorum", details.quorum_seconds, "s0"),
      bar("grace used", details.waited_seconds, "s1"),
      bar("merge", details.merge_seconds, "s2"),
      line("grace allowed, after the quorum", details.round, ms(details.quorum_seconds.map((quorum, n) => quorum + details.grace_seconds[n])), "s4",
        { line: { shape: "hvh", width: 1.4, dash: "dot" }, hovertemplate: "%{y:.0f} ms" }),
    ], { barmode: "stack", bargap: 0.15, xaxis: { title: { text: "round" }, tickformat: ",d" }, yaxis: { rangemode: "tozero", tickformat: "~s" } },
    "No round has closed yet.");
    const mean = (values) => values.length ? `${(1e3 * values.reduce((a, b) => a + b, 0) / values.length).toFixed(0)}` : "";
    legend("legend-rounds", details.round.length ? [
      ["s0", "quorum", mean(details.quorum_seconds), true], ["s1", "grace used", mean(details.waited_seconds), true],
      ["s4", "allowed", mean(details.grace_seconds)], ["s2", "merge", mean(details.merge_seconds), true],
    ] : []);
  }

  function staleness() {
    const counts = data.staleness, all = counts.reduce((a, b) => a + b, 0);
    const shares = counts.map((count) => 100 * count / all);
    draw("chart-staleness", [{
      name: "share", x: counts.map((_, n) => n), y: shares, type: "bar", customdata: counts,
      marker: { color: counts.map((_, n) => colour(n ? "s2" : "s3")), line: { width: 0 } },
      hovertemplate: "%{y:.1f} % (%{customdata:,d})<extra></extra>",
      text: shares.map((share) => share >= 1 ? `${share.toFixed(0)} %` : share ? "<1 %" : ""), textposition: "outside", cliponaxis: false,
      textfont: { size: 11, color: colour("muted") },
    }], {
      hovermode: "closest", bargap: 0.3, xaxis: { title: { text: "versions behind" }, dtick: counts.length > 12 ? undefined : 1, range: [-0.6, Math.max(3, counts.length) - 0.4] },
      yaxis: { ticksuffix: " %", range: [0, 112], tickvals: [0, 25, 50, 75, 100] },
    }, "Nothing was merged yet.");
    const late = all ? 100 * (all - counts[0]) / all : 0;
    legend("legend-staleness", all ? [["s3", "from the newest version", `${(100 - late).toFixed(1)} %`, true], ["s2", "late", `${late.toFixed(1)} %`, true]] : []);
  }

  function queues() {
    const { queues: seen } = data;
    if (!document.getElementById("chart-queues").checkVisibility()) return;
    const times = seen.unix_seconds.map((seconds) => new Date(seconds * 1e3));
    const wall = times.length ? last(times) - times[0] : 0;
    const most = Math.max(0, ...seen.pending);
    const mega = seen.memory_bytes.map((value) => value === null ? null : value / 1e6);
    const limit = seen.limit ? [line("limit", [times[0], last(times)], [seen.limit / 1e6, seen.limit / 1e6], "bad",
      { yaxis: "y2", line: { dash: "dot", width: 1.4 }, hovertemplate: "%{y:,.0f} MB" })] : [];
    draw("chart-queues", times.length > 1 ? [
      line("waiting", times, seen.pending, "s1", { line: { shape: "hv" } }),
      line("memory", times, mega, "s2", { yaxis: "y2", hovertemplate: "%{y:,.1f} MB" }),
      ...limit,
    ] : [], {
      xaxis: { type: "date", nticks: 5, tickformat: wall < 6e5 ? "%H:%M:%S" : wall < 8e7 ? "%H:%M" : "%b %d", hoverformat: "%b %d %H:%M:%S" },
      yaxis: { rangemode: "tozero", tickformat: "~s", nticks: 5, title: { text: "contributions" }, ...(most < 4 ? { range: [0, 4.2], dtick: 1 } : {}) },
      yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, ticksuffix: " MB", tickformat: "~g", tickmode: "auto", nticks: 4 },
    }, "This chart begins when the dashboard starts.");
    legend("legend-queues", times.length > 1 ? [["s1", "waiting", last(seen.pending)], ["s2", "memory", `${fixed(last(mega), 1)} MB`], ...(seen.limit ? [["bad", "limit", `${(seen.limit / 1e6).toFixed(0)} MB`]] : [])] : []);
  }

  function all() {
    if (!data || document.hidden) return;
    for (const figure of [bits, loss, islands, rounds, staleness, queues]) figure();
  }

  document.addEventListener("visibilitychange", all);
  return {
    show(charts) { data = charts; all(); },
    over(name) { axis = name; all(); },
    again: all,
  };
})();
