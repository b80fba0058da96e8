"""What is wrong with a run now, and what to do about it. Pure.

`status`, the live screen and the dashboard show the same problems in the same words.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from archipelago.broker.control import EXPEL, IN_WORDS
from archipelago.broker.messages import TapeEntry
from archipelago.broker.observe.losses import loss_unit, rounded
from archipelago.broker.observe.merge_load import FEW_SYNCS_REMEDY, MergeLoad, merge_load
from archipelago.broker.shards.reader import numbered
from archipelago.broker.transport import MEMORY_SHARE_MAX
from archipelago.ops.watch.history import refusal_remedy
from archipelago.ops.watch.run_view import IslandView, RunView

Mood = Literal["bad", "warn", "info"]
#: A run has stalled when it closed no round for this long and for this number of strides of the fastest live island.
STALL_SECONDS, STALL_STRIDES = 60.0, 3.0
#: While all islands still load and compile, a run stalls so much later.
LOADING_FACTOR = 10.0
#: An island that has been silent for longer than this is gone. Its row still says so.
SILENT_SHOWN_SECONDS = 3600.0
#: A refusal is a present problem for this long.
REFUSAL_SECONDS = 300.0
#: Rounds that pass during this time should be in a checkpoint.
CHECKPOINT_SECONDS = 600.0
#: A share of Redis's memory limit. Islands stop sending at 80 %.
MEMORY_WARN, MEMORY_BAD = 0.7, MEMORY_SHARE_MAX
#: A loss rises if the newer half of the recent rounds is higher by this share and by this many standard errors.
RISE_SHARE, RISE_ERRORS = 0.02, 4.0
RISE_ROUNDS = 16
#: At most this many islands with the same problem are shown one by one.
GROUP_MOST = 2
#: This many evaluations make a trend. A held-out loss that is higher than the best one by a smaller share is level.
VERDICT_EVALUATIONS, LEVEL_SHARE = 4, 0.005
_ORDER = ("bad", "warn", "info")


#: The states of a run that follow from its problems. The first that it has counts.
_STATES = {
    "run.paused": "paused", "redis.refuses-writes": "stalled", "run.no-islands": "no islands",
    "shard.unreachable": "shard away", "merger.missing": "no merger", "run.stalled": "stalled",
}  # fmt: skip
#: These follow if Redis refuses writes. Processes that live cannot say so then, and one that is started cannot either.
_STANDSTILL = ("run.no-islands", "merger.missing", "run.stalled")


@dataclass(frozen=True)
class Problem:
    """Something that is wrong now.

    Attributes:
        code: A stable name.
        mood: `bad` if the run suffers, `warn` if somebody should look, `info` if nothing has to be done.
        who: The island that it is about, `merger`, `redis` or `run`.
        text: What is wrong, as one sentence.
        remedy: What to do, as whole sentences.
        seconds: How long it has been so, as far as that is known; otherwise 0.
        names: The islands of several problems that are shown as one.
    """

    code: str
    mood: Mood
    who: str
    text: str
    remedy: str
    seconds: float = 0.0
    names: tuple[str, ...] = ()


def state_of(view: RunView, found: Sequence[Problem]) -> str:
    """Return the state of the run in one or two words, by its problems; `training` if all is well."""
    if not (view.unfinished or view.live):
        return "finished"
    if not (view.known or view.rounds or view.control.is_paused):
        return "new"
    codes = {problem.code for problem in found}
    troubled = next((word for code, word in _STATES.items() if code in codes), "")
    return troubled or ("training" if view.rounds else "starting")


def grouped(found: Sequence[Problem]) -> list[Problem]:
    """Show problems of one kind that more than GROUP_MOST islands have as one problem, with their names."""
    kinds: dict[str, list[Problem]] = {}
    for problem in found:
        alone = problem.who in ("run", "redis", "merger")
        kinds.setdefault(f"{problem.code} {problem.who if alone else problem.mood}", []).append(problem)
    return [each for kind in kinds.values() for each in ([_joined(kind)] if len(kind) > GROUP_MOST else kind)]


def _joined(kind: Sequence[Problem]) -> Problem:
    first, names = kind[0], tuple(problem.who for problem in kind)
    remedy = re.sub(rf"(--name |island\.){re.escape(first.who)}(?![\w-])", r"\1NAME", first.remedy)
    text = f"Each {first.text.removeprefix('It ')}" if first.text.startswith("It ") else first.text
    return replace(
        first, who=f"{len(kind)} islands", text=text, remedy=remedy, seconds=max(p.seconds for p in kind), names=names
    )


def verdict(view: RunView) -> str:
    """Return whether the run learns, as sentences: its best held-out loss, when that was, and how it goes on."""
    seen = [(each.bits_per_byte, each) for each in view.evaluations if not math.isnan(each.bits_per_byte)]
    if not seen:
        if view.tape and all(math.isnan(entry.loss) for entry in view.tape):
            return "The islands report no losses: their scripts do not give any to `sync(loss=…)`."
        rise = rising([entry.loss for entry in view.tape])
        return "Nothing was evaluated yet." + (" The training loss rises." if rise else "") if view.tape else ""
    best = min(range(len(seen)), key=lambda n: seen[n][0])
    since, lowest = len(seen) - 1 - best, seen[best][0]
    figure = f"{rounded(loss_unit(view.manifest.corpus).from_evaluation(lowest))}, after round {seen[best][1].round:,}"
    if len(seen) < VERDICT_EVALUATIONS:
        return f"Best held-out loss so far: {figure}. It is too early for a trend."
    if not since:
        return f"It learns: the held-out loss is at its best, {figure}."
    worse = (seen[-1][0] - lowest) / (abs(lowest) or math.ulp(0.0))  # a loss of a script may be zero or negative
    word = "It is level" if since < VERDICT_EVALUATIONS or worse < LEVEL_SHARE else "It does not learn any more"
    later = "1 evaluation" if since == 1 else f"{since} evaluations"
    share = f"{worse:.1%} " if lowest or not worse else ""
    return f"{word}: the best held-out loss was {figure}; the newest is {share}above it, {later} later."


def problems(view: RunView, unix_seconds: float = 0.0) -> tuple[Problem, ...]:
    """Return what is wrong now, the worst first. `unix_seconds` is the clock of the Redis."""
    unreachable = tuple(_unreachable_shards(view))
    few = [Problem("run.few-syncs", "warn", "run", fault, FEW_SYNCS_REMEDY)] if (fault := view.few_syncs) else []
    if not (view.unfinished or view.pending):
        return (*unreachable, *_bucket_problems(view), *few)
    found = [
        *unreachable,
        *_run_problems(view),
        *_merger_problems(view),
        *few,
        *_memory_problems(view),
        *_loss_problems(view.tape),
        *_checkpoint_problems(view),
        *(problem for island in view.islands for problem in _island_problems(island, _start_command(view))),
        *_refusal_problems(view, unix_seconds),
    ]
    if view.refuses_writes and any(each.code in _STANDSTILL for each in found):
        code, what, remedy = view.refuses_writes
        if code != "broker.refused-disk":  # after a failed snapshot it may take writes, and something else may be wrong
            found = [each for each in found if each.code not in (*_STANDSTILL, "island.silent")]
        found.insert(0, Problem("redis.refuses-writes", "bad", "redis", f"Redis {what}.", remedy))
    address = view.address and f" {view.address}"

    def named(remedy: str) -> str:
        return remedy.replace("steer URL", f"steer URL --run {view.run}").replace(" URL", address)

    found = [replace(each, remedy=named(each.remedy)) for each in found]
    return tuple(sorted(found, key=lambda problem: _ORDER.index(problem.mood)))


def _start_command(view: RunView) -> str:
    """Return the command that starts an island; empty if the islands are training scripts of their users."""
    if view.manifest.has_scripts:
        return ""
    return f"archipelago island URL --run {view.run}{' --task FILE.py:NAME' if view.manifest.task else ''}"


def _run_problems(view: RunView) -> Iterator[Problem]:
    start = _start_command(view)
    another = f"Start one with `{start}`" if start else "Start one of its training scripts"
    if not view.live and view.up:
        yield Problem("run.no-islands", "bad", "run", "No island is live.", f"Continue the run with `{view.up}`.")
    elif not view.live:
        had, log = view.known or view.rounds, "The log of the last island says why it ended."
        yield Problem(
            "run.no-islands", "bad", "run", "No island is live." if had else "No island has joined yet.",
            f"{another}; the run goes on where it is. {log}" if had else f"{another}.",
            min((island.last_seen_seconds for island in view.islands), default=0.0),
        )  # fmt: skip
    if view.control.is_paused:
        yield Problem(
            "run.paused", "warn", "run", "Merging is paused; islands continue to train.",
            "Resume it with `archipelago steer URL merging=`.",
        )  # fmt: skip
    for name, why in view.control.faults.items():
        yield Problem(
            "steer.ignored", "warn", "run", f"The request {name} is ignored: {why}.",
            f"Correct it, or remove it with `archipelago steer URL {name}=`.",
        )  # fmt: skip
    if view.unreadable:
        yield Problem(
            "redis.unreadable", "warn", "redis",
            f"{len(view.unreadable)} records cannot be read and are skipped: {', '.join(view.unreadable[:3])}.",
            "An island has credentials that were replaced or revoked, or something else or another version of the "
            "program writes to these keys. End that. A merger that starts deletes keys with another type of value; "
            "delete `members` by hand, and run `archipelago invite`.",
        )  # fmt: skip


def _merger_problems(view: RunView) -> Iterator[Problem]:
    status = view.merger
    steps = [island.step_seconds for island in view.islands if island.live and island.step_seconds > 0]
    stride_seconds = min(steps, default=0.0) * view.manifest.config.sync.interval / max(1, view.fragments)
    longest = max(STALL_SECONDS, STALL_STRIDES * stride_seconds)
    if {island.state for island in view.islands if island.live} == {"joining"}:  # compiling, for example
        longest *= LOADING_FACTOR
    stalls = status.still_seconds > longest
    unserved = [shard for shard in status.unserved if shard not in view.ended]  # mergers leave shards that have ended
    if (view.lacks_merger and (unserved or not status.holders)) or view.refused:
        lacking = f"{numbered('shard', unserved)}, and the others go on" if status.holders else "the run"
        start = f"Start one with `archipelago merger URL --run {view.run}`. It takes what has none, and goes on where "
        start += "the last one stopped. Until then islands train on, and their work waits for one."
        again = view.up and f"Continue the run with `{view.up}`."
        yield Problem(
            "merger.missing", "bad", "merger", f"No merger serves {lacking}.", view.refused or again or start,
            max((status.shards[shard].still_seconds for shard in unserved), default=status.still_seconds),
        )  # fmt: skip
    elif stalls and not view.control.is_paused:
        stalled = [shard for shard, each in enumerate(status.shards) if each.still_seconds > longest]
        where = f" in {numbered('shard', stalled)}" if len(stalled) < len(status.shards) else ""
        yield Problem(
            "run.stalled", "bad", "merger",
            f"Nothing was merged{where} for {status.still_seconds:,.0f} s.",
            "Look at the merger's log. If it hangs, stop it: a standby or a new one takes over without a loss."
            if view.live else "Start an island.", status.still_seconds,
        )  # fmt: skip
    is_merging = view.live and not stalls and not view.control.is_paused and not view.lacks_merger
    for where, load in merge_loads(view):
        if load.is_slow and is_merging:
            yield Problem("merger.slow", "warn", "merger", f"{where}{load.describe()}", load.remedy)


def merge_loads(view: RunView) -> Iterator[tuple[str, MergeLoad]]:
    """Yield the load of the merger of each shard that is known, with words that name the shard if there are several."""
    for shard, fragments in enumerate(view.shards or [range(view.fragments)]):
        entries = [entry for entry in view.tape if entry.fragment in fragments]
        if (load := merge_load(entries, view.manifest.config.sync.interval)) is not None:
            yield f"Shard {shard}: " if view.shards else "", load


def _unreachable_shards(view: RunView) -> Iterator[Problem]:
    if not view.unreachable:
        return
    away = sorted(view.unreachable)
    fragments = sorted(fragment for shard in away for fragment in view.shards[shard])
    yield Problem(
        "shard.unreachable", "bad", "redis",
        f"{numbered('shard', away).capitalize()} cannot be reached: {view.unreachable[away[0]]}. The figures of "
        f"the run leave out {numbered('fragment', fragments)} of {view.fragments}. The others go on.",
        "Start its node of the cluster again, or mend the network between it and this machine. Its figures return when "
        "it answers, and islands then send what they owe it.",
    )  # fmt: skip


def _memory_problems(view: RunView) -> Iterator[Problem]:
    used = view.memory_bytes / view.memory_limit_bytes if view.memory_limit_bytes else 0.0
    if used < MEMORY_WARN:
        return
    full = used >= MEMORY_BAD
    yield Problem(
        "redis.memory", "bad" if full else "warn", "redis",
        f"Redis uses {used:.0%} of its memory limit" + (", so islands do not send." if full else "."),
        "Raise `maxmemory`, or delete runs that are no longer needed. Islands stop sending at 80 %, and lose nothing.",
    )  # fmt: skip


def _loss_problems(tape: Sequence[TapeEntry]) -> Iterator[Problem]:
    if rise := rising([entry.loss for entry in tape]):
        yield Problem(
            "loss.rises", "warn", "run",
            f"The training loss rises: it is {rise[1] / rise[0] - 1.0:.1%} higher in the newest rounds.",
            "Compare the islands' own losses: if one is high, drain it. If all rise, lower the outer rate "
            "(`archipelago steer URL outer.learning_rate=VALUE`); if that does not help, begin a new run from an "
            "export (`archipelago init --from FOLDER`) with a lower --inner.learning-rate.",
        )  # fmt: skip


def rising(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean loss of the older and of the newer half if the newer one is clearly higher, else None."""
    known = [loss for loss in losses if not math.isnan(loss)]
    if len(known) < 2 * RISE_ROUNDS:
        return None
    half = len(known) // 2
    before, after = known[:half], known[half:]
    if statistics.fmean(before) <= 0.0:
        return None
    error = math.hypot(statistics.stdev(before) / math.sqrt(half), statistics.stdev(after) / math.sqrt(len(after)))
    rise = statistics.fmean(after) - statistics.fmean(before)
    if rise <= max(RISE_SHARE * abs(statistics.fmean(before)), RISE_ERRORS * error):
        return None
    return statistics.fmean(before), statistics.fmean(after)


