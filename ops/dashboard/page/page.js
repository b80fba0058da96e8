// Show the server's data in the elements of the page, and send changes to the server with the token.
"use strict";

const $ = (id) => document.getElementById(id);
const inlined = $("data").textContent.trim();
const query = new URLSearchParams(location.search);
const still = Boolean(inlined) || query.has("still");
const GONE_SHOWN = 4;
let page = null;
let showGone = false;
let state = { word: "loading", mood: "idle", seconds_left: null, since_unix_seconds: null, left: "", sentence: "", remedy: "" };

// -- formatting numbers -------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const dash = "–";
const count = (value) => value === null || value === undefined ? dash : whole.format(value);
const fixed = (value, digits = 3) => value === null || value === undefined ? dash : value.toFixed(digits);

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

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Returns an element with the text, in which words between backticks are code. */
function worded(tag, className, text) {
  const made = element(tag, className);
  made.append(...text.split("`").map((words, n) => n % 2 ? element("code", "", words) : words));
  return made;
}

function bar(id, share) { $(id).style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`; }

function write() {
  if (!page) return;
  const { run } = page;
  document.title = `${run.run} · Archipelago`;
  put("run", run.run);
  $("run").title = run.run;
  put("sizes", `${run.task ? `task ${run.task} · ` : ""}${short(run.parameters)} parameters${run.frozen_parameters ? ` (${short(run.frozen_parameters)} more are frozen)` : ""} in ${count(run.fragments)} fragments${run.shards?.length ? ` and ${run.shards.length} shards` : ""} · up ${size(run.bytes_up)} · down ${size(run.bytes_down)}`);
  writeTiles(run);
  writeCounters(page.counters);
  writeLanes(page.islands);
  writeEvents(page.events);
  put("serving", page.serving);
  if (run.passes === null) put("no-lanes", `No island has joined yet. ${run.task ? "Start one with `archipelago island --task FILE.py:NAME`." : "Start one of this run's training scripts."}`);
  else put("join-run", run.run);
  writeKnobs(page.control);
  writeProblems(page.problems);
  writeSettings(page.settings, page.changed, page.control.set);
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
  $("learn-sub").replaceChildren(...worded("p", "", [
    `${page.evaluated[0].toUpperCase()}${page.evaluated.slice(1)}.`, run.held_out_first !== null && `The first was ${fixed(run.held_out_first)}.`,
    ending(state.seconds_left),
  ].filter(Boolean).join(" ")).childNodes);
  put("size", count(run.known));
  put("live", count(run.live));
  put("part", count(run.participating));
  put("islands-sub", run.rounds ? `${fixed(run.contributions_per_round, 2)} contributions per round` : "no round yet");
  const step = $("step");
  step.replaceChildren(short(run.step), Object.assign(element("small"), { textContent: ` of ${short(run.steps)}` }));
  bar("step-bar", run.step / run.steps);
  const ago = page.round_seconds;
  put("step-sub", run.rounds ? `round ${count(run.rounds)}${inlined ? "" : isOld() ? `, as of ${clock(page.unix_seconds - ago)}` : ago < 3 ? ", just now" : `, ${span(ago)} ago`}` : "no round yet");
  put("tokens", short(run.tokens_merged));
  put("tokens-sub", [
    page.tokens_per_second ? `${brief(page.tokens_per_second)}/s` : "", run.tokens_lost ? `${brief(run.tokens_lost)} lost` : "none lost",
    run.passes !== null && `${fixed(run.passes, 2)} passes`,
  ].filter(Boolean).join(" · "));
  put("pending", count(run.pending));
  put("pending-sub", `rounds are open ${duration(run.open_seconds)}, grace ${duration(run.grace_seconds)}`);
  const limit = run.memory_limit_bytes, used = run.memory_bytes;
  put("memory", used ? size(used) : dash);
  $("memory-meter").hidden = !limit;
  $("memory-meter").dataset.mood = used > 0.9 * limit ? "bad" : used > 0.8 * limit ? "warn" : "good";
  bar("memory-bar", limit ? used / limit : 0);
  put("memory-sub", limit ? `of ${size(limit)}, ${(100 * used / limit).toFixed(0)} %` : used ? "no limit is set" : "this server does not report it");
}

function writeCounters(counters) {
  const { balanced } = counters;
  put("balance", balanced ? "balanced" : "not balanced");
  $("balance").dataset.mood = balanced ? "good" : "bad";
  for (const name of ["published", "merged", "refused", "pending"]) {
    const [contributions, tokens] = counters[name];
    put(`b-${name}`, count(contributions));
    put(`t-${name}`, short(tokens));
  }
  put("counters-sub", `published ${balanced ? "=" : "≠"} merged + refused + pending contributions; tokens count once for each fragment`);
}

// -- islands -----------------------------------------------------------------------------------------------------------

const TITLES = ["island", "state", "participation in the newest rounds", "lag", "tokens/s", "step", "up", "down", "queue", "seen", "memory", ""];
const MOODS = { training: "good", joining: "busy", leaving: "busy", left: "idle", done: "idle", silent: "bad" };
const lanes = new Map();

function lane(name) {
  if (lanes.has(name)) return lanes.get(name);
  const root = element("div", "lane");
  const cells = {};
  const cell = (key, className, title = "") => {
    cells[key] = element("div", className);
    if (title) cells[key].dataset.title = title;
    root.append(cells[key]);
    return cells[key];
  };
  const who = cell("who", "who");
  cells.name = element("b");
  cells.where = element("small");
  who.append(cells.name, cells.where);
  cells.state = element("span", "pill");
  cell("at", "at").append(cells.state);
  const strip = cell("strip", "strip");
  cells.cells = document.createElementNS(document.querySelector("svg").namespaceURI, "svg");
  cells.cells.setAttribute("preserveAspectRatio", "none");
  cells.part = element("b");
  strip.append(cells.cells, cells.part);
  for (const key of ["lag", "speed", "step", "up", "down", "queue", "seen", "memory"]) {
    cell(key, "num", { speed: "tokens/s" }[key] ?? key);
  }
  const actions = cell("actions", "actions");
  cells.drain = confirmedButton("drain", () => steer({ [`island.${name}`]: "drain" }));
  cells.expel = confirmedButton("expel", () => steer({ [`island.${name}`]: "expel" }));
  cells.back = confirmedButton("readmit", () => steer({ [`island.${name}`]: "" }));
  actions.append(cells.drain, cells.expel, cells.back);
  cell("trouble", "trouble");
  const made = { root, cells, drawn: "" };
  lanes.set(name, made);
  return made;
}

/** Returns a button that acts only if it is pressed twice within three seconds. */
function confirmedButton(words, act) {
  const button = element("button", "", words);
  button.type = "button";
  let timer = 0;
  button.addEventListener("click", () => {
    if (timer) {
      clearTimeout(timer);
      timer = 0;
      button.textContent = words;
      button.classList.remove("confirming");
      act();
      return;
    }
    button.textContent = "confirm?";
    button.classList.add("confirming");
    timer = setTimeout(() => { timer = 0; button.textContent = words; button.classList.remove("confirming"); }, 3000);
  });
  return button;
}

function fill(place, main, ...under) {
  const lines = under.filter(Boolean), text = [main, ...lines].join("\n");
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  place.replaceChildren(main, ...lines.map((words) => element("small", "", words)));
}

function writeLane(island) {
  const { root, cells, ...drawn } = lane(island.name);
  const made = lanes.get(island.name);
  root.classList.toggle("gone", !island.live);
  if (cells.name.textContent !== island.name) cells.name.textContent = cells.name.title = island.name;
  const where = [island.device, island.host, island.optimizer_origin && island.optimizer_origin !== "fresh" ? `from ${island.optimizer_origin}` : ""].filter(Boolean).join(" · ");
  if (cells.where.textContent !== where) cells.where.textContent = cells.where.title = where;
  const asked = island.asked === "expel" ? "expelled" : island.asked === "drain" && island.live ? "draining" : "";
  const word = asked || island.shown;
  if (cells.state.textContent !== word) cells.state.textContent = word;
  cells.state.dataset.mood = asked ? "warn" : MOODS[island.shown] ?? "idle";
  const strip = island.strip.join();
  if (made.drawn !== strip) {
    made.drawn = strip;
    drawStrip(cells.cells, island.strip);
  }
  const part = `${(100 * island.participation).toFixed(0)} %`;
  if (cells.part.textContent !== part) cells.part.textContent = part;
  fill(cells.lag, island.live ? fixed(island.staleness, 2) : dash, island.score === null ? "" : `score ${fixed(island.score, 2)}`);
  fill(cells.speed, island.live ? count(island.tokens_per_second) : dash);
  fill(cells.step, island.live && island.step_seconds ? duration(island.step_seconds) : dash);
  fill(cells.up, size(island.bytes_up));
  fill(cells.down, size(island.bytes_down));
  fill(cells.queue, count(island.backlog));
  fill(cells.seen, inlined || island.last_seen_seconds >= 3 ? span(island.last_seen_seconds) : "now");
  const of = (used, limit, words) => used && limit ? `${words} ${(100 * used / limit).toFixed(0)} %` : "";
  fill(cells.memory, island.memory_bytes ? size(island.memory_bytes) : dash, of(island.host_memory_bytes, island.host_memory_limit_bytes, "host"),
    of(island.device_memory_bytes, island.device_memory_limit_bytes, "device"));
  cells.memory.title = island.host_memory_limit_bytes ? `Process ${size(island.memory_bytes)}; host ${size(island.host_memory_bytes)} of ${size(island.host_memory_limit_bytes)}`
    + (island.device_memory_limit_bytes ? `; devices ${size(island.device_memory_bytes)} of ${size(island.device_memory_limit_bytes)}` : "") : "";
  cells.drain.hidden = !island.live || Boolean(island.asked);
  cells.expel.hidden = island.asked === "expel";
  cells.back.hidden = !island.asked;
  const lowered = island.live && island.factor !== null && island.factor < 1;
  const trouble = [
    lowered ? `Weight lowered to ${(100 * island.factor).toFixed(0)} %: its contributions disagree with those of the others (score ${fixed(island.score, 2)})` : "",
    island.link && island.link !== "ok" && island.live ? `Link: ${island.link}` : "",
    island.last_refusal ? `Last refused (of ${count(island.refused)}): ${island.last_refusal}` : "",
  ].filter(Boolean).join("  ·  ");
  if (cells.trouble.textContent !== trouble) cells.trouble.textContent = trouble;
}

function drawStrip(svg, strip) {
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, strip.length) * 5} 14`);
  svg.replaceChildren(...strip.map((late, n) => {
    const mark = document.createElementNS(svg.namespaceURI, "rect");
    mark.setAttribute("x", n * 5);
    mark.setAttribute("width", 4);
    mark.setAttribute("height", late < 0 ? 4 : 14);
    mark.setAttribute("y", late < 0 ? 5 : 0);
    mark.setAttribute("class", late < 0 ? "n" : late ? "o" : "f");
    return mark;
  }));
}

