// Show the server's data in the elements of the page.
"use strict";

const $ = (id) => document.getElementById(id);
const inlined = $("data").textContent.trim();
const query = new URLSearchParams(location.search);
const still = Boolean(inlined) || query.has("still");
const GONE_SHOWN = 4;
// The address is /runs/RUN/TAB, /runs/RUN/islands/ISLAND or, for the list of runs, /. A report has one page, #TAB.
const [, , runHere = "", tabHere = "overview", only = ""] = inlined ? [] : location.pathname.split("/").map(decodeURIComponent);
const TABS = ["overview", "islands", "sync", "events", "settings"];
const tab = () => inlined ? (TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview") : runHere ? tabHere : "runs";
const addressOf = (run, ...parts) => ["/runs", ...[run, ...parts].map(encodeURIComponent)].join("/") + location.search;
let page = null;
let state = { word: "loading", mood: "idle", seconds_left: null, since_unix_seconds: null, left: "", sentence: "", remedy: "" };
let showGone = false;

// -- formatting numbers -------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const dash = "–";
const count = (value) => value === null || value === undefined ? dash : whole.format(value);
/** Returns a number with that many decimals. With 3 or more, one below 0.1 has 3 significant digits instead. */
const fixed = (value, digits = 3) => value === null || value === undefined ? dash
  : digits > 2 && value && Math.abs(value) < 0.1 ? value.toPrecision(3) : value.toFixed(digits);

function scaled(value, units, step = 1000) {
  if (value === null || value === undefined) return dash;
  let n = 0;
  while (value >= step && n < units.length - 1) { value /= step; n += 1; }
  const digits = n === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[n]}`;
}
const size = (bytes) => scaled(bytes, [" B", " kB", " MB", " GB", " TB"]);
const short = (value) => value < 1e5 ? count(value) : scaled(value, ["", " k", " M", " G", " T"]);
const brief = (value) => value < 1e4 ? count(value) : scaled(value, ["", " k", " M", " G", " T"]);
const duration = (seconds) => seconds === null || seconds === undefined ? dash
  : seconds < 0.9995 ? `${(seconds * 1e3).toFixed(0)} ms` : seconds < 120 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : span(seconds);

function span(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

/** Returns a time of today, or the date and the time of another day. */
function clock(seconds, withSeconds = true) {
  const at = new Date(seconds * 1e3), now = new Date();
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return at.toDateString() === now.toDateString() ? time.slice(0, withSeconds ? 8 : 5) : `${at.getMonth() + 1}/${at.getDate()} ${time.slice(0, 5)}`;
}

// -- the page ----------------------------------------------------------------------------------------------------------

function put(id, text) {
  const place = $(id);
  if (place.textContent !== text) place.textContent = text;
}

function element(tag, className = "", ...inside) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

/** Fills a place anew if the data behind it have changed. */
function fill(place, data, make) {
  const text = JSON.stringify(data);
  if (place.dataset.shown === text) return;
  place.dataset.shown = text;
  place.replaceChildren(...make());
}

/** Returns an element with the text, in which words between backticks are code, and commands have a button to copy them, unless part of one is a placeholder. */
function worded(tag, className, text) {
  return element(tag, className, ...text.split("`").flatMap((words, n) => {
    if (n % 2 === 0) return [words];
    const code = element("code", "", words);
    if (inlined || !words.startsWith("archipelago ") || /\b[A-Z]{3,}\b|=[A-Z]$/.test(words)) return [code];
    const copy = element("button", "copy", "copy");
    copy.type = "button";
    copy.setAttribute("aria-label", `Copy ${words}`);
    copy.addEventListener("click", async () => {
      getSelection().selectAllChildren(code); // where a page without TLS may not write, the words are at least selected
      await navigator.clipboard?.writeText(words);
      copy.textContent = "copied";
    });
    return [code, copy];
  }));
}

function pill(word, mood) {
  const made = element("span", "pill", word);
  made.dataset.mood = mood;
  return made;
}

function link(href, words) {
  const made = element(inlined ? "span" : "a", "", words);
  made.href = href;
  return made;
}

