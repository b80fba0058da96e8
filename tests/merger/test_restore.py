"""State that Redis has lost is rebuilt bit for bit from a checkpoint, the tape and the kept entries."""

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
from archipelago.merger.beside import at_once
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.failing import failing
from tests.intercept import Intercepted
from tests.harness.merger_run import (
    CONFIG,
    SIZE,
    MergerRun,
    Shelf,
    bits,
    constant,
    logged_codes,
    state_of,
    values,
)
from tests.tiers import examples

ROUNDED = replace(CONFIG, wire=WireConfig(down="bfloat16"))
ISOTROPIC = replace(CONFIG, merge=replace(CONFIG.merge, embedding="isotropic", rest="isotropic"))


def stored_run(run: MergerRun) -> MemoryRun:
    return run.broker.runs["sample"]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def small_outer() -> bytes:
    """Return an undamaged outer state of a smaller fragment."""
    rule = outer.build(CONFIG.outer)
    return outer.dump(constant(0.0, SIZE - 1), rule.init(constant(0.0, SIZE - 1)))


def state_without_closed(stored: MemoryRun) -> None:
    values = json.loads(stored.state)
    del values["closed"]
    stored.state = json.dumps(values)


DAMAGE: dict[str, Callable[[MemoryRun], object]] = {
    "one outer state missing": lambda stored: stored.outer.pop(1),
    "all outer states missing": lambda stored: stored.outer.clear(),
    "an outer state damaged": lambda stored: stored.outer.update({0: flip(stored.outer[0])}),
    "an outer state of another size": lambda stored: stored.outer.update({0: small_outer()}),
    "an outer state cut short": lambda stored: stored.outer.update({0: b"ARO1"}),
    "state missing": lambda stored: setattr(stored, "state", ""),
    "state damaged": lambda stored: setattr(stored, "state", stored.state[:-5]),
    "state incomplete": state_without_closed,
    "everything missing": lambda stored: stored.__dict__.update(outer={}, state=""),
}


def begun(config: RunConfig, store: CheckpointStore) -> tuple[MergerRun, Merger]:
    """Run seven rounds, and take a checkpoint of the first three."""
    run = MergerRun(config, quorum=2)
    merger = run.merger(checkpointer=run.checkpointer(store))
    run.play(merger, 1, 2, 3)
    merger.checkpoint()
    run.play(merger, 4, 5, 6, 7)
    assert run.transport.reader.books().kept == 8
    return run, merger


def undisturbed(config: RunConfig) -> list[Any]:
    run, merger = begun(config, Shelf())
    run.play(merger, 8, 9, 10)
    return bits(run)


def test_the_lease_can_be_renewed_between_the_downloads_of_two_fragments() -> None:
    """The downloads of a large model take longer than a lease."""
    run, _ = begun(CONFIG, Shelf())
    calls: list[str] = []

    class Watched(Intercepted):
        def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls.extend(["download"] * (name == "fragment"))
            return super().intercept(name, method, *args, **kwargs)

    manifest = run.transport.reader.manifest()
    load(Watched(run.transport), RoundMerge.of(manifest), None, lambda: calls.append("between"))
    assert calls.count("download") == len(manifest.fragments) > 1
    assert "download download" not in " ".join(calls)


