"""Failure tapes record a simulation, and islands follow them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments.tape_run import Course, FailureTape, Leg, TapeRun, follow, rehearsed, taped
from archipelago.ops.simulation.failures import FailureModel, simulate
from tests.small import SMALL

AVERAGE = MergeConfig(embedding="average", rest="average")


# -- tapes ------------------------------------------------------------------------------------------------------------


def test_a_tape_records_a_simulation() -> None:
    model = FailureModel(chips=2.4e6, islands=4, slices=32)
    outcome = simulate(model, 20_000.0, np.random.default_rng(3))
    tape = taped(outcome, model.step_seconds)
    assert (tape.step_seconds, tape.seconds, len(tape.islands)) == (6.0, 20_000.0, 4)
    for island in range(4):
        assert 0.5 < outcome.goodput_of(island) < 0.99, "seed 3"
        assert tape.goodput_of(island) == pytest.approx(outcome.goodput_of(island), abs=1e-9)


def test_goodput_of_a_tape_up_to_a_moment() -> None:
    tape = FailureTape(((Leg(0, 0.5), Leg(40, 1)), (Leg(0, 1), Leg(20, 0), Leg(40, 1))), 1.0, 100.0)
    assert tape.goodput(40.0) == pytest.approx(0.5)
    assert tape.goodput(50.0) == pytest.approx(0.6)
    assert tape.goodput() == tape.goodput(200.0) == pytest.approx(0.8), "the tape ends at 100 s"


# -- an island's course -----------------------------------------------------------------------------------------------


@given(
    legs=st.lists(st.tuples(st.floats(0.1, 20.0), st.sampled_from([0.0, 0.0, 0.5, 1.0])), min_size=1, max_size=8),
    now=st.floats(0.0, 500.0),
    steps=st.floats(0.0, 60.0),
)
def test_steps_take_the_time_that_the_tape_gives(legs: list[tuple[float, float]], now: float, steps: float) -> None:
    """The time in which the island makes steps, counted in small pieces, is the time that the steps take."""
    legs = [*legs, (1.0, 1.0)]
    ends = np.cumsum([length for length, _ in legs])
    course = Course(
        [Leg(float(end) - length, live) for end, (length, live) in zip(ends, legs, strict=True)], 1.0, float(ends[-1])
    )
    reached, stall = course.walk(now, steps)
    pieces = np.linspace(now, reached, 4001)
    middles = (pieces[1:] + pieces[:-1]) / 2
    stepping = np.mean([course.live(float(at)) > 0 for at in middles]) if reached > now else 0.0
    assert stepping * (reached - now) == pytest.approx(steps, abs=0.02 * (reached - now) + 1e-6)
    assert now <= stall.begin <= stall.end <= reached or stall == (0.0, 0.0)


def test_the_longest_stall_is_found() -> None:
    course = Course([Leg(0, 1), Leg(2, 0), Leg(3, 1), Leg(4, 0), Leg(8, 0), Leg(9, 1)], 1.0, 10.0)
    assert course.walk(0.0, 4.0) == (10.0, (4.0, 9.0))
    assert course.walk(5.0, 3.0) == (12.0, (5.0, 9.0)), "the tape starts again"


# -- islands that follow a tape ---------------------------------------------------------------------------------------


@pytest.fixture
def config() -> RunConfig:
    """Return the config of a run of one fragment, which is averaged, so that little is compiled."""
    small = replace(SMALL, data=replace(SMALL.data, corpus="small-text"))
    return replace(small, sync=replace(SMALL.sync, interval=2, fragments=1), merge=AVERAGE)


def idle(state: InnerState, tokens_nxBxT1: jax.Array, step: jax.Array) -> tuple[InnerState, jax.Array]:
    """Make inner steps that train nothing: the tape decides about times, whatever the islands learn."""
    return state, jnp.zeros(len(tokens_nxBxT1))


@pytest.fixture
def work(config: RunConfig, corpus: OpenCorpus) -> Workload:
    return replace(our_work(config, corpus), steps=idle)


def tape_of(*islands: list[tuple[float, float]]) -> FailureTape:
    """Return a tape of a thousand steps of a second."""
    return FailureTape(tuple(tuple(Leg(*leg) for leg in legs) for legs in islands), 1.0, 1000.0)


def followed(work: Workload, tape: FailureTape) -> TapeRun:
    run = TapeRun(work, tape)
    run.finish()
    books = run.transport.reader.books()
    assert books.published == books.merged + books.refused + run.transport.reader.backlog()
    assert run.transport.reader.backlog() == 0
    return run


@pytest.mark.full
def test_a_tape_without_failures_gives_the_usual_run(work: Workload) -> None:
    run = followed(work, tape_of([(0, 1)], [(0, 1)]))
    assert run.tokens == 2 * work.config.inner.steps * work.config.tokens_per_step
    assert run.deaths == 0


def test_islands_of_a_tape_can_be_slow(work: Workload) -> None:
    """A slow island makes a third of the steps, and while it stands for 9 seconds it misses three of them."""
    whole, steps = work.config.inner.steps, {}
    stands: list[tuple[float, float]] = [(0, 1), (10.5, 0), (19.5, 1)]
    for name, legs in (("calm", [(0.0, 1.0)]), ("failing", stands)):
        run = TapeRun(work, tape_of([(0, 1)], [(0, 1)], legs), slow=3.0, slowed=1)
        islands = dict(run.islands)
        run.finish()
        assert run.deaths == 0
        steps[name] = [islands[f"island-{number}"].totals.steps for number in range(3)]
    assert steps["calm"] == [whole, whole, pytest.approx(whole / 3, abs=2)]
    assert steps["failing"] == [whole, whole, pytest.approx(steps["calm"][2] - 3, abs=1)]


def test_a_short_stall_keeps_the_island(work: Workload) -> None:
    run = TapeRun(work, tape_of([(0, 1)], [(0, 1), (10.5, 0), (18.5, 1)]))
    stalled = run.islands["island-1"]
    run.finish()
    assert run.deaths == 0
    whole = work.config.inner.steps
    assert stalled.totals.steps in range(whole - 9, whole - 6), "eight steps fewer"


@pytest.mark.full
def test_a_long_stall_is_a_death_and_a_rejoin(work: Workload) -> None:
    run = followed(work, tape_of([(0, 1)], [(0, 1), (10.5, 0), (30.5, 1)]))
    assert run.deaths == 1
    members = [{(m.island, m.incarnation) for m in entry.members} for entry in run.transport.reader.tape(1000)]
    lives = [incarnation for name, incarnation in sorted(set().union(*members)) if name == "island-1"]
    assert len(lives) == 2, "it rejoined as another incarnation"
    full, each = 2 * work.config.inner.steps * work.config.tokens_per_step, work.config.tokens_per_step
    assert run.tokens == pytest.approx(full - 20 * each, abs=2.5 * each)


def test_one_or_all_islands_may_be_away(work: Workload) -> None:
    one = followed(work, tape_of([(0, 1)], [(0, 1), (5.5, 0)]))
    assert one.deaths == 1
    assert not one.islands, "the run ends without an island that never returns"
    legs: list[tuple[float, float]] = [(0, 1), (20.5, 0), (60.5, 1)]
    both = followed(work, tape_of(legs, legs))
    assert both.deaths == 2
    assert both.clock.now > 60.5
    assert both.merger.state.step >= work.config.inner.steps - 1, "they continue from the merged parameters"


def test_the_batch_shrinks_with_the_slices(work: Workload) -> None:
    run = followed(work, tape_of([(0, 1)], [(0, 0.625)]))
    per_step = work.config.tokens_per_step
    assert run.tokens == pytest.approx((1 + 0.625) * work.config.inner.steps * per_step, rel=0.02)
    members = [member for entry in run.transport.reader.tape(1000) for member in entry.members]
    for island, share in (("island-0", 1.0), ("island-1", 0.625)):
        mine = [member for member in members if member.island == island]
        found = sum(member.tokens for member in mine) / sum(member.steps for member in mine)
        assert found == pytest.approx(share * per_step, rel=0.05 * (share < 1.0)), island


def test_a_rehearsal_predicts_the_last_step(work: Workload) -> None:
    """160 steps of work: 60 until step 40, 20 until step 60, and two a step from there on."""
    tape = tape_of([(0, 0.5), (40, 1)], [(0, 1), (40, 0), (60, 1)])
    assert rehearsed(work, tape, 160 * work.config.tokens_per_step) == pytest.approx(100, abs=3)
    both_stand = tape_of(*[[(0.0, 1.0), (10.0, 0.0), (20.0, 1.0)]] * 2)
    steps = rehearsed(work, both_stand, 60 * work.config.tokens_per_step)
    assert steps == pytest.approx(30, abs=2), "the global step stalls with all of them"


@pytest.mark.full
def test_islands_of_a_tape_train_on_as_many_tokens(config: RunConfig, corpus: OpenCorpus) -> None:
    """They take longer, and the learning rate schedule ends with the tokens."""
    work = our_work(config, corpus)
    legs = tuple(Leg(*leg) for leg in ((0, 1), (8, 0), (13, 0.75), (18, 1)))
    tokens = 2 * config.inner.steps * config.tokens_per_step
    run, goodput, first, last = follow(work, FailureTape((legs, legs), 1.0, 25.0), tokens)
    assert goodput == pytest.approx((8 + 0.75 * 5 + 7) / 25), "the run is longer than the tape"
    assert run.tokens == last.tokens == pytest.approx(tokens, rel=0.02)
    steps = run.manifest.config.inner.steps
    assert steps > config.inner.steps, "fewer slices, more steps"
    assert run.merger.state.step / steps == pytest.approx(1.0, abs=0.03)
    assert last.bits_per_byte < 7.0 < first.bits_per_byte, "it learned"