function bar(id, share) { $(id).style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`; }

/** Shows the sections of the tab. */
function showTab() {
  const now = tab();
  for (const section of document.querySelectorAll("[data-tab]")) {
    section.hidden = section.dataset.tab !== now || (section.id === "problems" && !page?.problems.length);
  }
  $("tabs").hidden = now === "runs";
  fill($("tabs"), [now, only, runHere], () => TABS.map((name) => {
    const made = element("a", "", name[0].toUpperCase() + name.slice(1));
    made.href = inlined ? `#${name}` : addressOf(runHere, ...(name === "overview" ? [] : [name]));
    if (name === now) made.setAttribute("aria-current", "page");
    return made;
  }));
}

function write() {
  showTab();
  if (!page) return;
  const run = page;
  document.title = `${only ? `${only} · ` : ""}${run.run} · Archipelago`;
  put("run", run.run);
  $("run").title = run.run;
  put("sizes", run.size);
  put("traffic", `Payloads: ${size(run.counters.bytes_up)} from the islands, ${size(run.islands.reduce((sum, each) => sum + each.bytes_down, 0))} to them.`);
  writeTiles(run);
  writeCounters(run);
  writeIslands(page.islands);
  writeEvents(page.events);
  put("serving", `${run.merger.holder ? run.serving[0] : run.serving[0].toUpperCase()}${run.serving.slice(1)}.`);
  writeProblems(page.problems);
  writeSettings(page.settings, page.changed, page.steered);
  put("footer", inlined ? `Report of ${new Date(page.unix_seconds * 1e3).toLocaleString([], { hour12: false })}` : "");
}

/** Returns a sentence about the expected end of the run. */
function ending(seconds) {
  if (seconds === null || inlined) return "";
  const at = Date.now() / 1e3 + seconds;
  return seconds ? `The run ends in about ${span(seconds)}, at ${clock(at, false)}.` : "";
}

function writeTiles(run) {
  put("bits", fixed(run.held_out_last, 4));
  put("bits-sub", `${run.unit} · training ${fixed(run.loss)}`);
  fill($("verdict"), page.verdict, () => [worded("span", "", page.verdict)]);
  const told = [
    isAway() && `As of ${clock(page.unix_seconds)}:`, `${page.evaluated[0].toUpperCase()}${page.evaluated.slice(1)}.`, run.held_out_first !== null && `The first was ${fixed(run.held_out_first)}.`,
    ending(state.seconds_left),
  ].filter(Boolean).join(" ");
  fill($("learn-sub"), told, () => [worded("span", "", told)]);
  put("size", count(run.known));
  put("live", count(run.live));
  put("part", count(run.participating));
  put("islands-sub", run.rounds ? `${fixed(run.contributions_per_round, 2)} contributions per round` : "no round yet");
  fill($("step"), [run.step, run.steps], () => [short(run.step), element("small", "", ` of ${short(run.steps)}`)]);
  bar("step-bar", run.step / run.steps);
  const ago = page.round_seconds;
  put("step-sub", run.rounds ? `round ${count(run.rounds)}${inlined ? "" : isOld() ? `, as of ${clock(page.unix_seconds - ago)}` : ago < 3 ? ", just now" : `, ${span(ago)} ago`}` : "no round yet");
  put("tokens", short(run.tokens_merged));
  put("tokens-sub", [
    page.tokens_per_second && state.word === "training" ? `${brief(page.tokens_per_second)}/s` : "", run.tokens_lost ? `${brief(run.tokens_lost)} lost` : "none lost",
  ].filter(Boolean).join(" · "));
  const limit = run.memory_limit_bytes, used = run.memory_bytes;
  put("memory", used ? size(used) : dash);
  $("memory-meter").hidden = !limit;
  $("memory-meter").dataset.mood = page.problems.find((each) => each.code === "redis.memory")?.mood ?? "good";
  bar("memory-bar", limit ? used / limit : 0);
  put("memory-sub", limit ? `of ${size(limit)}, ${(100 * used / limit).toFixed(0)} %` : used ? "no limit is set" : "this server does not report it");
}

