"""Failure tapes: files are written, read and refused, and real islands follow them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import InnerState
from archipelago.islands.tasks import workload
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.experiments import tape_run
from archipelago.ops.experiments.baselines import Point
from archipelago.ops.experiments.tape_run import Course, TapeRun, calm, quality, rehearsed
from archipelago.ops.simulation.failures import FailureModel, simulate
from archipelago.ops.simulation.tape import FailureTape, Leg, outages, read, taped, write
from tests.failing import failing
from tests.small import SMALL

HEAD = '{"tape": 1, "islands": 1, "step_seconds": 1.0, "seconds": 9.0}\n'


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_tape_records_a_simulation(tmp_path: Path) -> None:
    model = FailureModel(chips=2.4e6, islands=4, slices=32)
    outcome = simulate(model, 20_000.0, np.random.default_rng(3))
    tape = taped(outcome, model.step_seconds, {"chips": model.chips})
    write(tape, tmp_path / "tape.jsonl")
    back = read(tmp_path / "tape.jsonl")
    assert back.about == {"chips": 2.4e6}
    assert (back.step_seconds, back.seconds, len(back.islands)) == (6.0, 20_000.0, 4)
    for island in range(4):
        assert 0.5 < outcome.goodput_of(island) < 0.99, "seed 3"
        assert tape.goodput_of(island) == pytest.approx(outcome.goodput_of(island), abs=1e-9)
        assert back.goodput_of(island) == pytest.approx(outcome.goodput_of(island), abs=1e-5)


def test_goodput_of_a_tape_up_to_a_moment() -> None:
    tape = FailureTape(((Leg(0, 0.5), Leg(40, 1)), (Leg(0, 1), Leg(20, 0), Leg(40, 1))), 1.0, 100.0)
    assert tape.goodput(40.0) == pytest.approx(0.5)
    assert tape.goodput(50.0) == pytest.approx(0.6)
    assert tape.goodput() == tape.goodput(200.0) == pytest.approx(0.8), "the tape ends at 100 s"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]\n",
        '{"tape": 2, "islands": 1, "step_seconds": 1, "seconds": 9}\n',
        '{"tape": 1, "islands": 0, "step_seconds": 1, "seconds": 9}\n',
        '{"tape": 1, "islands": 1, "step_seconds": NaN, "seconds": 9}\n',
        HEAD,
        HEAD + '{"at": 1, "island": 0, "live": 1}\n',
        HEAD + '{"at": 0, "island": 1, "live": 1}\n',
        HEAD + '{"at": 0, "island": -1, "live": 1}\n',
        HEAD + '{"at": 0, "island": 0, "live": 1.5}\n',
        HEAD + '{"at": 0, "island": 0, "live": NaN}\n',
        HEAD + '{"at": 0, "island": 0, "live": 1}\n{"at": 10, "island": 0, "live": 0}\n',
        HEAD
        + '{"at": 0, "island": 0, "live": 1}\n{"at": 5, "island": 0, "live": 0}\n{"at": 4, "island": 0, "live": 1}',
        HEAD + '{"at": 0, "island": 0}\n',
    ],
)
def test_a_file_that_is_not_a_tape_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_text(text, encoding="utf-8")
    with failing(DataError, "tape.invalid"):
        read(path)


def test_measured_outages_are_merged_where_they_overlap(tmp_path: Path) -> None:
    path = tmp_path / "outages.csv"
    path.write_text(
        "slice,failed_seconds,returned_seconds\noslo,50,60\nparis,1,2\noslo,10,20\noslo,15,30\n", encoding="utf-8"
    )
    assert outages(path) == [[(10.0, 30.0), (50.0, 60.0)], [(1.0, 2.0)]]


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", "slice,failed_seconds,returned_seconds\n", "slice,failed_seconds,returned_seconds\na,2,1\n"],
)
def test_a_file_that_is_not_failure_data_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "outages.csv"
    path.write_text(text, encoding="utf-8")
    with failing(DataError, "tape.outages"):
        outages(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with failing(DataError, "tape.unreadable"):
        read(tmp_path / "nowhere")


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
    with failing(DataError, "tape.never-steps"):
        Course([Leg(0, 0)], 1.0, 10.0)


# -- real islands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def config() -> RunConfig:
    return replace(SMALL, data=replace(SMALL.data, corpus="small-text"))


def tape_of(*islands: list[tuple[float, float]]) -> FailureTape:
    """Return a tape of a thousand steps of a second."""
    return FailureTape(tuple(tuple(Leg(*leg) for leg in legs) for legs in islands), 1.0, 1000.0)


def followed(config: RunConfig, corpus: OpenCorpus, tape: FailureTape) -> TapeRun:
    run = TapeRun(our_work(config, corpus), tape)
    run.finish()
    books = run.transport.reader.books()
    assert books.published == books.merged + books.refused + run.transport.reader.backlog()
    assert run.transport.reader.backlog() == 0
    return run


def test_a_tape_without_failures_gives_the_usual_run(config: RunConfig, corpus: OpenCorpus) -> None:
    run = followed(config, corpus, calm(2, 6.0))
    assert run.tokens == 2 * config.inner.steps * config.tokens_per_step
    assert run.deaths == 0


def test_islands_of_a_tape_can_be_slow(config: RunConfig, corpus: OpenCorpus) -> None:
    """A slow island makes a third of the steps, and while it stands for 9 seconds it misses three of them."""
    work, whole = our_work(config, corpus), config.inner.steps
    stands: list[tuple[float, float]] = [(0, 1), (10.5, 0), (19.5, 1)]
    steps = {}
    for name, legs in (("calm", [(0.0, 1.0)]), ("failing", stands)):
        run = TapeRun(work, tape_of([(0, 1)], [(0, 1)], legs), slow=3.0, slowed=1)
        islands = dict(run.islands)
        run.finish()
        assert run.deaths == 0
        steps[name] = [islands[f"island-{number}"].totals.steps for number in range(3)]
    assert steps["calm"] == [whole, whole, pytest.approx(whole / 3, abs=2)]
    assert steps["failing"] == [whole, whole, pytest.approx(steps["calm"][2] - 3, abs=1)]


def test_a_short_stall_keeps_the_island(config: RunConfig, corpus: OpenCorpus) -> None:
    run = TapeRun(our_work(config, corpus), tape_of([(0, 1)], [(0, 1), (10.5, 0), (18.5, 1)]))
    stalled = run.islands["island-1"]
    run.finish()
    assert run.deaths == 0
    assert stalled.totals.steps in range(config.inner.steps - 9, config.inner.steps - 6), "eight steps fewer"


def test_a_long_stall_is_a_death_and_a_rejoin(config: RunConfig, corpus: OpenCorpus) -> None:
    run = followed(config, corpus, tape_of([(0, 1)], [(0, 1), (10.5, 0), (30.5, 1)]))
    assert run.deaths == 1
    members = [{(m.island, m.incarnation) for m in entry.members} for entry in run.transport.reader.tape(1000)]
    lives = [incarnation for name, incarnation in sorted(set().union(*members)) if name == "island-1"]
    assert len(lives) == 2, "it rejoined as another incarnation"
    full = 2 * config.inner.steps * config.tokens_per_step
    assert run.tokens == pytest.approx(full - 20 * config.tokens_per_step, abs=2.5 * config.tokens_per_step)


def test_the_run_ends_without_an_island_that_never_returns(config: RunConfig, corpus: OpenCorpus) -> None:
    run = followed(config, corpus, tape_of([(0, 1)], [(0, 1), (5.5, 0)]))
    assert run.deaths == 1
    assert not run.islands


def test_all_islands_may_be_away(config: RunConfig, corpus: OpenCorpus) -> None:
    """Islands that return continue from the merged parameters."""
    legs: list[tuple[float, float]] = [(0, 1), (20.5, 0), (60.5, 1)]
    run = followed(config, corpus, tape_of(legs, legs))
    assert run.deaths == 2
    assert run.clock.now > 60.5
    assert run.merger.state.step >= config.inner.steps - 1


@pytest.mark.full
def test_the_batch_shrinks_with_the_slices(config: RunConfig, corpus: OpenCorpus) -> None:
    run = followed(config, corpus, tape_of([(0, 1)], [(0, 0.625)]))
    each = config.inner.steps * config.tokens_per_step
    assert run.tokens == pytest.approx((1 + 0.625) * each, rel=0.02)
    entries = run.transport.reader.tape(1000)
    per_step = {
        name: sum(m.tokens for e in entries for m in e.members if m.island == name)
        / sum(m.steps for e in entries for m in e.members if m.island == name)
        for name in ("island-0", "island-1")
    }
    assert per_step["island-0"] == config.tokens_per_step
    assert per_step["island-1"] == pytest.approx(0.625 * config.tokens_per_step, rel=0.05)


def test_a_rehearsal_predicts_the_last_step(config: RunConfig, corpus: OpenCorpus) -> None:
    """160 steps of work: 60 until step 40, 20 until step 60, and two a step from there on."""
    tape = tape_of([(0, 0.5), (40, 1)], [(0, 1), (40, 0), (60, 1)])
    assert rehearsed(our_work(config, corpus), tape, 160 * config.tokens_per_step) == pytest.approx(100, abs=3)
    both_stand = tape_of(*[[(0.0, 1.0), (10.0, 0.0), (20.0, 1.0)]] * 2)
    steps = rehearsed(our_work(config, corpus), both_stand, 60 * config.tokens_per_step)
    assert steps == pytest.approx(30, abs=2), "the global step stalls with all of them"


@pytest.mark.full
def test_quality_is_compared_at_equal_tokens(config: RunConfig, corpus: OpenCorpus) -> None:
    legs: list[tuple[float, float]] = [(0, 1), (8, 0), (13, 0.75), (18, 1)]
    tape = FailureTape((tuple(Leg(*leg) for leg in legs), tuple(Leg(*leg) for leg in legs)), 1.0, 25.0)
    heard: list[str] = []
    rows = quality(config, {"calm": calm(2, 1.0), "rough": tape}, heard.append)
    assert [row["tape"] for row in rows] == ["calm", "rough"]
    assert rows[1]["goodput"] == pytest.approx((8 + 0.75 * 5 + 7) / 25), "the run is longer than the tape"
    assert rows[1]["tokens"] == pytest.approx(rows[0]["tokens"], rel=0.02)
    assert rows[0]["steps"] == pytest.approx(config.inner.steps, abs=2)
    assert rows[1]["steps"] > rows[0]["steps"], "fewer slices, more steps"
    assert rows[1]["schedule_done"] == pytest.approx(1.0, abs=0.03)
    assert rows[0]["to_first"] == 1.0
    assert 0.5 < rows[1]["to_first"] < 1.5
    assert rows[1]["bits_per_byte"] < 7.0, "it learned"
    assert len(heard) == 2


def test_rows_of_quality_without_training(
    config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that train nothing take the time that the tape gives, and each row has its ratio to the first one."""

    def idle(state: InnerState, tokens_nxBxT1: jax.Array, step: jax.Array) -> tuple[InnerState, jax.Array]:
        return state, jnp.zeros(len(tokens_nxBxT1))

    losses = iter([8.0, 2.0, 8.0, 2.2])
    monkeypatch.setattr(workload, "compiled_steps", lambda model, inner: idle)
    monkeypatch.setattr(tape_run, "scoring", lambda *_: lambda tokens, params: Point(tokens, next(losses)))
    tapes = {"calm": calm(2, 1.0), "rough": tape_of([(0, 1), (8, 0), (13, 1)], [(0, 1)])}
    first, second = quality(config, tapes, lambda _: None)
    assert (first["to_first"], second["to_first"]) == (1.0, pytest.approx(1.1))
    assert second["goodput"] < first["goodput"] == 1.0
    assert second["tokens"] == pytest.approx(first["tokens"], rel=0.05)
