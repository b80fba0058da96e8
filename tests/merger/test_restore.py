"""Replays have the same bits, and state that Redis has lost is rebuilt bit for bit from checkpoint and tape."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.broker.buckets.folder import BucketFolder
from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.errors import ConfigError, FencedError
from archipelago.broker.full_state import joined
from archipelago.broker.memory.state import MemoryRun
from archipelago.broker.messages import Resume, TapeEntry
from archipelago.merger import committing, outer
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.executor import in_background
from archipelago.merger.replay import DifferenceError, replay_round
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState
from archipelago.merger.storage import MergerFolder
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.harness.merger_run import (
    CONFIG,
    ISOTROPIC,
    SIZE,
    MergerRun,
    Shelf,
    beginning,
    bits,
    constant,
    logged_codes,
    outer_states,
    recorded,
    replayed,
    served_run,
    state_of,
    take_checkpoint,
    values,
)
from tests.harness.played import started

ROUNDED = replace(CONFIG, wire=WireConfig(down="bfloat16"))


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def small_outer() -> bytes:
    """Return an undamaged outer state of a smaller fragment."""
    rule = outer.build(CONFIG.outer)
    return joined(outer.named(constant(0.0, SIZE - 1), rule.init(constant(0.0, SIZE - 1))))


def state_without_closed(stored: MemoryRun) -> None:
    values = json.loads(stored.state)
    del values["closed"]
    stored.state = json.dumps(values)


DAMAGE: dict[str, Callable[[MemoryRun], object]] = {
    "one outer state missing": lambda stored: stored.outer.pop(1),
    "all outer states missing": lambda stored: stored.outer.clear(),
    "an outer state of another size": lambda stored: stored.outer.update({0: small_outer()}),
    "an outer state cut short": lambda stored: stored.outer.update({0: stored.outer[0][:-1]}),
    "state missing": lambda stored: setattr(stored, "state", ""),
    "state damaged": lambda stored: setattr(stored, "state", stored.state[:-5]),
    "state incomplete": state_without_closed,
    "everything missing": lambda stored: stored.__dict__.update(outer={}, state=""),
}


def begun(config: RunConfig, store: CheckpointStore) -> tuple[MergerRun, Merger]:
    """Run seven rounds, and take a checkpoint of the first three."""
    run, merger = served_run(config, quorum=2, store=store)
    run.play(merger, 1, 2, 3)
    take_checkpoint(merger)
    run.play(merger, 4, 5, 6, 7)
    assert len(run.stored.kept) == 8
    return run, merger


@cache
def undisturbed(config: RunConfig) -> list[Any]:
    run, merger = begun(config, Shelf())
    run.play(merger, 8, 9, 10)
    return bits(run)


def test_the_lease_is_renewed_while_a_run_is_restored(until: Until) -> None:
    """What is downloaded and uploaded for a large model takes longer than a lease."""
    store, calls = Shelf(), list[str]()
    run, _ = begun(CONFIG, store)
    DAMAGE["all outer states missing"](run.stored)

    def note(name: str, *_: object) -> None:
        calls.append(name)
        if name in ("fragment", "rewrite"):
            before = calls.count("renew")
            run.clock.now += merger.lease_seconds / 2
            until(lambda: calls.count("renew") > before, f"a renewal during {name}")

    merger = run.idle_merger(store=store, transport=run.faulty(before=note), executor=in_background)
    started(merger)
    assert "rewrite" in calls


def test_a_load_that_was_given_up_ends() -> None:
    run, _ = begun(CONFIG, Shelf())
    downloads: list[str] = []

    def given_up() -> None:
        raise FencedError("another epoch")

    transport = run.faulty(before=lambda name, *_: downloads.extend([name] * (name == "fragment")))
    with pytest.raises(FencedError):
        load(transport, RoundMerge.of(run.manifest), None, given_up)
    assert len(downloads) == 1, "the second fragment is not read"


def test_lost_state_is_rebuilt_to_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    all_lost = "everything missing"
    for damage, config in [*((damage, CONFIG) for damage in DAMAGE), (all_lost, ROUNDED), (all_lost, ISOTROPIC)]:
        store = Shelf()
        run, _ = begun(config, store)
        DAMAGE[damage](run.stored)
        caplog.clear()
        merger = run.merger(store=store)
        assert "restore.rebuilt" in logged_codes(caplog), damage
        run.play(merger, 8, 9, 10)
        assert bits(run) == undisturbed(config), damage
        run.balance()


def test_what_a_checkpoint_covers_is_deleted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "TRIMMED_MAX", 3)
    run, sizes = MergerRun(CONFIG, quorum=2), list[int]()

    def note(name: str, *args: Any) -> None:
        if name == "trim":
            sizes.append(len(args[1]))

    merger = run.merger(transport=run.faulty(before=note), store=Shelf())
    run.play(merger, 1, 2, 3, 4, 5, 6)
    take_checkpoint(merger)
    merger.turn(0.0)
    assert sizes == [4, 4, 4]
    assert not run.stored.kept


def test_a_short_tape_is_read_once_and_entries_of_no_fragment_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = begun(CONFIG, store := Shelf())
    del run.stored.tape[:5]
    run.stored.tape.insert(0, replace(run.stored.tape[0], fragment=7))
    calls: list[str] = []
    load(run.faulty(before=lambda name, *_: calls.append(name)), RoundMerge.of(run.manifest), store)
    assert calls.count("tape") == 2
    run.stored.state = ""
    run.play(run.merger(store=store), 4)
    assert "restore.rebuilt" in logged_codes(caplog)


def test_nothing_is_rebuilt_when_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Untouched(Shelf):
        def load(self, number: int | None = None) -> None:
            pytest.fail("the merger reads a checkpoint that it does not need")

    store = Untouched()
    run, _ = begun(CONFIG, store)
    merger = run.merger(store=store)
    assert not caplog.records
    run.play(merger, 8, 9, 10)
    assert bits(run) == undisturbed(CONFIG)


def test_a_redis_that_came_back_older_than_a_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlisted() -> list[int]:
        raise ConfigError("the folder cannot be listed", "", code="checkpoint.unreadable")

    store = CheckpointStore(tmp_path / "checkpoints")
    run, merger = served_run(CONFIG, quorum=2, store=store)
    run.play(merger, 1, 2, 3)
    older = copy.deepcopy(vars(run.stored))
    run.play(merger, 4, 5)
    take_checkpoint(merger)
    assert (store.after(3), store.after(5), store.about()["run"]) == ({5: 5}, {}, run.manifest.run)
    run.merger(store=store)
    assert "restore.older" not in logged_codes(caplog)
    vars(run.stored).update(older)
    merger = run.merger(store=store)
    assert merger.state.closed == 3
    assert "restore.older" in logged_codes(caplog)
    caplog.clear()
    arrays = (store.path_of(5) / "published").rename(tmp_path / "elsewhere")
    merger = run.merger(store=store)
    assert "restore.older" not in logged_codes(caplog), "nothing can go on from it"
    arrays.rename(store.path_of(5) / "published")
    for _ in range(4):
        take_checkpoint(merger)
    assert store.numbers() == [5, 7, 8, 9], "that of later rounds stays"
    again = MergerFolder(tmp_path, bucket=BucketFolder(f"file://{tmp_path}/bucket"))
    assert again._copier(run.manifest)._besides() == [5], "a bucket keeps it, also after a restart"
    assert run.merger(store=store).has_served
    assert "restore.older" not in logged_codes(caplog), "the newest checkpoint is of here, as after going back to one"
    monkeypatch.setattr(store, "numbers", unlisted)
    caplog.clear()
    assert run.merger(store=store).state.closed == 3, "Redis is whole, although the folder cannot be listed"
    assert "restore.lost" not in logged_codes(caplog)


# -- losses that cannot be restored ----------------------------------------------------------------------------------


STORES = (None, Shelf())  # no folder, and one without a checkpoint


def test_without_a_checkpoint_damage_is_one_error_that_changes_nothing() -> None:
    for store in STORES:
        for damage in DAMAGE.values():
            run, _ = begun(CONFIG, Shelf())
            damage(run.stored)
            before = run.digests(), run.stored.state, dict(run.stored.outer)
            with failing(ConfigError, "config.lost-state"):
                run.merger(store=store)
            assert (run.digests(), run.stored.state, run.stored.outer) == before


def test_a_run_goes_back_as_far_as_the_tape_has_gaps(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is of round 3. Islands find the versions of the round to which the run went back."""
    for lost, closed in (("the sixth round", 5), ("all contributions", 3)):
        store = Shelf()
        run, _ = begun(CONFIG, store)
        run.stored.outer.clear()
        run.stored.tape.pop(5) if closed == 5 else run.stored.kept.clear()
        caplog.clear()
        merger = run.merger(store=store)
        assert logged_codes(caplog) == ["restore.lost", "restore.tape", "restore.rebuilt"], lost
        assert merger.state.closed == run.transport.reader.tape(1)[0].round == closed
        assert [run.version(p) for p in range(2)] == [run.manifest.version_at(closed, p) for p in range(2)]
        assert run.events(Resume)[-1].round == closed
        run.play(merger, closed + 1, closed + 2)
        again = run.merger()
        assert memory_of(again) == memory_of(merger)