function writeCounters(run) {
  for (const name of ["published", "merged", "refused", "pending"]) {
    put(`b-${name}`, count({ ...run.counters, pending: run.pending }[name]));
    put(`t-${name}`, short(run[`tokens_${name}`] ?? run.tokens_merged + run.tokens_refused + run.tokens_pending));
  }
  put("counters-sub", `published = merged + refused + pending contributions. Rounds are open ${duration(run.open_seconds)}, grace ${duration(run.grace_seconds)}.`);
}

// -- islands -----------------------------------------------------------------------------------------------------------

const HEADS = ["island", "state", "newest rounds", "part", "lag", "tokens/s", "step", "up", "down", "queue", "seen"];
const MOODS = { training: "good", joining: "busy", leaving: "busy", left: "idle", done: "idle", silent: "bad" };
const rows = new Map();

/** Returns the cells of an island as texts; the lines below a text are small. */
function cellsOf(island) {
  return [
    [`${(100 * island.participation).toFixed(0)} %`],
    [island.live ? fixed(island.staleness, 2) : dash, island.score === null ? "" : `score ${fixed(island.score, 2)}`],
    [island.live ? count(island.tokens_per_second) : dash],
    [island.live && island.step_seconds ? duration(island.step_seconds) : dash],
    [size(island.bytes_up)], [size(island.bytes_down)], [count(island.backlog)],
    [isAway() ? dash : inlined || island.last_seen_seconds >= 3 ? span(island.last_seen_seconds) : "now"],
  ];
}

function troublesOf(island) {
  const lowered = island.live && island.factor !== null && island.factor < 1;
  return [
    lowered ? `Weight lowered to ${(100 * island.factor).toFixed(0)} %: its contributions disagree with those of the others (score ${fixed(island.score, 2)})` : "",
    island.link && island.link !== "ok" && island.live ? `Link: ${island.link}` : "",
    island.last_refusal ? `Last refused (of ${count(island.refused)}): ${island.last_refusal}` : "",
  ].filter(Boolean);
}

function writeIsland(island) {
  if (!rows.has(island.name)) rows.set(island.name, element("tr"));
  const root = rows.get(island.name), { asked } = island;
  const word = asked === "expel" ? "expelled" : asked === "drain" && island.live ? "draining" : island.shown;
  const where = [island.device, island.host, inlined || only ? island.machine : "", island.optimizer_origin && island.optimizer_origin !== "fresh" ? `from ${island.optimizer_origin}` : ""].filter(Boolean);
  const cells = cellsOf(island), troubles = troublesOf(island), shown = JSON.stringify([word, where, cells, troubles, island.strip]);
  root.classList.toggle("gone", !island.live);
  if (root.dataset.shown === shown) return;
  root.dataset.shown = shown;
  const name = element("th", "", link(addressOf(runHere, "islands", island.name), island.name), element("small", "", where.join(" · ")),
    ...troubles.map((words) => element("small", "trouble", words)));
  name.scope = "row";
  name.title = island.name;
  const state = pill(word, asked ? "warn" : MOODS[island.shown] ?? "idle");
  root.replaceChildren(name, element("td", "", state), element("td", "strip", strip(island.strip)), ...cells.map(([text, ...under], n) => {
    const cell = titled(HEADS[n + 3], text, ...under.filter(Boolean).map((words) => element("small", "", words)));
    cell.className = "num";
    return cell;
  }));
}

/** Returns a cell that shows the head of its column where the table is a list of cards. */
function titled(title, ...inside) {
  const cell = element("td", "", ...inside);
  cell.dataset.title = title;
  return cell;
}