def _bucket_problems(view: RunView) -> Iterator[Problem]:
    if view.uncopied:
        yield Problem(
            "bucket.behind", "warn", "merger", f"{view.uncopied[:1].upper()}{view.uncopied[1:]}",
            "The merger tries again by itself. If it has ended, start it again with the same folder and bucket: it "
            "copies them then. Until then, only its disk has the newer checkpoints.",
        )  # fmt: skip


def _checkpoint_problems(view: RunView) -> Iterator[Problem]:
    yield from _bucket_problems(view)
    if view.unsaved:
        yield Problem(
            "checkpoint.failed", "bad", "merger", f"{view.unsaved[:1].upper()}{view.unsaved[1:]}",
            "The merger tries again by itself. Until then, only Redis can restore the newer rounds.",
        )  # fmt: skip
        return
    behind = view.rounds - view.covered
    times = [entry.unix_seconds for entry in view.tape if entry.unix_seconds]
    if len(times) < 2 or behind <= 0 or not view.merger.holder:
        return
    # The median, because the run may have stood still for a night between two of these rounds.
    seconds = behind * statistics.median(after - before for before, after in pairwise(times))
    if seconds > CHECKPOINT_SECONDS:
        newest = f"the newest one ends at round {view.covered:,}" if view.covered else "there is none yet"
        yield Problem(
            "checkpoint.late", "warn", "merger",
            f"A checkpoint is late: {newest}, and the rounds since then took {seconds / 60:,.0f} min.",
            "Look at the space on the merger's disk and at its log; with --checkpoint-every 0 it takes none. Until the "
            "next checkpoint, only Redis can restore the newer rounds.", seconds - CHECKPOINT_SECONDS,
        )  # fmt: skip


