// Draw the charts with plotly, in the page's colours. The legends are elements of the page.
"use strict";

const Charts = (() => {
  let data = null;
  let axis = "tokens";
  let only = "";

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
      title: { font: { color: muted, size: 11.5 }, standoff: 6 }, nticks: 6, exponentformat: "e",
    };
    const { xaxis, yaxis, yaxis2, ...others } = changes;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 8, r: 10, t: 8, b: 8 }, hovermode: "x unified", uirevision: axis,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 12 },
      hoverlabel: { bgcolor: colour("card"), bordercolor: line, font: { color: colour("text"), size: 12 } },
      xaxis: { ...side, showgrid: false, zeroline: false, ...xaxis, title: { ...side.title, ...xaxis?.title } },
      yaxis: { ...side, zeroline: false, ...yaxis, title: { ...side.title, ...yaxis?.title } },
      ...(yaxis2 && { yaxis2: { ...side, zeroline: false, ...yaxis2, title: { ...side.title, ...yaxis2.title } } }),
      ...others,
    };
  }

  /** Draws the traces. Shows the text `nothing` instead if they have no points. */
  function draw(id, traces, changes, nothing) {
    const place = document.getElementById(id);
    if (!place.checkVisibility()) return;
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
  const dates = (wall) => ({ type: "date", nticks: 5, ...(wall > 1e3 && wall < 5e3 ? { dtick: 1000 } : {}), tickformat: wall < 6e5 ? "%H:%M:%S" : wall < 8e7 ? "%H:%M" : "%b %d", hoverformat: "%b %d %H:%M:%S" });

  /** Returns the values of the chosen axis. Times become dates. */
  const along = (columns) => axis === "unix_seconds" ? columns[axis].map((seconds) => seconds === null ? null : new Date(seconds * 1e3)) : columns[axis];

  function across(x) {
    if (axis === "tokens") return { title: { text: "tokens merged" }, tickformat: "~s", hoverformat: ".4s", rangemode: "tozero" };
    if (axis === "round") return { title: { text: "round" }, tickformat: ",d", hoverformat: ",d" };
    const known = x.filter((value) => value !== null).map(Number); // Ticks for a shorter time than is drawn would be endless.
    return { title: { text: "time" }, ...dates(known.length ? Math.max(...known) - Math.min(...known) : 0) };
  }

  /** Returns a y axis that fits the newer half of the lines, so that the high losses of the beginning do not flatten the rest. */
  function fitted(lines) {
    const xs = lines.flatMap(([x]) => x.filter((value) => value !== null).map(Number));
    const middle = (Math.min(...xs) + Math.max(...xs)) / 2;
    const newer = lines.flatMap(([x, y]) => y.filter((value, n) => value !== null && x[n] !== null && Number(x[n]) >= middle));
    const [bottom, top] = [Math.min(...newer), Math.max(...newer)], room = Math.max((top - bottom) * 0.15, bottom * 0.005);
    return newer.length ? { range: [bottom - room, top + room] } : {};
  }

  /** Returns points on a line where a merger took over or an operator's change took effect. Hovering shows the event. */
  function marks(lines, y) {
    const { marks } = data, at = marks.round.map((value) => Math.max(0, lines.round.findIndex((other) => other >= value)));
    return {
      name: "", x: along(marks), y: at.map((n) => y[n]), text: marks.text, type: "scatter", mode: "markers",
      marker: { symbol: "diamond", size: 8, color: colour("s4"), line: { color: colour("card"), width: 1.5 } }, hovertemplate: "%{text}<extra></extra>",
    };
  }

  const known = (values) => values.filter((value) => value !== null && value !== undefined);

  function learn() {
    const { lines, held_out: held } = data, x = along(lines), at = along(held);
    const hasRate = lines.rate.length > 0; // drawn in a strip of its own below
    document.getElementById("unit").textContent = data.unit;
    const alone = axis === "tokens" ? data.one_process ?? [] : [], [tokens, single] = [0, 1].map((n) => alone.map((point) => point[n]));
    draw("chart-learn", [
      line("training", x, lines.loss, "s1", { line: { color: colour("s1", 0.3), width: 1 }, hoverinfo: "skip" }),
      line("training", x, lines.smooth, "s1", { hovertemplate: "%{y:.5r}" }),
      line("held-out", at, held.loss, "s2", {
        mode: held.loss.length > 60 ? "lines" : "lines+markers", marker: { size: 6 }, hovertemplate: "%{y:.5r}",
      }),
      marks(lines, lines.smooth),
      line("one process, held-out", tokens, single, "s3", { line: { dash: "dash", width: 1.6 }, hovertemplate: "%{y:.5r}" }),
      ...(hasRate ? [line("learning rate", x, lines.rate, "s0", { yaxis: "y2", line: { width: 1.6 }, hovertemplate: "%{y:.2e}" })] : []),
    ], {
      xaxis: { ...across([...x, ...at]), ...(hasRate && { anchor: "y2" }) },
      yaxis: { ...fitted([[x, lines.smooth], [at, held.loss], [tokens, single]]), ...(hasRate && { domain: [0.26, 1] }) },
      ...(hasRate && { yaxis2: { domain: [0, 0.16], rangemode: "tozero", nticks: 2 } }),
    }, nothing());
    const training = last(known(lines.smooth)), newest = last(known(held.loss));
    const then = lines.smooth[lines.round.findIndex((round) => round >= last(held.round))]; // training loss at that round
    legend("legend-learn", known(lines.loss).length || held.loss.length ? [
      ["s1", "training, smoothed", fixed(training, 4)], ["s2", "held-out", fixed(newest, 4)],
      ...(then && newest ? [["", "gap", fixed(newest - then, 3)]] : []),
      ...(single.length ? [["s3", "one process", fixed(last(single), 4)]] : []),
      ...(hasRate ? [["s0", "learning rate", last(lines.rate).toExponential(1)]] : []),
      ...(data.marks.round.length ? [["s4", "steered, or taken over", "", true]] : []),
    ] : []);
  }

  const nothing = () => data.lines.round.length ? "The islands report no losses." : "No round has closed yet.";

  const COLOURS = ["s1", "s2", "s3", "s4", "good", "bad", "s0", "text"];
  const ISLANDS_DRAWN = 16;

  function losses() {
    const names = Object.keys(data.islands).filter((name) => !only || name === only), newest = (name) => last(known(data.islands[name].loss));
    const recent = [...names].sort((a, b) => last(data.islands[b].round) - last(data.islands[a].round)).slice(0, ISLANDS_DRAWN).sort();
    const drawn = recent.map((name, n) => [name, along(data.islands[name]), smooth(data.islands[name].loss), COLOURS[n % COLOURS.length]]);
    draw("chart-losses", drawn.map(([name, x, y, swatch]) => line(name, x, y, swatch, {
      line: { width: 1.5, dash: recent.indexOf(name) >= COLOURS.length ? "dot" : "solid" }, hovertemplate: "%{y:.4r}",
    })), { xaxis: { ...across(drawn.flatMap(([, x]) => x)), nticks: 4 }, yaxis: fitted(drawn.map(([, x, y]) => [x, y])), hovermode: "closest" }, nothing());
    const worst = drawn.filter(([name]) => newest(name) !== null).sort((a, b) => newest(b[0]) - newest(a[0])).slice(0, 4);
    legend("legend-losses", worst.map(([name, , , swatch]) => [swatch, name, fixed(newest(name), 3)]));
  }

  /** Returns the bias-corrected moving average. */
  function smooth(values, keep = 0.8) {
    let total = 0, weight = 0;
    return values.map((value) => {
      if (value !== null) { total = keep * total + (1 - keep) * value; weight = keep * weight + 1 - keep; }
      return weight ? total / weight : null;
    });
  }

  /** Returns round tick distances for counts from 0 to `most`. */
  const whole = (most) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((step) => most / step <= 5) ?? Math.ceil(most / 5);

  function islands() {
    const { lines, now } = data, x = [...lines.round, now.rounds], most = Math.max(1, now.known, ...lines.known);
    const step = { line: { shape: "hv" } };
    draw("chart-islands", lines.round.length ? [
      line("known", x, [...lines.known, now.known], "s0", { line: { shape: "hv", dash: "dot", width: 1.8 } }),
      line("live", x, [...lines.live, now.live], "s1", step),
      line("participating", x, [...lines.participating, now.participating], "s3", step),
    ] : [], {
      xaxis: { title: { text: "round" }, tickformat: ",d", nticks: 5 },
      yaxis: { tickformat: ",d", range: [0, most * 1.12], dtick: whole(most) },
    }, "No round has closed yet.");
    legend("legend-islands", lines.round.length
      ? [["s0", "known", now.known], ["s1", "live", now.live], ["s3", "participating", now.participating]] : []);
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
    }, "No round has closed yet.");
    const late = all ? 100 * (all - counts[0]) / all : 0;
    legend("legend-staleness", all ? [["s3", "from the newest version", `${(100 - late).toFixed(1)} %`, true], ["s2", "late", `${late.toFixed(1)} %`, true]] : []);
  }

  function all() {
    if (!data || document.hidden) return;
    for (const figure of [learn, islands, losses, rounds, staleness]) figure();
  }

  document.addEventListener("visibilitychange", all);
  return {
    show(charts, island) { data = charts; only = island; data.lines.smooth = smooth(data.lines.loss); all(); },
    over(name) { axis = name; all(); },
    again: all,
  };
})();