/** Returns a mark for each of the newest rounds: in it, late or absent. */
function strip(marks) {
  const svg = document.createElementNS(document.querySelector("svg").namespaceURI, "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, marks.length) * 5} 14`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const [kind, is, top, high] of [["n", (late) => late < 0, 5, 4], ["o", (late) => late > 0, 0, 14], ["f", (late) => late === 0, 0, 14]]) {
    const path = document.createElementNS(svg.namespaceURI, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", marks.map((late, n) => is(late) ? `M${n * 5} ${top}h4v${high}h-4z` : "").join(""));
    svg.append(path);
  }
  return svg;
}

function writeIslands(islands) {
  const known = islands.filter((island) => !only || island.name === only)
    .sort((a, b) => (b.shown === "silent") - (a.shown === "silent") || b.live - a.live || a.name.localeCompare(b.name, "en", { numeric: true }));
  const gone = known.filter((island) => !island.live).sort((a, b) => a.last_seen_seconds - b.last_seen_seconds);
  const hidden = new Set(showGone ? [] : gone.slice(GONE_SHOWN));
  const shown = known.filter((island) => !hidden.has(island));
  shown.forEach(writeIsland);
  fill($("island-heads"), HEADS, () => HEADS.map((head, n) => element("th", n > 2 ? "num" : "", head)));
  const wanted = shown.map((island) => rows.get(island.name)), place = $("islands");
  if (wanted.length !== place.children.length || wanted.some((root, n) => place.children[n] !== root)) place.replaceChildren(...wanted);
  $("no-islands").hidden = Boolean(shown.length);
  $("more-islands").hidden = gone.length <= GONE_SHOWN;
  put("more-islands", showGone ? "hide islands that are gone" : `show ${hidden.size} islands that are gone`);
}

// -- events and problems -----------------------------------------------------------------------------------------------

const KINDS = { refused: "warn", diverged: "bad", expelled: "bad", paused: "warn", drained: "warn", lowered: "warn", idle: "warn", replaced: "warn", repaired: "warn" };

function writeEvents(events) {
  const shown = events.filter((event) => !only || event.who === only);
  $("no-events").hidden = shown.length > 0;
  fill($("events"), shown, () => shown.map((event) => {
    const time = element("time", "", clock(event.unix_seconds)), kind = element("span", "kind", event.kind + (event.times > 1 ? ` ×${event.times}` : ""));
    time.title = new Date(event.unix_seconds * 1e3).toString();
    kind.dataset.mood = KINDS[event.kind] ?? "idle";
    const what = element("span", "what", element("b", "", event.who), event.text, ...(event.remedy ? [worded("small", "remedy", event.remedy)] : []));
    return element("li", event.remedy || KINDS[event.kind] ? "" : "quiet", time, kind, what);
  }));
}

function writeProblems(problems) {
  const told = problems.map((each) => [each.code, each.who, each.text, each.names, each.remedy]);
  fill($("problem-list"), told, () => problems.map((problem) => {
    const who = problem.names.length
      ? element("details", "", element("summary", "", problem.who), problem.names.join(", ")) : element("b", "", problem.who);
    const item = element("li", "", who, problem.text, element("small", "since"), worded("span", "", `${problem.remedy} [${problem.code}]`));
    item.dataset.mood = problem.mood;
    return item;
  }));
  // Only the time is written each second, so that a button is not replaced while somebody presses it.
  for (const [n, since] of document.querySelectorAll("#problem-list .since").entries()) {
    const { seconds } = problems[n];
    since.textContent = seconds < 3 ? "" : ` for ${span(seconds)}`;
  }
}

function writeSettings(settings, changed, set) {
  fill($("settings-rows"), [settings, set], () => Object.entries(settings).map(([name, value]) => {
    const steered = set[name] !== undefined, head = element("th", "", name);
    head.scope = "row";
    return element("tr", changed.includes(name) ? "changed" : "", head,
      element("td", steered ? "steered" : "", steered ? `${set[name]} (steered; the run's own is ${value})` : value));
  }));
}

/** Shows how the run ended. */
function writeAbout(sentences) {
  $("about").replaceChildren(...sentences.map((words) => element("p", "", `${words[0].toUpperCase()}${words.slice(1).replace(/\.$/, "")}.`)));
}

// -- the state of the run, and the connection --------------------------------------------------------------------------

const isAway = () => ["no answer", "no connection"].includes(state.word);
/** Returns whether figures of merged work are older than they should be. */
const isOld = () => state.since_unix_seconds !== null;

function writeState() {
  const link = $("link"), banner = $("banner"), { word, mood, left, sentence, remedy, urgency } = state;
  put("state", word);
  $("state").dataset.mood = mood;
  put("eta", inlined || !left ? "" : `${left} ·`);
  document.documentElement.dataset.old = isAway() ? "all" : isOld() ? "merged" : "";
  banner.hidden = !sentence || (tab() === "overview" && !isAway() && urgency !== "idle"); // What to do has it
  banner.dataset.mood = urgency;
  banner.toggleAttribute("data-away", isAway());
  fill(banner, [sentence, remedy], () => [sentence, " ", worded("span", "remedy", remedy)]);
  link.dataset.mood = inlined || !page ? "idle" : isAway() ? "warn" : "good";
  link.querySelector("span").textContent = inlined ? "report" : !page ? "connecting" : isAway() ? `as of ${clock(page.unix_seconds)}` : "live";
}

/** The state while the dashboard does not answer. A finished run stays finished. */
function disconnect(sentence) {
  if (state.word !== "finished") {
    state = { ...state, word: "no connection", mood: "warn", seconds_left: null, left: "stalled", since_unix_seconds: page?.unix_seconds ?? null,
      sentence, remedy: "", urgency: "bad" };
  }
  write();
  writeState();
}

$("more-islands").addEventListener("click", () => { showGone = !showGone; write(); });

// -- the list of runs --------------------------------------------------------------------------------------------------

async function readRuns() {
  const found = await ask("/api/runs");
  if (found?.length === 1 && found[0].is_served) { location.replace(addressOf(found[0].run)); return; }
  if (found) {
    state = { ...state, word: `${found.length} runs`, mood: "idle" };
    put("link", "");
    put("state", state.word);
    $("no-runs").hidden = found.length > 0;
    fill($("runs"), found, () => found.map((run) => {
      const name = element("th", "", run.is_served ? link(addressOf(run.run), run.run) : run.run);
      name.scope = "row";
      if (!run.is_served) name.append(worded("small", "", `\`archipelago dash ${run.run}\` opens it`));
      const texts = { model: run.model || dash, round: count(run.round), step: run.steps ? `${count(run.step)} of ${count(run.steps)}` : dash,
        islands: `${run.live} of ${run.known} live`, active: run.idle_seconds === null ? dash : `${span(run.idle_seconds)} ago`, where: run.where };
      return element("tr", "", name, element("td", "", pill(run.state, run.mood), ...(run.problems ? [element("small", "", `${run.problems} ${run.problems === 1 ? "problem" : "problems"}`)] : [])), ...Object.entries(texts).map(([title, text]) => titled(title, text)));
    }));
  }
  if (!still) setTimeout(readRuns, 5000);
}

// -- theme and axis ----------------------------------------------------------------------------------------------------

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.again());