def _island_problems(island: IslandView, start: str) -> Iterator[Problem]:
    if island.is_silent and island.last_seen_seconds < SILENT_SHOWN_SECONDS:
        again = f"`{start} --name {island.name}`" if start else "its script again"
        yield Problem(
            "island.silent", "warn", island.name,
            "It sends no heartbeats: it was killed, its training loop hangs, or its machine or its link is down.",
            f"The run goes on without it. Its log says whether it hangs. Start {again}; if only its link is down, it "
            "comes back by itself.",
            island.last_seen_seconds,
        )  # fmt: skip
    if not island.live:
        return
    yield from _link_problems(island)
    if island.factor < 1.0:
        yield Problem(
            "island.lowered", "warn", island.name,
            f"Its weight is lowered to {island.factor:.0%}, because its contributions disagree with those of the "
            f"others (score {island.score:.2f}).",
            "Check its corpus, its software and its device. If you do not trust it, expel it with "
            f"`archipelago steer URL island.{island.name}=expel`.",
        )  # fmt: skip


def _link_problems(island: IslandView) -> Iterator[Problem]:
    if island.link.startswith("thin link"):
        yield Problem(
            "island.thin-link", "info", island.name, f"It has a {island.link}.",
            "Nothing has to be done: it sends fewer bits, and less often. A faster link gives its work more weight.",
        )  # fmt: skip
    elif island.link != "ok" and not island.link.startswith("no merger"):  # That is `merger.missing`.
        yield Problem(
            "island.link", "warn", island.name, f"Its link fails: {island.link}.",
            f"Check the network between {island.host} and Redis. It trains on, and sends when the link is back.",
        )  # fmt: skip


def _refusal_problems(view: RunView, unix_seconds: float) -> Iterator[Problem]:
    newest = {refusal.island: (at, refusal) for at, refusal in view.refusals}
    for name, (at, refusal) in newest.items():
        is_admitted = refusal.reason == IN_WORDS[EXPEL] and name not in view.control.expelled
        if unix_seconds - at < REFUSAL_SECONDS and not is_admitted:
            yield Problem(
                "island.refused", "warn", name,
                f"A contribution to round {refusal.round:,} was refused: {refusal.reason}.",
                refusal_remedy(refusal.reason), max(0.0, unix_seconds - at),
            )  # fmt: skip