def memory_of(merger: Merger) -> list[Any]:
    return [(samples.outer_bits(f), np.asarray(f.published_N).tobytes()) for f in merger.fragments.values()]


class Broken(Shelf):
    """A folder whose checkpoints cannot be read."""

    def load(self, number: int | None = None) -> None:
        raise ConfigError("no checkpoint in here can be read", "Put back a copy.")


def test_checkpoints_that_cannot_be_read_or_are_of_another_run_are_not_used() -> None:
    strange = Shelf()
    run, _ = begun(CONFIG, strange)
    other = replace(run.manifest, config=replace(CONFIG, seed=7))
    strange.images[3] = replace(strange.images[3], manifest=other)
    for store in (strange, Broken()):
        run, _ = begun(CONFIG, Shelf())
        run.stored.outer.clear()
        with failing(ConfigError, "config.lost-state"):
            run.merger(store=store)


@pytest.mark.parametrize("left", ["{", ""])
def test_refusals_outlive_a_damaged_state(left: str) -> None:
    """Those before the first round, too, when an empty state looks like that of the checkpoint or of a new run."""
    store = Shelf()
    run, merger = served_run(CONFIG, store=store)
    take_checkpoint(merger)
    run.send("a", 1, values(1), steps=1, tokens=10**9)
    merger.turn(0.0)
    run.stored.state = left
    run.merger(store=store)
    run.send("a", 1, values(1), steps=1, tokens=10**9)
    run.merger(store=store).turn(0.0)
    assert run.transport.reader.counters().refused == 2


