"""The data of the dashboard's page, from one reading of a run, ready for JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from archipelago.broker.config import RunConfig, flat
from archipelago.broker.control import MERGING, PAUSED, SETTINGS, STEPS, island_field, own
from archipelago.broker.manifest import Manifest, loss_unit
from archipelago.broker.messages import Evaluation, Note, Refusal
from archipelago.broker.shards.reader import holders_in_words, numbered
from archipelago.broker.transport import MergerStatus
from archipelago.ops.dashboard.history import POINTS_DRAWN, History, QueueRow, joined_evaluations, joined_queues
from archipelago.ops.dashboard.trails import columns, thinned
from archipelago.ops.settings import setting_text
from archipelago.ops.watch.advice import Problem
from archipelago.ops.watch.health import Event, events_of, lacks_merger, stall_seconds
from archipelago.ops.watch.remedies import remedy_of, with_comebacks
from archipelago.ops.watch.run_view import IslandView, RunView

EVENTS_SHOWN = 120
#: Time constant over which rates are averaged.
SMOOTHING_SECONDS = 8.0


@dataclass(frozen=True)
class Rate:
    """Bytes per second of one island, and the counters that the next measurement starts from."""

    unix_seconds: float
    bytes_up: int
    bytes_down: int
    up: float = 0.0
    down: float = 0.0


def measured(before: Mapping[str, Rate], islands: Iterable[IslandView], unix_seconds: float) -> dict[str, Rate]:
    """Update each island's rates with its counters. The rates of an island that restarted begin at zero."""
    out = {}
    for island in islands:
        old = before.get(island.name, Rate(unix_seconds, island.bytes_up, island.bytes_down))
        seconds = unix_seconds - old.unix_seconds
        if seconds <= 0.0:
            out[island.name] = old
            continue
        share = min(1.0, seconds / SMOOTHING_SECONDS)
        now_up, now_down = (
            max(0, now - then) / seconds
            for now, then in ((island.bytes_up, old.bytes_up), (island.bytes_down, old.bytes_down))
        )
        out[island.name] = Rate(
            unix_seconds, island.bytes_up, island.bytes_down,
            old.up + share * (now_up - old.up), old.down + share * (now_down - old.down),
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class TokenBooks:
    """The accounts in tokens. They are read rarely, because that requires reading the whole stream."""

    unix_seconds: float
    published: int
    merged: int
    refused: int
    pending: int
    balanced: bool


@dataclass(frozen=True)
class Reading:
    """Everything that was read for one update of the page.

    Attributes:
        unix_seconds: The dashboard's wall clock.
        round_seconds: Time since the newest round was closed, or first seen here.
        epoch: The epoch of the merger that closed it; 0 before the first round.
        merger_status: The merger that serves the run; None if it is not known.
        standbys: The names of the mergers that wait for the lease.
        problems: What is wrong now, the worst first.
        problem_events: When problems began and ended.
    """

    view: RunView
    unix_seconds: float
    round_seconds: float
    epoch: int
    control: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[Note] = ()
    refusals: Sequence[tuple[float, Refusal]] = ()
    evaluations: Sequence[Evaluation] = ()
    token_books: TokenBooks | None = None
    rates: Mapping[str, Rate] = field(default_factory=dict)
    merger_status: MergerStatus | None = None
    standbys: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    problem_events: Sequence[Event] = ()


def page_of(reading: Reading, history: History, manifest: Manifest) -> dict[str, Any]:
    """Return the data that changes with each reading: everything except the charts. The JSON writer replaces NaN."""
    view, config = reading.view, manifest.config
    run = asdict(view)
    del run["islands"], run["books"]
    return {
        "run": run,
        "state": state_of(reading, config.sync.interval),
        "problems": [asdict(problem) for problem in reading.problems],
        "progress": progress(reading, history, config),
        "settings": settings(manifest),
        "unix_seconds": reading.unix_seconds,
        "round_seconds": reading.round_seconds,
        "tokens_per_second": sum(i.tokens_per_second for i in view.islands if i.live and i.state == "training"),
        "islands": [
            _lane(island, history.parts(island.name), reading.rates.get(island.name), reading.control)
            for island in view.islands
        ],
        "books": _books(view, reading.token_books),
        "events": events(reading.notes, reading.refusals, reading.problem_events),
        "serving": serving(reading.notes, reading.epoch, reading.merger_status) | {"standbys": list(reading.standbys)},
        "control": {
            "set": dict(reading.control),
            "own": {name: float(own(config, name)) for name in SETTINGS},
        },
    }


def progress(reading: Reading, history: History, config: RunConfig) -> dict[str, float | str]:
    """Return how long the run still takes, its learning rate, and the age of its newest evaluation; NaN if unknown."""
    view, newest = reading.view, reading.evaluations[-1:]
    moves = view.live and not reading.control.get(MERGING) and reading.round_seconds < stall_seconds(
        view, config.sync.interval
    )  # fmt: skip
    speed = history.steps_per_second() if moves else math.nan
    return {
        "seconds_left": max(0, view.steps - view.step) / speed if speed > 0.0 else math.nan,
        "steps_per_second": speed,
        "learning_rate": _rate_at(config, view.step, view.steps),
        "peak_rate": math.nan if config.has_own_loops else config.inner.peak,
        "held_out_age": max(0.0, reading.unix_seconds - newest[0].unix_seconds) if newest else math.nan,
        "held_out_round": newest[0].round if newest else math.nan,
        "held_out_by": newest[0].by if newest else "",
    }


def settings(manifest: Manifest) -> dict[str, str]:
    """Return the run's settings as words, by name: its config, its corpus and the versions that created it."""
    words = {name: setting_text(value) for name, value in flat(manifest.config).items()}
    corpus = manifest.corpus
    if manifest.config.has_own_loops:  # only the length of the run says anything about its users' scripts
        unknown = ("model.", "data.", "inner.")
        words = {name: text for name, text in words.items() if name == STEPS or not name.startswith(unknown)}
        words["model"] = f"that of the task {manifest.task!r}" if manifest.task else "that of its users' scripts"
        return words | {f"version.{name}": version for name, version in manifest.versions.items()}
    words["corpus"] = f"{corpus.name}, {corpus.bytes:,} bytes, digest {corpus.digest[:12]}"
    words["tokenizer"] = f"{corpus.tokenizer[:12]}, {corpus.tokens:,} tokens" if corpus.tokenizer else "bytes"
    return words | {f"version.{name}": version for name, version in manifest.versions.items()}


def charts_of(reading: Reading, history: History, queues: Sequence[QueueRow], manifest: Manifest) -> dict[str, Any]:
    """Return the charts' data, thinned to a few hundred points for each line. All losses have the run's unit."""
    evaluations, unit = thinned(reading.evaluations, POINTS_DRAWN, joined_evaluations), loss_unit(manifest.corpus)
    lines, config = history.lines(), manifest.config
    lengths = history.lengths_at(lines["round"], config.inner.steps, reading.view.steps)
    rates = [_rate_at(config, step, length) for step, length in zip(lines["step"], lengths, strict=True)]
    in_unit = {name: [unit.from_nats(value) for value in lines[name]] for name in ("loss", "smooth")}
    islands = history.losses()
    for columns_of in islands.values():
        columns_of["loss"] = [unit.from_nats(value) for value in columns_of["loss"]]
    return {
        "unit": unit.name,
        "lines": lines | in_unit | {"rate": rates},
        "held_out": {
            "round": [e.round for e in evaluations],
            "tokens": history.tokens_at(e.round for e in evaluations),
            "unix_seconds": [e.unix_seconds for e in evaluations],
            "loss": [unit.from_evaluation(e.bits_per_byte) for e in evaluations],
        },
        "islands": islands,
        "now": {name: getattr(reading.view, name) for name in ("rounds", "known", "live", "participating")},
        "details": history.details(),
        "marks": history.marks(),
        "staleness": history.staleness(),
        "queues": {
            **columns(thinned(queues, POINTS_DRAWN, joined_queues), QueueRow),
            "limit": reading.view.memory_limit_bytes,
        },
    }


def _rate_at(config: RunConfig, step: float, length: float) -> float:
    """Return the learning rate after `step` steps; NaN if it is not known, as that of users' own scripts.

    `length` is that of the run, which an operator may have changed.
    """
    if math.isnan(step) or config.has_own_loops:
        return math.nan
    return replace(config.inner, steps=max(1, int(length))).rate_at(step)


def state_of(reading: Reading, interval: int) -> dict[str, str]:
    """Return the run's state as a word, a mood (good, busy, warn or idle) and a sentence. `interval` is H."""
    view = reading.view
    if view.step >= view.steps and not view.live:
        return _state("finished", "idle", f"All {view.steps:,} steps are made.")
    if reading.control.get(MERGING) == PAUSED:
        return _state("paused", "warn", "Merging is paused; islands continue to train. Resume it under Steer.")
    if not view.known and not view.rounds:
        return _state("waiting", "idle", "No island has joined yet.")
    if not view.live:
        return _state("no islands", "warn", "No island is live. The run continues when one joins.")
    if view.unreachable:
        away = numbered("shard", sorted(view.unreachable)).capitalize()
        return _state("shard away", "warn", f"{away} cannot be reached, so its figures are missing. The others go on.")
    if reading.merger_status and lacks_merger(reading.merger_status) and view.step < view.steps:
        if reading.merger_status.holders:
            missing = numbered("shard", reading.merger_status.unserved)
            return _state("no merger", "warn", f"No merger serves {missing}. The fragments of other shards go on.")
        return _state("no merger", "warn", "No merger serves the run; islands train within their window.")
    if view.pending and reading.round_seconds > stall_seconds(view, interval):
        return _state("stalled", "warn", "Contributions wait and no round closes. Check that a merger runs.")
    if not view.rounds:
        return _state("starting", "busy", "No round has closed yet.")
    return _state("training", "good", "")


def _state(word: str, mood: str, sentence: str) -> dict[str, str]:
    return {"word": word, "mood": mood, "sentence": sentence}


def _lane(island: IslandView, strip: Sequence[int], rate: Rate | None, control: Mapping[str, str]) -> dict[str, Any]:
    up, down = (rate.up, rate.down) if rate and island.live else (0.0, 0.0)
    return {
        **asdict(island),
        "shown": "silent" if island.is_silent else island.state,
        "strip": list(strip),
        "up_per_second": up,
        "down_per_second": down,
        "up_share": _share(up, island.uplink_bytes_per_second, island.live),
        "down_share": _share(down, island.downlink_bytes_per_second, island.live),
        "asked": control.get(island_field(island.name), ""),
    }


def _share(bytes_per_second: float, carries: float, is_live: bool) -> float:
    """Return the share of a link's speed that is used; NaN if the speed is not known."""
    return bytes_per_second / carries if is_live and carries > 0.0 else math.nan


def _books(view: RunView, tokens: TokenBooks | None) -> dict[str, Any]:
    books = view.books
    return {
        "published": books.published,
        "merged": books.merged,
        "refused": books.refused,
        "pending": view.pending,
        "balanced": books.published == books.merged + books.refused + view.pending,
        "tokens": asdict(tokens) if tokens else None,
    }


def events(
    notes: Sequence[Note], refusals: Sequence[tuple[float, Refusal]], more: Sequence[Event] = ()
) -> list[dict[str, Any]]:
    """Return the events with their remedies, newest first.

    Repeated refusals of an island for one reason become one line with a count.
    """
    out: list[dict[str, Any]] = []
    known = sorted([*with_comebacks(events_of(notes, refusals)), *more], key=lambda event: event.unix_seconds)
    for event in (asdict(event) | {"remedy": remedy_of(event)} for event in reversed(known)):
        if out and event["kind"] == "refused" and _alike(out[-1]) == _alike(event):
            out[-1]["times"] += 1
        else:
            out.append(event | {"times": 1})
    return out[:EVENTS_SHOWN]


def _alike(event: Mapping[str, Any]) -> tuple[str, str, str]:
    return event["who"], event["kind"], event["text"].partition(": ")[2]  # Compare the text without its round.


def _by_shard(status: MergerStatus) -> str:
    """Return who serves each shard, as a sentence."""
    missing = [f"no merger serves {numbered('shard', status.unserved)}"] if status.unserved else []
    missing += [f"{numbered('shard', status.unreachable)} cannot be reached"] if status.unreachable else []
    words = ", ".join([*([holders_in_words(status)] if status.holders else []), *missing])
    return f"Mergers: {words}." if len(status.holders) != 1 or missing else f"{words} serves all shards."


def serving(notes: Sequence[Note], epoch: int, merger_status: MergerStatus | None = None) -> dict[str, Any]:
    """Return the merger that began to serve last, and whether the lease is held (None if that is not known).

    Of a run with several shards, it has a sentence about all of them instead (`shards`).
    """
    held = bool(merger_status.holder) if merger_status else None
    if merger_status and merger_status.shards:
        return {"who": "", "since": None, "text": "", "epoch": epoch, "held": held, "shards": _by_shard(merger_status)}
    served = [note for note in notes if note.kind == "served"]
    if not served:
        return {"who": "", "since": None, "text": "", "epoch": epoch, "held": held}
    newest = max(served, key=lambda note: note.unix_seconds)
    return {"who": newest.who, "since": newest.unix_seconds, "text": newest.text, "epoch": epoch, "held": held}
