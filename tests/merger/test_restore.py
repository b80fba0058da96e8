"""What Redis has lost of a merger's memory comes back from a checkpoint, the tape and the kept entries: to the bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.memory.state import MemoryRun
from archipelago.broker.messages import Snapshot
from archipelago.broker.wire import digest_of, unpack
from archipelago.merger import outer
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.checkpointer import at_once
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.failing import failing
from tests.merger.simulated_broker import (
    CONFIG,
    SIZE,
    Shelf,
    SimulatedBroker,
    bits,
    constant,
    logged_codes,
    state_of,
    values,
)
from tests.tiers import examples

ROUNDED = replace(CONFIG, wire=WireConfig(down="bfloat16"))


def run_of(simulated: SimulatedBroker) -> MemoryRun:
    return simulated.broker.runs["sample"]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def small_outer() -> bytes:
    """Whole, and of a smaller fragment."""
    rule = outer.build(CONFIG.outer)
    return outer.dump(constant(0.0, SIZE - 1), rule.init(constant(0.0, SIZE - 1)))


def state_without_closed(run: MemoryRun) -> None:
    values = json.loads(run.state)
    del values["closed"]
    run.state = json.dumps(values)


DAMAGE: dict[str, Callable[[MemoryRun], object]] = {
    "one outer state gone": lambda run: run.outer.pop(1),
    "all outer states gone": lambda run: run.outer.clear(),
    "an outer state damaged": lambda run: run.outer.update({0: flip(run.outer[0])}),
    "an outer state of another size": lambda run: run.outer.update({0: small_outer()}),
    "an outer state cut short": lambda run: run.outer.update({0: b"ARO1"}),
    "state gone": lambda run: setattr(run, "state", ""),
    "state damaged": lambda run: setattr(run, "state", run.state[:-5]),
    "state incomplete": state_without_closed,
    "all of it gone": lambda run: run.__dict__.update(outer={}, state=""),
}


def begun(config: RunConfig, store: CheckpointStore) -> tuple[SimulatedBroker, Merger]:
    """Seven rounds, and a checkpoint of three of them."""
    simulated = SimulatedBroker(config, quorum=2)
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    simulated.play(merger, 1, 2, 3)
    merger.checkpoint()
    simulated.play(merger, 4, 5, 6, 7)
    assert simulated.transport.reader.books().kept == 8
    return simulated, merger


def undisturbed(config: RunConfig) -> list[Any]:
    simulated, merger = begun(config, Shelf())
    simulated.play(merger, 8, 9, 10)
    return bits(simulated)


@pytest.mark.parametrize("config", [CONFIG, ROUNDED], ids=["exact", "rounded"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_lost_state_is_rebuilt_to_the_same_bits(
    damage: str, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shelf()
    simulated, _ = begun(config, store)
    DAMAGE[damage](run_of(simulated))
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert "restore.rebuilt" in logged_codes(caplog)
    simulated.play(merger, 8, 9, 10)
    assert bits(simulated) == undisturbed(config)
    simulated.balance()


@pytest.mark.parametrize("damage", ["state gone", "all of it gone"])
def test_entries_that_a_complete_checkpoint_covers_leave_the_stream(damage: str) -> None:
    store = Shelf()
    simulated = SimulatedBroker(CONFIG, quorum=2)
    first = simulated.merger(checkpointer=simulated.checkpointer(store))
    simulated.play(first, 1, 2, 3)
    first.checkpoint()  # it dies before the turn in which it would trim
    DAMAGE[damage](run_of(simulated))
    second = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert simulated.transport.reader.books().kept == 0
    simulated.play(second, 4)
    simulated.balance()


def test_lost_state_is_rebuilt_from_a_folder(tmp_path: Path) -> None:
    simulated, _ = begun(CONFIG, MergerFolder(tmp_path).store)
    DAMAGE["all of it gone"](run_of(simulated))
    folder = MergerFolder(tmp_path)
    merger = simulated.merger(
        checkpointer=folder.checkpointer(simulated.broker.connect("sample"), simulated.manifest, 1e9, at_once)
    )
    simulated.play(merger, 8, 9, 10)
    assert bits(simulated) == undisturbed(CONFIG)


def test_nothing_is_rebuilt_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Untouched(Shelf):
        def load(self, number: int | None = None) -> None:
            pytest.fail("it reads a checkpoint that it does not need")

    store = Untouched()
    simulated, _ = begun(CONFIG, store)
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert not caplog.records
    simulated.play(merger, 8, 9, 10)
    assert bits(simulated) == undisturbed(CONFIG)


SCRIPT = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(0, 2)), min_size=1, max_size=14)


@settings(max_examples=examples(40))
@given(SCRIPT, st.integers(0, 14), st.integers(0, 14), st.sampled_from(["none", "outer", "state", "both"]))
def test_a_loss_at_any_time_after_a_checkpoint_at_any_time(
    script: list[tuple[str, int, int]], checkpoint: int, loss: int, what: str
) -> None:
    assert played(script, checkpoint, loss, what) == played(script, checkpoint, loss, "")


def played(script: list[tuple[str, int, int]], checkpoint: int, loss: int, what: str) -> list[Any]:
    """`what` is lost, and another merger takes over, once there is a checkpoint; empty: nobody dies."""
    store = Shelf()
    simulated = SimulatedBroker(quorum=2)
    simulated.live("a", "b", "c")
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    for index, (island, ahead, behind) in enumerate(script):
        if index >= checkpoint and merger.state.closed and not store.images:
            merger.checkpoint()
        if index == max(loss, checkpoint) and store.images and what:
            run_of(simulated).outer |= {p: b"" for p in run_of(simulated).outer if what in ("outer", "both")}
            run_of(simulated).state = "" if what in ("state", "both") else run_of(simulated).state
            merger = simulated.merger(checkpointer=simulated.checkpointer(store))
        number = merger.rounds.closed + ahead
        base = max(0, simulated.version((number - 1) % 2) - behind)
        simulated.send(island, number, values(index), tokens=100 + index, base=base)
        merger.turn(0.0)
    simulated.live("a", "b", "c", state="left")
    merger.turn(0.0)
    simulated.balance()
    out = bits(simulated)
    # As the merger has it: what Redis lost of a fragment is there again with the fragment's next round.
    out[2] = [outer.dump(fragment.params_N, fragment.outer) for fragment in merger.fragments]
    return out


# -- what Redis still knows is not taken from an older checkpoint ----------------------------------------------------


def test_refusals_are_remembered_if_the_state_is_not_lost() -> None:
    store = Shelf()
    simulated, merger = begun(CONFIG, store)
    simulated.send("a", 8, constant(float("nan")))
    refused = simulated.sent[-1][0]
    simulated.play(merger, 8)
    run_of(simulated).outer.clear()
    again = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert again.state.has_seen(refused.identity)
    assert again.state.timing == RunState.from_json(simulated.transport.reader.merger_state()).timing


def test_kept_entries_stay_kept_after_it_came_back() -> None:
    """Another loss must find them, and the checkpoint after that lets them go."""
    store = Shelf()
    simulated, _ = begun(CONFIG, store)
    DAMAGE["all of it gone"](run_of(simulated))
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert simulated.transport.reader.books().kept == 8
    assert [kept.round for kept in merger.retention.kept] == [4, 5, 6, 7]
    DAMAGE["all of it gone"](run_of(simulated))
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    simulated.play(merger, 8, 9, 10)
    assert bits(simulated) == undisturbed(CONFIG)
    merger.finish()
    assert simulated.transport.reader.books().kept == 0


def test_a_restart_knows_the_published_parameters_to_the_bit() -> None:
    """Also where the codec of snapshots rounds: the next round may merge nothing, or a checkpoint come before it."""
    simulated = SimulatedBroker(ROUNDED, quorum=2)
    store = Shelf()
    simulated.play(simulated.merger(checkpointer=simulated.checkpointer(store)), 1, 2, 3)
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    merger.finish()
    assert list(store.images) == [3]
    simulated.live("a", "b", state="left")
    simulated.send("a", 5, values(1), farewell=True)
    merger.turn(0.0)
    second, _, empty, _ = simulated.transport.reader.tape(4)
    assert (second.round, empty.round, empty.members) == (2, 4, ())
    assert empty.digest == second.digest
    for entry in simulated.transport.reader.tape(2):
        assert entry.digest == digest_of(unpack(simulated.transport.reader.fragment(entry.fragment)[1], SIZE))


# -- where it does not come back -------------------------------------------------------------------------------------


def loaded(simulated: SimulatedBroker, store: CheckpointStore | None) -> Merger:
    return simulated.merger(checkpointer=simulated.checkpointer(store) if store else None)


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_without_a_checkpoint_it_goes_on_with_fresh_momentum(
    store: Shelf | None, caplog: pytest.LogCaptureFixture
) -> None:
    simulated, _ = begun(CONFIG, Shelf())
    whole = run_of(simulated).outer[0]
    published = simulated.parameters(1)
    del run_of(simulated).outer[1]
    merger = loaded(simulated, store)
    assert logged_codes(caplog) == ["restore.lost-outer", "restore.fresh"]
    kept, fresh = merger.fragments
    assert outer.dump(kept.params_N, kept.outer) == whole
    assert fresh.params_N.tolist() == published
    assert all(not leaf.any() for leaf in outer._named_state(fresh.outer).values())
    assert [f.norms for f in merger.fragments] == [state_of(simulated).norms[p] for p in range(2)]
    simulated.play(merger, 8, 9, 10)
    simulated.balance()


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_without_a_checkpoint_a_lost_state_ends_it(store: Shelf | None) -> None:
    simulated, _ = begun(CONFIG, Shelf())
    run_of(simulated).state = ""
    before = simulated.digests()
    with failing(ConfigError, "config.lost-state"):
        loaded(simulated, store)
    assert simulated.digests() == before


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_a_state_of_another_version_is_named_as_that(store: Shelf | None) -> None:
    simulated, _ = begun(CONFIG, Shelf())
    older = json.loads(run_of(simulated).state)
    for added in ("cursors", "step_seconds", "island_tokens", "covered"):
        del older[added]
    run_of(simulated).state = json.dumps(older)
    with failing(ConfigError, "config.merger-state"):
        loaded(simulated, store)


def test_entries_that_are_gone_are_named(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    simulated, merger = begun(CONFIG, store)
    (entry,) = [entry for entry in simulated.transport.reader.tape(100) if entry.round == 5]
    merger.transport.merger.trim(merger.epoch, [entry.members[1].entry])
    run_of(simulated).outer.clear()
    simulated.merger(checkpointer=simulated.checkpointer(store))
    assert logged_codes(caplog)[-2:] == ["replay.contribution", "restore.fresh"]
    run_of(simulated).state = ""
    with failing(ConfigError, "config.lost-state"):
        simulated.merger(checkpointer=simulated.checkpointer(store))


def test_a_gap_in_the_tape_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    simulated, _ = begun(CONFIG, store)
    run_of(simulated).outer.clear()
    del run_of(simulated).tape[4]
    simulated.merger(checkpointer=simulated.checkpointer(store))
    assert "replay.round" in logged_codes(caplog)


def test_a_tape_that_ends_early_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its last round merged nothing, so that the parameters alone would not tell."""
    store = Shelf()
    simulated, merger = begun(CONFIG, store)
    simulated.live("a", "b", state="left")
    simulated.send("a", 9, values(1), farewell=True)
    merger.turn(0.0)
    assert [len(entry.members) for entry in simulated.transport.reader.tape(2)] == [0, 1]
    run_of(simulated).tape[-2:] = run_of(simulated).tape[-1:]  # a gap, first
    run_of(simulated).outer.clear()
    simulated.merger(checkpointer=simulated.checkpointer(store))
    assert "replay.round" in logged_codes(caplog)
    del run_of(simulated).tape[-1:]
    caplog.clear()
    simulated.merger(checkpointer=simulated.checkpointer(store))
    assert "replay.published" in logged_codes(caplog)


