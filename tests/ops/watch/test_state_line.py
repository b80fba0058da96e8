"""The one line about a run: its state, the estimate, the worst problem, and whether its figures are old."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.messages import Counters, Pending, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.transport import MergerStatus
from archipelago.ops.watch.advice import problems
from archipelago.ops.watch.reading import Outage, RunReading, summarise
from archipelago.ops.watch.state_line import state_line, steps_per_second
from tests import samples

NOW = 1.8e9
MANIFEST = samples.manifest()
HANGS = Outage(NOW + 5, "Redis does not answer", "The display continues by itself.")


def entry(number: int, step: int, unix_seconds: float = 0.0) -> TapeEntry:
    return replace(samples.commit([]).tape, round=number, step=step, unix_seconds=unix_seconds)


TAPE = [entry(n, 10 * n, NOW - 40 + 4.0 * n) for n in range(1, 9)]


def reading(still_seconds: float = 0.5, holder: str = "m", **changes: Any) -> RunReading:
    presences = [Presence(samples.heartbeat("oslo"), 0.5)]
    view = summarise(MANIFEST, TAPE, presences, Counters(), Pending(1, 1))
    view = replace(view, **{"merger": MergerStatus(holder, 1, 4.0, still_seconds), **changes})
    return RunReading(view, NOW, problems(view, NOW))


def test_a_run_that_trains_has_an_estimate_and_no_old_figures() -> None:
    state = state_line(reading())
    assert (state.word, state.mood) == ("training", "good")
    assert state.share == pytest.approx(80 / 2000)
    assert state.seconds_left == pytest.approx((2000 - 80) / 2.5)
    assert math.isnan(state.since_unix_seconds)
    assert state.text == "training · 4% · about 13 min left"


@pytest.mark.parametrize(
    ("word", "still", "holder", "outage", "since"),
    [
        ("no answer", 0.5, "m", HANGS, NOW),
        ("no merger", 7.0, "", None, NOW - 7.0),
        ("stalled", 90.0, "m", None, NOW - 90.0),
    ],
)
def test_a_run_that_stands_still_is_stalled_and_its_figures_have_a_time(
    word: str, still: float, holder: str, outage: Outage | None, since: float
) -> None:
    state = state_line(reading(still, holder), outage)
    assert (state.word, state.mood, state.left, state.urgency) == (word, "warn", "stalled", "bad")
    assert math.isnan(state.seconds_left)
    assert state.since_unix_seconds == since
    assert state.sentence and state.remedy and state.about
    assert state_line(reading(still, holder, pending=0), outage).word == word, "also if nothing waits"


def test_a_finished_run_stays_finished_without_its_redis() -> None:
    ended = reading(step=2000, live=0, pending=0)
    for outage in (None, HANGS):
        state = state_line(ended, outage)
        assert (state.word, state.mood, state.share, state.left, state.urgency) == ("finished", "idle", 1.0, "", "idle")
        for verb in ("report", "export", "generate"):
            assert f"`archipelago {verb} sample" in state.remedy


def test_before_the_first_reading() -> None:
    assert state_line(None).word == "reading"
    assert state_line(None, HANGS).word == "no answer"


def test_the_speed_of_a_run_leaves_out_a_night_without_rounds() -> None:
    assert math.isnan(steps_per_second([entry(1, 10), entry(2, 20)])), "this tape has no times"
    assert steps_per_second(TAPE) == pytest.approx(2.5)
    assert math.isnan(steps_per_second(TAPE[:1]))
    times = [10.0 * n + (36_000.0 if n > 4 else 0.0) for n in range(8)]
    tape = [entry(n + 1, 8 * n, 1e9 + at) for n, at in enumerate(times)]
    assert steps_per_second(tape) == pytest.approx(0.8)
    assert steps_per_second(tape[:6]) == pytest.approx(0.8), "the rounds before the night count"