function writeLanes(islands) {
  const known = [...islands].sort((a, b) => b.live - a.live || a.name.localeCompare(b.name, "en", { numeric: true }));
  const gone = known.filter((island) => !island.live).length;
  const hidden = showGone || gone <= GONE_SHOWN ? 0 : gone - GONE_SHOWN;
  const recent = new Set(known.filter((i) => !i.live).sort((a, b) => a.last_seen_seconds - b.last_seen_seconds).slice(0, GONE_SHOWN).map((i) => i.name));
  const shown = hidden ? known.filter((island) => island.live || recent.has(island.name)) : known;
  shown.forEach(writeLane);
  const place = $("lanes");
  if (!place.firstChild) {
    const titles = element("div", "titles");
    TITLES.forEach((title, n) => titles.append(element("span", n === TITLES.length - 1 ? "last" : n > 2 ? "num" : "", title)));
    place.append(titles);
  }
  place.hidden = !shown.length;
  $("no-lanes").hidden = Boolean(shown.length);
  const wanted = [place.firstChild, ...shown.map((island) => lanes.get(island.name).root)];
  if (wanted.length !== place.children.length || wanted.some((root, n) => place.children[n] !== root)) place.replaceChildren(...wanted);
  $("more-lanes").hidden = gone <= GONE_SHOWN;
  put("more-lanes", showGone ? "hide islands that have left" : `show ${hidden} islands that have left`);
}

