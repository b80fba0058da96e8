"""Whether a run learns, in words, and problems that many islands share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from archipelago.broker.messages import Counters, Evaluation, Pending
from archipelago.broker.presence import Presence
from archipelago.ops.watch.advice import Problem, grouped, problems, verdict
from archipelago.ops.watch.reading import summarise
from archipelago.ops.watch.run_view import RunView
from tests import samples

MANIFEST = samples.manifest()


def evaluated(losses: Sequence[float], training: float = 2.0) -> RunView:
    seen = [Evaluation(n, n, n, 1.7e9 + n, loss) for n, loss in enumerate(losses, 1)]
    tape = [replace(samples.commit([]).tape, loss=training)]
    return summarise(MANIFEST, tape, [], Counters(), Pending(0, 0), seen)


@pytest.mark.parametrize(
    ("losses", "begin"),
    [
        ([5.0, 4.0], "Best held-out loss so far: 4.0000, after round 2."),
        ([5.0, 4.0, 3.0, 2.0], "It learns: the held-out loss is at its best, 2.0000, after round 4."),
        ([5.0, 4.0, 3.0, 3.01], "It is level"),
        ([5.0, 2.0, 2.001, 2.002, 2.003, 2.004], "It is level"),
        ([5.0, 2.0, 3.0, 3.0, 3.0, 4.0], "It does not learn any more: the best held-out loss was 2.0000"),
        ([], "Nothing was evaluated yet."),
    ],
)
def test_the_verdict_names_the_best_when_it_was_and_the_trend(losses: Sequence[float], begin: str) -> None:
    assert verdict(evaluated(losses)).startswith(begin)


def test_a_run_of_scripts_without_losses_says_so() -> None:
    assert "no losses" in verdict(evaluated([], training=math.nan))
    assert verdict(replace(evaluated([]), tape=())) == ""


def test_a_problem_of_many_islands_is_shown_once_with_their_names_and_the_whole_command() -> None:
    silent = [Presence(samples.heartbeat(f"i{n}"), 20.0 + n) for n in range(5)]
    view = summarise(MANIFEST, [], [*silent, Presence(samples.heartbeat("oslo"), 0.5)], Counters(), Pending(0, 0))
    found = problems(replace(view, address="runs/sample/admin.join"))
    (problem,) = [each for each in grouped(found) if each.code == "island.silent"]
    assert (problem.who, problem.names, problem.seconds) == ("5 islands", ("i0", "i1", "i2", "i3", "i4"), 24.0)
    assert "`archipelago island runs/sample/admin.join --run sample --name NAME`" in problem.remedy
    few = [Problem("island.link", "warn", name, "x", "y") for name in ("a", "b")]
    assert grouped(few) == few