function over(name) {
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === name));
  Charts.over(name);
}
for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    query.set("over", button.dataset.axis);
    if (!inlined) history.replaceState(null, "", `${location.pathname}?${query}`);
    over(button.dataset.axis);
  });
}

// -- readings ----------------------------------------------------------------------------------------------------------

let chartsShown = 0;

function receive(reading) {
  state = reading.state;
  if (reading.page) page = reading.page;
  write();
  if (reading.charts) Charts.show(reading.charts, only);
  chartsShown = reading.number;
  writeState();
}

/** Returns what the server answers, or null after showing why there is nothing. */
async function ask(address) {
  try {
    const answer = await fetch(address, { signal: AbortSignal.timeout(10000) }), found = await answer.json();
    if (answer.ok) return found;
    disconnect(found.message);
  } catch {
    disconnect("The dashboard does not answer. The page continues when it answers again.");
  }
  return null;
}

/** Asks for the newest reading, and again every second unless `still`. Charts come if they are newer than those shown. */
async function read() {
  const found = await ask(`/api/runs/${encodeURIComponent(runHere)}/view?charts=${chartsShown}`);
  if (found) receive(found);
  if (!still) setTimeout(read, 1000);
}

if (query.has("theme")) document.documentElement.dataset.theme = query.get("theme");
over(query.get("over") ?? "tokens");
document.documentElement.classList.toggle("still", Boolean(inlined));
if (!inlined) $("home").href = "/";
showTab();
if (inlined) {
  const everything = JSON.parse(inlined);
  writeAbout(everything.about);
  receive(everything);
  addEventListener("hashchange", () => { showTab(); writeState(); Charts.again(); });
} else if (runHere) {
  read();
} else readRuns();