def test_parameters_that_the_islands_have_not_seen_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    simulated, _ = begun(CONFIG, store)
    _, *others = store.images[3].snapshots
    other = samples.first_snapshots(simulated.manifest, 0.125)[0]
    store.images[3] = replace(store.images[3], snapshots=[other, *others], outers=[b"", b""])
    run_of(simulated).outer.clear()
    simulated.merger(checkpointer=simulated.checkpointer(store))
    assert any(code.startswith("replay.") for code in logged_codes(caplog))


def test_a_checkpoint_of_rounds_that_redis_forgot_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that died came back without its last second; the checkpoint knows of rounds that never happened."""
    store = Shelf()
    simulated = SimulatedBroker(quorum=2)
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    simulated.play(merger, 1, 2)
    run = run_of(simulated)
    earlier = (dict(run.fragments), dict(run.outer), run.state, list(run.tape))
    simulated.play(merger, 3)
    merger.checkpoint()
    run.fragments, run.outer, run.state, run.tape = earlier
    run.outer.clear()
    merger = simulated.merger(checkpointer=simulated.checkpointer(store))
    assert any(code.startswith("replay.") for code in logged_codes(caplog))
    assert merger.state.closed == 2


@pytest.mark.parametrize("lost", ["outer", "state"])
def test_a_checkpoint_of_another_run_is_not_taken(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    store, strange = Shelf(), Shelf()
    simulated, _ = begun(CONFIG, store)
    other = replace(simulated.manifest, config=replace(CONFIG, seed=7))
    strange.images[3] = replace(store.images[3], manifest=other)
    setattr(run_of(simulated), lost, {} if lost == "outer" else "")
    if lost == "outer":
        assert simulated.merger(checkpointer=simulated.checkpointer(strange)).state.closed == 7
    else:
        with failing(ConfigError, "config.lost-state"):
            simulated.merger(checkpointer=simulated.checkpointer(strange))
    assert "wire.other-run" in logged_codes(caplog)


def test_checkpoints_that_cannot_be_read_do_not_end_a_run_that_can_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Shelf):
        def load(self, number: int | None = None) -> None:
            raise ConfigError("no checkpoint in here can be read", "Put back a copy.")

    simulated, _ = begun(CONFIG, Shelf())
    run_of(simulated).outer.clear()
    simulated.play(simulated.merger(checkpointer=simulated.checkpointer(Broken())), 8)
    assert "config" in logged_codes(caplog)
    run_of(simulated).state = ""
    with failing(ConfigError, "config.lost-state"):
        simulated.merger(checkpointer=simulated.checkpointer(Broken()))


def test_it_keeps_its_lease_while_it_loads() -> None:
    simulated, _ = begun(CONFIG, Shelf())
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1

    from archipelago.merger.restore import load
    from archipelago.merger.round_merge import RoundMerge

    load(simulated.transport, RoundMerge.of(simulated.manifest), None, between)
    assert asked == 2  # once a fragment


def test_a_run_that_has_not_begun_is_loaded_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    simulated = SimulatedBroker()
    merger = simulated.merger(checkpointer=simulated.checkpointer(Shelf()))
    assert (merger.state, simulated.events(Snapshot)) == (RunState(), [])
    assert not caplog.records
