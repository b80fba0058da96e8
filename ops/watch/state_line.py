"""The state of a run in one line, which every view shows: state, progress, estimate, and the worst problem. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.messages import TapeEntry
from archipelago.ops.watch.advice import grouped
from archipelago.ops.watch.formatting import ago, clock
from archipelago.ops.watch.reading import RunReading

#: The state while there is no new reading.
NO_ANSWER = "no answer"
#: The mood (good, busy, warn or idle) of each state of a run.
MOODS = {
    "finished": "idle", "paused": "warn", "new": "idle", "no islands": "warn", "shard away": "warn",
    "no merger": "warn", "stalled": "warn", "starting": "busy", "training": "good", NO_ANSWER: "warn",
}  # fmt: skip
#: The states in which no rounds close although they should: figures of merged work grow old.
STANDING = ("no islands", "no merger", "stalled")
#: The run was paused or stopped if the time between two rounds is this many times as long as usual.
PAUSE_TIMES = 20.0
#: What is said about a state without problems, and what to do then.
_REMARKS = {
    "starting": ("No round has closed yet.", ""),
    "finished": (
        "All steps are made.",
        "Next: `archipelago report {place}`, `archipelago export {place} --out {run}-model`{generate}.",
    ),
}


@dataclass(frozen=True)
class StateLine:
    """What every view says about a run at first.

    Attributes:
        word: The state in one or two words.
        mood: How good that is: good, busy, warn or idle.
        share: The share of the steps that are made.
        seconds_left: How long the run will still take; NaN if that is not known.
        left: The same in words; `stalled` while nothing moves, and empty if nothing can be said.
        sentence: The worst problem, or another remark; may be empty.
        remedy: What to do about it; may be empty.
        urgency: How much the sentence matters: bad, warn or idle.
        about: The code of the problem and who has it; its figures may change, and this stays.
        since_unix_seconds: When the figures were true, if they are older than they should be; else NaN.
    """

    word: str
    mood: str
    share: float = 0.0
    seconds_left: float = math.nan
    left: str = ""
    sentence: str = ""
    remedy: str = ""
    urgency: str = "idle"
    about: str = ""
    since_unix_seconds: float = math.nan

    @property
    def text(self) -> str:
        """The line, without the remedy."""
        is_old = not math.isnan(self.since_unix_seconds)
        old = f"figures as of {clock(self.since_unix_seconds)}" if is_old else ""
        return " · ".join(filter(None, (self.word, f"{self.share:.0%}", self.left, old, self.sentence.rstrip("."))))


def state_line(reading: RunReading | None, outage: ArchipelagoError | None = None) -> StateLine:
    """Return the state of a run.

    Args:
        reading: The last successful reading; None before the first.
        outage: Why there is no new one. The Redis of a finished run may be gone.
    """
    if reading is None:
        return _away(outage) if outage else StateLine("reading", "idle")
    view, word = reading.view, reading.state
    if outage and word != "finished":
        return replace(_away(outage), share=view.step / max(1, view.steps), since_unix_seconds=reading.unix_seconds)
    seconds, (sentence, remedy, urgency, about) = math.nan, _remark(reading)
    if word == "training" and (speed := steps_per_second(view.tape)) > 0.0:
        seconds = max(0, view.steps - view.step) / speed
    return StateLine(
        word, mood_of(word, urgency != "idle"), view.step / max(1, view.steps), seconds,
        "stalled" if word in STANDING else "" if math.isnan(seconds) else f"about {ago(seconds)} left",
        sentence, remedy, urgency, about, reading.unix_seconds - view.round_seconds if word in STANDING else math.nan,
    )  # fmt: skip


def mood_of(word: str, is_troubled: bool) -> str:
    """Return the mood of a state. A run that trains with a problem that somebody should look at is not good."""
    mood = MOODS.get(word, "idle")
    return "warn" if is_troubled and mood in ("good", "busy") else mood


def _away(outage: ArchipelagoError) -> StateLine:
    what, remedy = f"{outage.what}.", f"{outage.remedy} [{outage.code}]"
    return StateLine(NO_ANSWER, "warn", 0.0, math.nan, "stalled", what, remedy, "bad", NO_ANSWER)


def _remark(reading: RunReading) -> tuple[str, str, str, str]:
    """Return sentence, remedy, urgency and `about`: of the worst problem, or a remark about a state without one."""
    found = [problem for problem in grouped(reading.problems) if problem.mood != "info"]
    if not found or reading.state == "finished":
        sentence, remedy = _REMARKS.get(reading.state, ("", ""))
        view = reading.view
        place = view.folder or f"{view.address} --run {view.run}".lstrip()
        generate = "" if view.manifest.config.has_user_loops else f", `archipelago generate {place}`"
        return sentence, remedy.format(run=view.run, place=place, generate=generate), "idle", ""
    first = found[0]
    who = "" if first.who in ("run", "redis", "merger") else f"{first.who}: "
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    about = f"{first.code} {'islands' if first.names else first.who}"
    return f"{who}{first.text}{more}", f"{first.remedy} [{first.code}]", first.mood, about


def steps_per_second(tape: Sequence[TapeEntry]) -> float:
    """Return the global steps per second over these rounds, without pauses; NaN if it is not known."""
    timed = [entry for entry in tape if entry.unix_seconds]
    steps = accumulate((entry.step for entry in timed), max)
    made = [after - before for before, after in pairwise(steps)]
    gaps = [after.unix_seconds - before.unix_seconds for before, after in pairwise(timed)]
    longest = PAUSE_TIMES * (statistics.median(gaps) or math.inf) if gaps else 0.0
    moved = [(steps, gap) for steps, gap in zip(made, gaps, strict=True) if gap <= longest]
    seconds = sum(gap for _, gap in moved)
    return sum(steps for steps, _ in moved) / seconds if seconds > 0.0 else math.nan