def test_what_another_merger_writes_while_one_loads_is_no_damage() -> None:
    """The first one was stopped between two reads, and loses its lease."""
    run = MergerRun(quorum=2)

    def take_over(name: str, *_: object) -> None:
        if name == "merger_state" and run.stored.epoch[1] == "slow":
            run.stored.lease = ("", float("-inf"))
            run.play(run.merger("fast"), 1, 2)

    slow = run.idle_merger("slow", transport=run.faulty(before=take_over))
    assert slow.acquire()
    with pytest.raises(FencedError):
        slow.load()


# -- replays -----------------------------------------------------------------------------------------------------------


@cache
def four_rounds(config: RunConfig = CONFIG) -> MergerRun:
    run = MergerRun(config, quorum=2)
    run.play(run.merger(store=Shelf()), 1, 2, 3, 4)
    return run


@pytest.mark.parametrize("config", [ROUNDED, ISOTROPIC], ids=["rounded", "isotropic"])
def test_a_replay_has_the_same_bits(config: RunConfig) -> None:
    run = four_rounds(config)
    state, fragments = replayed(run, recorded(run))
    assert [samples.outer_bits(f) for f in fragments] == outer_states(run)
    assert replace(state, timing=state_of(run).timing) == state_of(run)


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


def test_a_round_that_cannot_be_replayed_changes_no_setting() -> None:
    """A shard that is restored goes on from there, and the tape names each change of a setting."""
    run = four_rounds()
    rules, state, fragments = beginning(run)
    (entry, _), *_ = recorded(run)
    with failing(DifferenceError, "replay.difference"):
        replay_round(rules, state, fragments[0], replace(entry, steered="outer.learning_rate=0.25"), [])
    assert state == RunState()