// -- events ------------------------------------------------------------------------------------------------------------

const KINDS = { refused: "warn", diverged: "bad", expelled: "bad", paused: "warn", drained: "warn", joined: "good", "came back": "good", resumed: "good", lowered: "warn", idle: "warn", replaced: "warn", repaired: "warn", restored: "good", served: "busy", steered: "busy", checkpoint: "idle", left: "idle" };
let eventsShown = "";

function writeEvents(events) {
  $("no-events").hidden = events.length > 0;
  const text = JSON.stringify(events);
  if (text === eventsShown) return;
  eventsShown = text;
  $("events").replaceChildren(...events.map((event) => {
    const item = element("li"), time = element("time", "", clock(event.unix_seconds));
    time.title = new Date(event.unix_seconds * 1e3).toString();
    const kind = element("span", "kind", event.kind + (event.times > 1 ? ` ×${event.times}` : ""));
    kind.dataset.mood = KINDS[event.kind] ?? "idle";
    const what = element("span", "what");
    what.append(element("b", "", event.who), event.text, event.remedy && worded("small", "remedy", event.remedy));
    item.append(time, kind, what);
    return item;
  }));
}

// -- what to do --------------------------------------------------------------------------------------------------------

function writeProblems(problems) {
  $("problems").hidden = !problems.length;
  const text = JSON.stringify(problems.map((each) => [each.code, each.who, each.text, each.seconds < 3 ? "" : span(each.seconds)]));
  if ($("problem-list").dataset.text === text) return;
  $("problem-list").dataset.text = text;
  $("problem-list").replaceChildren(...problems.map((problem) => {
    const item = element("li");
    item.dataset.mood = problem.mood;
    const since = problem.seconds >= 3 ? element("small", "since", `for ${span(problem.seconds)}`) : "";
    item.append(element("b", "", problem.who), problem.text, " ", since, worded("span", "", problem.remedy));
    return item;
  }));
}