@pytest.mark.parametrize("config", [CONFIG, ROUNDED, ISOTROPIC], ids=["exact", "rounded", "isotropic"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_lost_state_is_rebuilt_to_the_same_bits(
    damage: str, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shelf()
    run, _ = begun(config, store)
    DAMAGE[damage](stored_run(run))
    merger = run.merger(checkpointer=run.checkpointer(store))
    assert "restore.rebuilt" in logged_codes(caplog)
    run.play(merger, 8, 9, 10)
    assert bits(run) == undisturbed(config)
    run.balance()


@pytest.mark.parametrize("damage", ["state missing", "everything missing"])
def test_entries_that_a_complete_checkpoint_covers_leave_the_stream(damage: str) -> None:
    store = Shelf()
    run = MergerRun(CONFIG, quorum=2)
    first = run.merger(checkpointer=run.checkpointer(store))
    run.play(first, 1, 2, 3)
    first.checkpoint()  # the merger dies before the turn in which it would trim
    DAMAGE[damage](stored_run(run))
    second = run.merger(checkpointer=run.checkpointer(store))
    assert run.transport.reader.books().kept == 0
    run.play(second, 4)
    run.balance()


def test_lost_state_is_rebuilt_from_a_folder(tmp_path: Path) -> None:
    run, _ = begun(CONFIG, MergerFolder(tmp_path).store)
    DAMAGE["everything missing"](stored_run(run))
    folder = MergerFolder(tmp_path)
    merger = run.merger(checkpointer=folder.checkpointer(run.broker.connect("sample"), run.manifest, 1e9, at_once))
    run.play(merger, 8, 9, 10)
    assert bits(run) == undisturbed(CONFIG)


def test_nothing_is_rebuilt_when_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Untouched(Shelf):
        def load(self, number: int | None = None) -> None:
            pytest.fail("the merger reads a checkpoint that it does not need")

    store = Untouched()
    run, _ = begun(CONFIG, store)
    merger = run.merger(checkpointer=run.checkpointer(store))
    assert not caplog.records
    run.play(merger, 8, 9, 10)
    assert bits(run) == undisturbed(CONFIG)


SCRIPT = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(0, 2)), min_size=1, max_size=14)


@settings(max_examples=examples(40))
@given(SCRIPT, st.integers(0, 14), st.integers(0, 14), st.sampled_from(["none", "outer", "state", "both"]))
def test_a_loss_at_any_time_after_a_checkpoint_changes_no_bit(
    script: list[tuple[str, int, int]], checkpoint: int, loss: int, what: str
) -> None:
    assert played(script, checkpoint, loss, what) == played(script, checkpoint, loss, "")


def played(script: list[tuple[str, int, int]], checkpoint: int, loss: int, what: str) -> list[Any]:
    """Lose `what` once there is a checkpoint, and let another merger take over. Lose nothing if it is empty."""
    store = Shelf()
    run = MergerRun(quorum=2)
    run.live("a", "b", "c")
    merger = run.merger(checkpointer=run.checkpointer(store))
    for index, (island, ahead, behind) in enumerate(script):
        if index >= checkpoint and merger.state.closed and not store.images:
            merger.checkpoint()
        if index == max(loss, checkpoint) and store.images and what:
            stored_run(run).outer |= {p: b"" for p in stored_run(run).outer if what in ("outer", "both")}
            stored_run(run).state = "" if what in ("state", "both") else stored_run(run).state
            merger = run.merger(checkpointer=run.checkpointer(store))
        number = merger.rounds.closed + ahead
        base = max(0, run.version((number - 1) % 2) - behind)
        run.send(island, number, values(index), tokens=100 + index, base=base)
        merger.turn(0.0)
    run.live("a", "b", "c", state="left")
    merger.turn(0.0)
    run.balance()
    out = bits(run)
    # Compare the merger's memory, because Redis has a fragment's outer state again only after its next round.
    out[2] = [outer.dump(fragment.params_N, fragment.outer) for fragment in merger.fragments]
    return out


# -- state that Redis still has is newer than the checkpoint's -------------------------------------------------------


def test_refusals_are_remembered_if_the_state_is_not_lost() -> None:
    store = Shelf()
    run, merger = begun(CONFIG, store)
    run.send("a", 8, constant(float("nan")))
    refused = run.sent[-1][0]
    run.play(merger, 8)
    stored_run(run).outer.clear()
    again = run.merger(checkpointer=run.checkpointer(store))
    assert again.state.has_seen(refused.identity)
    assert again.state.timing == RunState.from_json(run.transport.reader.merger_state()).timing


def test_kept_entries_stay_in_the_stream_after_a_restore() -> None:
    """A second loss needs these entries, and the checkpoint after that trims them."""
    store = Shelf()
    run, _ = begun(CONFIG, store)
    DAMAGE["everything missing"](stored_run(run))
    merger = run.merger(checkpointer=run.checkpointer(store))
    assert run.transport.reader.books().kept == 8
    assert [kept.round for kept in merger.retention.kept] == [4, 5, 6, 7]
    DAMAGE["everything missing"](stored_run(run))
    merger = run.merger(checkpointer=run.checkpointer(store))
    run.play(merger, 8, 9, 10)
    assert bits(run) == undisturbed(CONFIG)
    merger.finish()
    assert run.transport.reader.books().kept == 0


def test_a_restart_has_the_published_parameters_bit_for_bit() -> None:
    """Snapshots are rounded, and the next round may be empty, or a checkpoint may come before it."""
    run = MergerRun(ROUNDED, quorum=2)
    store = Shelf()
    run.play(run.merger(checkpointer=run.checkpointer(store)), 1, 2, 3)
    merger = run.merger(checkpointer=run.checkpointer(store))
    merger.finish()
    assert list(store.images) == [3]
    run.live("a", "b", state="left")
    run.send("a", 5, values(1), farewell=True)
    merger.turn(0.0)
    second, _, empty, _ = run.transport.reader.tape(4)
    assert (second.round, empty.round, empty.members) == (2, 4, ())
    assert empty.digest == second.digest
    for entry in run.transport.reader.tape(2):
        assert entry.digest == digest_of(unpack(run.transport.reader.fragment(entry.fragment)[1], SIZE))


# -- losses that cannot be restored ----------------------------------------------------------------------------------


def loaded(run: MergerRun, store: CheckpointStore | None) -> Merger:
    return run.merger(checkpointer=run.checkpointer(store) if store else None)


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_without_a_checkpoint_the_run_continues_with_fresh_momentum(
    store: Shelf | None, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = begun(CONFIG, Shelf())
    whole = stored_run(run).outer[0]
    published = run.parameters(1)
    del stored_run(run).outer[1]
    merger = loaded(run, store)
    assert logged_codes(caplog) == ["restore.lost", "restore.fresh"]
    kept, fresh = merger.fragments
    assert outer.dump(kept.params_N, kept.outer) == whole
    assert fresh.params_N.tolist() == published
    assert all(not leaf.any() for leaf in outer._named_state(fresh.outer).values())
    assert [f.norms for f in merger.fragments] == [state_of(run).norms[p] for p in range(2)]
    run.play(merger, 8, 9, 10)
    run.balance()


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_without_a_checkpoint_a_lost_state_is_an_error(store: Shelf | None) -> None:
    run, _ = begun(CONFIG, Shelf())
    stored_run(run).state = ""
    before = run.digests()
    with failing(ConfigError, "config.lost-state"):
        loaded(run, store)
    assert run.digests() == before


@pytest.mark.parametrize("store", [None, Shelf()], ids=["no folder", "no checkpoint"])
def test_a_state_of_another_version_is_an_error(store: Shelf | None) -> None:
    run, _ = begun(CONFIG, Shelf())
    older = json.loads(stored_run(run).state)
    for added in ("cursors", "step_seconds", "island_tokens", "covered"):
        del older[added]
    stored_run(run).state = json.dumps(older)
    with failing(ConfigError, "config.merger-state"):
        loaded(run, store)


def test_missing_entries_are_logged_as_a_difference(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    run, merger = begun(CONFIG, store)
    (entry,) = [entry for entry in run.transport.reader.tape(100) if entry.round == 5]
    merger.transport.merger.trim(merger.epoch, [entry.members[1].entry])
    stored_run(run).outer.clear()
    run.merger(checkpointer=run.checkpointer(store))
    assert logged_codes(caplog)[-2:] == ["replay.contribution", "restore.fresh"]
    stored_run(run).state = ""
    with failing(ConfigError, "config.lost-state"):
        run.merger(checkpointer=run.checkpointer(store))


def test_a_gap_in_the_tape_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    run, _ = begun(CONFIG, store)
    stored_run(run).outer.clear()
    del stored_run(run).tape[4]
    run.merger(checkpointer=run.checkpointer(store))
    assert "replay.round" in logged_codes(caplog)


def test_a_tape_that_ends_early_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The last round is empty, so the parameters alone do not show that it is missing."""
    store = Shelf()
    run, merger = begun(CONFIG, store)
    run.live("a", "b", state="left")
    run.send("a", 9, values(1), farewell=True)
    merger.turn(0.0)
    assert [len(entry.members) for entry in run.transport.reader.tape(2)] == [0, 1]
    stored_run(run).tape[-2:] = stored_run(run).tape[-1:]  # a gap, first
    stored_run(run).outer.clear()
    run.merger(checkpointer=run.checkpointer(store))
    assert "replay.round" in logged_codes(caplog)
    del stored_run(run).tape[-1:]
    stored_run(run).outer.clear()
    caplog.clear()
    run.merger(checkpointer=run.checkpointer(store))
    assert "replay.published" in logged_codes(caplog)


def test_rebuilt_parameters_that_were_not_published_are_rejected(caplog: pytest.LogCaptureFixture) -> None:
    store = Shelf()
    run, _ = begun(CONFIG, store)
    _, *others = store.images[3].snapshots
    other = samples.first_snapshots(run.manifest, 0.125)[0]
    store.images[3] = replace(store.images[3], snapshots=[other, *others], outers=[b"", b""])
    stored_run(run).outer.clear()
    run.merger(checkpointer=run.checkpointer(store))
    assert any(code.startswith("replay.") for code in logged_codes(caplog))


def test_a_checkpoint_of_rounds_that_redis_has_lost_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Redis was restarted and has lost its last second. The checkpoint holds rounds that Redis does not have."""
    store = Shelf()
    run = MergerRun(quorum=2)
    merger = run.merger(checkpointer=run.checkpointer(store))
    run.play(merger, 1, 2)
    stored = stored_run(run)
    earlier = (dict(stored.fragments), dict(stored.outer), stored.state, list(stored.tape))
    run.play(merger, 3)
    merger.checkpoint()
    stored.fragments, stored.outer, stored.state, stored.tape = earlier
    stored.outer.clear()
    merger = run.merger(checkpointer=run.checkpointer(store))
    assert any(code.startswith("replay.") for code in logged_codes(caplog))
    assert merger.state.closed == 2


@pytest.mark.parametrize("lost", ["outer", "state"])
def test_a_checkpoint_of_another_run_is_not_used(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    store, strange = Shelf(), Shelf()
    run, _ = begun(CONFIG, store)
    other = replace(run.manifest, config=replace(CONFIG, seed=7))
    strange.images[3] = replace(store.images[3], manifest=other)
    setattr(stored_run(run), lost, {} if lost == "outer" else "")
    if lost == "outer":
        assert run.merger(checkpointer=run.checkpointer(strange)).state.closed == 7
    else:
        with failing(ConfigError, "config.lost-state"):
            run.merger(checkpointer=run.checkpointer(strange))
    assert "wire.other-run" in logged_codes(caplog)


def test_unreadable_checkpoints_do_not_end_a_run_that_can_continue(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Shelf):
        def load(self, number: int | None = None) -> None:
            raise ConfigError("no checkpoint in here can be read", "Put back a copy.")

    run, _ = begun(CONFIG, Shelf())
    stored_run(run).outer.clear()
    run.play(run.merger(checkpointer=run.checkpointer(Broken())), 8)
    assert "config" in logged_codes(caplog)
    stored_run(run).state = ""
    with failing(ConfigError, "config.lost-state"):
        run.merger(checkpointer=run.checkpointer(Broken()))


def test_the_lease_is_renewed_while_the_run_is_loaded() -> None:
    run, _ = begun(CONFIG, Shelf())
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1

    from archipelago.merger.restore import load
    from archipelago.merger.round_merge import RoundMerge

    load(run.transport, RoundMerge.of(run.manifest), None, between)
    assert asked == 2  # once for each fragment


def test_a_run_without_rounds_is_loaded_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = MergerRun()
    merger = run.merger(checkpointer=run.checkpointer(Shelf()))
    assert (merger.state, run.events(Snapshot)) == (RunState(), [])
    assert not caplog.records
