"""The replay of recorded rounds gives the same bits, or an error that names the first difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.commits import Delivery
from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.messages import TapeEntry
from archipelago.broker.wire import unpack
from archipelago.merger import outer
from archipelago.merger.replay import DifferenceError, replay_round
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState
from tests import samples
from tests.failing import failing
from tests.harness.merger_run import (
    CONFIG,
    ISOTROPIC,
    SIZE,
    MergerRun,
    Shelf,
    outer_states,
    served_run,
    state_of,
    values,
)
from tests.tiers import examples

ROUNDED = replace(CONFIG, wire=WireConfig(down="bfloat16"))
Rounds = list[tuple[TapeEntry, list[Delivery]]]


def recorded(run: MergerRun) -> Rounds:
    """Return each tape entry with the contributions that it merged, which are still in the stream."""
    return [
        (entry, run.transport.merger.read([m.entry for m in entry.members]))
        for entry in run.transport.reader.tape(1000)
    ]


def beginning(run: MergerRun) -> tuple[RoundMerge, RunState, list[FragmentState]]:
    rules = RoundMerge.of(run.manifest)
    first = [unpack(payload, SIZE) for _, payload in samples.first_snapshots(run.manifest)]
    return rules, RunState(), [new_state(params_N, rules.outer) for params_N in first]


def replayed(run: MergerRun, rounds: Rounds) -> tuple[RunState, list[FragmentState]]:
    rules, state, fragments = beginning(run)
    for tape, deliveries in rounds:
        fragments[tape.fragment] = replay_round(rules, state, fragments[tape.fragment], tape, deliveries)
    return state, fragments


@cache
def four_rounds(config: RunConfig = CONFIG) -> MergerRun:
    run = MergerRun(config, quorum=2)
    run.play(run.merger(store=Shelf()), 1, 2, 3, 4)
    return run


@pytest.mark.parametrize("config", [ROUNDED, ISOTROPIC], ids=["rounded", "isotropic"])
def test_a_replay_has_the_same_bits(config: RunConfig) -> None:
    run = four_rounds(config)
    state, fragments = replayed(run, recorded(run))
    assert [outer.dump(f.params_N, f.outer) for f in fragments] == outer_states(run)
    assert [f.norms for f in fragments] == [state_of(run).norms[p] for p in range(2)]
    assert replace(state, timing=state_of(run).timing) == state_of(run)


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(0, 2), st.booleans()), max_size=16),
    st.randoms(use_true_random=False),
)
def test_any_run_replays_to_the_same_bits(script: list[tuple[str, int, int, bool]], random: Random) -> None:
    """Include late contributions, two of one island in a round, empty rounds, and any order of delivery."""
    run, merger = served_run(quorum=2, store=Shelf())
    run.live("a", "b", "c")
    for index, (island, ahead, behind, other_life) in enumerate(script):
        number = merger.rounds.closed + ahead
        base = max(0, run.version((number - 1) % 2) - behind)
        life = "y" if other_life else "x"
        run.send(island, number, values(index), base=base, incarnation=life, step_seconds=1.0 + index)
        merger.turn(0.0)
    run.live("a", "b", "c", state="left")
    merger.turn(0.0)
    rounds = recorded(run)
    for _, deliveries in rounds:
        random.shuffle(deliveries)
    state, fragments = replayed(run, rounds)
    assert replace(state, timing=state_of(run).timing).to_json() == state_of(run).to_json()
    dumps = [outer.dump(f.params_N, f.outer) if p in state.norms else b"" for p, f in enumerate(fragments)]
    assert dumps == outer_states(run)


def with_member(entry: TapeEntry, **changes: object) -> TapeEntry:
    first, *others = entry.members
    return replace(entry, members=(replace(first, **changes), *others))  # type: ignore[arg-type]


#: Changes to a tape entry, and the code of the difference that they make.
BENDS: dict[str, tuple[Callable[[TapeEntry], TapeEntry], str]] = {
    "member": (lambda e: replace(e, members=e.members[:1]), "replay.difference"),
    "name": (lambda e: with_member(e, island="z"), "replay.difference"),
    "weight": (lambda e: with_member(e, weight=0.25), "replay.difference"),
    "clip": (lambda e: with_member(e, clip=0.5), "replay.difference"),
    "loss": (lambda e: with_member(e, loss=1.5), "replay.difference"),
    "staleness": (lambda e: with_member(e, staleness=3), "replay.difference"),
    "gain": (lambda e: replace(e, gain=0.5), "replay.difference"),
    "digest": (lambda e: replace(e, digest="0" * 32), "replay.difference"),
    "fragment": (lambda e: replace(e, fragment=0), "replay.round"),
    "far fragment": (lambda e: replace(e, fragment=1 << 40), "replay.round"),
}


def test_each_difference_has_its_code() -> None:
    first, second, *_ = recorded(four_rounds())
    for how, code in BENDS.values():
        rules, state, fragments = beginning(four_rounds())
        replay_round(rules, state, fragments[0], *first)
        before = state.to_json()
        with failing(DifferenceError, code):
            replay_round(rules, state, fragments[1], how(second[0]), second[1])
        assert state.to_json() == before  # the failed round did not change the state
        replay_round(rules, state, fragments[1], *second)  # the original entry still fits


def test_a_loss_of_nan_on_both_sides_is_no_difference() -> None:
    run, merger = served_run(store=Shelf())
    run.live("a")
    run.send("a", 1, values(1), loss=float("nan"))
    merger.turn(0.0)
    assert replayed(run, recorded(run))[0].closed == 1


def test_other_beginnings_rounds_and_contributions_are_differences() -> None:
    run = four_rounds()
    rules, state, fragments = beginning(run)
    first, _, third, _ = rounds = recorded(run)
    entry, (one, other) = first
    moved = new_state(np.asarray(fragments[0].params_N) + np.float32(1e-3), rules.outer)
    with failing(DifferenceError, "replay.difference"):
        replay_round(rules, state, moved, *first)
    for again in (first, third):
        with failing(DifferenceError, "replay.round"):
            replayed(run, [first, again])
    with failing(DifferenceError, "replay.difference"):
        replayed(run, [(entry, [other])])
    gone = replace(one, contribution=None, fault="it is gone")
    for wrong in (replace(one, payload=other.payload), gone):
        with failing(DifferenceError, "replay.contribution"):
            replayed(run, [(entry, [wrong, other])])
    assert replayed(run, rounds)[0].closed == 4