function writeSettings(settings, changed, set) {
  const rows = Object.entries(settings).map(([name, value]) => {
    const row = element("tr", changed.includes(name) ? "changed" : ""), cell = element("td", set[name] === undefined ? "" : "steered", set[name] === undefined ? value : `${set[name]} (steered; the run's own is ${value})`);
    row.append(element("th", "", name), cell);
    return row;
  });
  const text = rows.map((row) => row.textContent).join();
  if ($("settings-rows").dataset.text === text) return;
  $("settings-rows").dataset.text = text;
  $("settings-rows").replaceChildren(...rows);
}

/** Shows where the figures of a report come from, and how to repeat the run. */
function writeAbout({ sections, commands }) {
  $("about").replaceChildren(...Object.entries(sections).map(([title, facts]) => {
    const part = element("div"), list = element("dl");
    for (const [name, value] of Object.entries(facts)) list.append(element("dt", "", name), element("dd", "", value));
    part.append(element("h3", "", title), list);
    return part;
  }));
  put("commands", commands);
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
  banner.hidden = !sentence;
  banner.dataset.mood = urgency;
  if (banner.dataset.text !== sentence + remedy) {
    banner.dataset.text = sentence + remedy;
    banner.replaceChildren(sentence, " ", worded("span", "remedy", remedy));
  }
  link.dataset.mood = inlined || !page ? "idle" : isAway() ? "warn" : "good";
  link.querySelector("span").textContent = inlined ? "report" : !page ? "connecting" : isAway() ? `as of ${clock(page.unix_seconds)}` : "live";
}

/** The state while the dashboard does not answer. A finished run stays finished. */
function disconnect() {
  if (page && state.word !== "finished") {
    state = { ...state, word: "no connection", mood: "warn", seconds_left: null, left: "stalled", since_unix_seconds: page.unix_seconds,
      sentence: "The dashboard does not answer. The page continues when it answers again.", remedy: "", urgency: "bad" };
  }
  writeState();
  write();
}

// -- steering ----------------------------------------------------------------------------------------------------------

let token = "";
const kept = (() => { try { return sessionStorage; } catch { return null; } })();

async function steer(changes) {
  say("…", "idle");
  try {
    const answer = await fetch("api/steer", {
      method: "POST", headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" }, body: JSON.stringify({ changes }),
    });
    const { message } = await answer.json();
    say(message, answer.ok ? "good" : "bad");
    if (answer.status === 401) lock();
    return answer.ok;
  } catch {
    say("The dashboard does not answer.", "bad");
    return false;
  }
}

function say(words, mood) {
  put("answer", words);
  $("answer").dataset.mood = mood;
}

function lock() {
  token = "";
  kept?.removeItem("token");
  showKnobs();
}

async function unlock(given, quiet = false) {
  token = given;
  const done = await steer({});
  $("token").classList.toggle("rejected", !done);
  $("token").setAttribute("aria-invalid", String(!done));
  if (done) {
    kept?.setItem("token", given);
    if (quiet) say("", "idle");
  } else {
    token = "";
  }
  showKnobs();
}

function showKnobs() {
  document.body.classList.toggle("unlocked", Boolean(token));
  $("unlock").hidden = Boolean(token);
  $("knobs").hidden = $("forget").hidden = !token;
}

function writeKnobs(control) {
  for (const form of document.querySelectorAll(".knob")) {
    const { name } = form.dataset, input = form.querySelector("input");
    const now = control.set[name] ?? String(control.own[name]);
    if (document.activeElement !== input && !input.dataset.dirty) input.value = now;
    const own = form.querySelector("[data-own]");
    own.querySelector("span").textContent = control.own[name];
    own.title = "Return to the run's own value";
    own.disabled = control.set[name] === undefined;
  }
  $("merging").textContent = control.set.merging === "paused" ? "Resume merging" : "Pause merging";
  $("merging").dataset.to = control.set.merging === "paused" ? "" : "paused";
}

for (const form of document.querySelectorAll(".knob")) {
  const input = form.querySelector("input"), { name } = form.dataset;
  const why = element("p", "why");
  why.id = `why-${input.id}`;
  why.hidden = true;
  form.append(why);
  /** Marks the field as rejected with the reason, or as good with an empty one. */
  const mark = (reason) => {
    input.classList.toggle("rejected", Boolean(reason));
    input.setAttribute("aria-invalid", String(Boolean(reason)));
    input.setAttribute("aria-describedby", why.id);
    why.textContent = reason;
    why.hidden = !reason;
  };
  input.addEventListener("input", () => { input.dataset.dirty = "yes"; mark(""); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = input.value.trim();
    if (!words) { mark("Enter a number, or press reset."); return; }
    const done = await steer({ [name]: words });
    mark(done ? "" : $("answer").textContent);
    if (done) delete input.dataset.dirty;
  });
  form.querySelector("[data-own]").addEventListener("click", async () => {
    if (await steer({ [name]: "" })) { delete input.dataset.dirty; mark(""); input.blur(); }
  });
}
$("merging").addEventListener("click", () => steer({ merging: $("merging").dataset.to }));
$("checkpoint").addEventListener("click", () => steer({ checkpoint: "now" }));
$("forget").addEventListener("click", () => { lock(); say("", "idle"); });
$("unlock").addEventListener("submit", (event) => { event.preventDefault(); unlock($("token").value.trim()); $("token").value = ""; });
$("more-lanes").addEventListener("click", () => { showGone = !showGone; write(); });

// -- theme and axis -----------------------------------------------------------------------------------

const local = (() => { try { return localStorage; } catch { return null; } })();
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  Charts.again();
}
function dark() { return (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark"; }
$("theme").addEventListener("click", () => {
  const next = dark() ? "light" : "dark";
  local?.setItem("theme", next);
  theme(next);
});
prefersDark.addEventListener("change", () => Charts.again());

function over(name) {
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === name));
  Charts.over(name);
}
for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", () => over(button.dataset.axis));

function zoom(name) {
  for (const button of document.querySelectorAll("[data-part]")) button.setAttribute("aria-pressed", String(button.dataset.part === name));
  Charts.zoom(name);
}
for (const button of document.querySelectorAll("[data-part]")) button.addEventListener("click", () => zoom(button.dataset.part));

// -- readings ----------------------------------------------------------------------------------------------------------

let chartsShown = 0;

function receive(reading) {
  state = reading.state;
  if (reading.page) page = reading.page;
  write();
  if (reading.charts) Charts.show(reading.charts);
  chartsShown = reading.number;
  writeState();
}

/** Asks for the newest reading, and again every second unless `still`. Charts come if they are newer than those shown. */
async function read() {
  try {
    const answer = await fetch(`api/view?charts=${chartsShown}`, { signal: AbortSignal.timeout(10000) });
    receive(await answer.json());
  } catch {
    disconnect();
  }
  if (!still) setTimeout(read, 1000);
}

theme(query.get("theme") ?? local?.getItem("theme") ?? "");
over("tokens");
zoom("all");
document.documentElement.classList.toggle("still", Boolean(inlined));
if (inlined) {
  const everything = JSON.parse(inlined);
  writeAbout(everything.about);
  receive(everything);
}
else read();
if (!inlined) {
  const fragment = new URLSearchParams(location.hash.slice(1)).get("token");
  if (fragment) history.replaceState(null, "", location.pathname + location.search);
  const known = fragment ?? kept?.getItem("token");
  if (known) unlock(known, true);
  showKnobs();
}
