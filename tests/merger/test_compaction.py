"""Small commits, compactions beside the rounds, and restarts that merge the rest again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archipelago.broker.commits import DIFFERENCES_KEPT, Commit, Placed
from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.errors import ConfigError, UnreachableError, WireError
from archipelago.broker.full_state import PARAMETERS, Compaction
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.wire import digest_of, newest
from archipelago.merger import outer, round_merge
from archipelago.merger.committing import (
    IDLE_SECONDS,
    MOST,
    RETRY_SECONDS,
    Compactor,
    Uncovered,
    full_state,
    state_before,
    state_bytes,
)
from archipelago.merger.executor import T, at_once
from archipelago.merger.service import Merger
from tests import samples
from tests.failing import failing
from tests.harness.merger_run import CONFIG, MergerRun, logged_codes, served_run

SMALL = replace(CONFIG, wire=WireConfig(up="float32", thin="int4", down="int8"))
ISOTROPIC = replace(SMALL, merge=replace(SMALL.merge, embedding="isotropic", rest="isotropic"))


def memory(merger: Merger) -> list[Any]:
    """Return the bits of a merger's fragments."""
    return [(samples.outer_bits(f), np.asarray(f.published_N).tobytes()) for f in merger.fragments.values()]


def full_versions(run: MergerRun) -> list[int]:
    return [snapshot.version for snapshot, _ in run.stored.fragments.values()]


@pytest.mark.parametrize("config", [SMALL, ISOTROPIC], ids=["average", "isotropic"])
def test_a_restart_merges_what_no_compaction_covers_to_the_same_bits(config: RunConfig) -> None:
    run, merger = served_run(config, quorum=2)
    for number in range(1, 22):
        run.play(merger, number)
        if number in (1, 2, 5, 12, 21):
            before, merger = memory(merger), run.merger()
            assert (memory(merger), merger.state.closed) == (before, number)
    run.balance()


def test_a_merger_that_rounds_in_another_way_keeps_the_momentum(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, merger = served_run(SMALL, quorum=2)
    run.play(merger, *range(1, 6))
    exact = round_merge.outer_step

    def scaled(factor: float) -> Callable[..., Any]:
        def step(*given: Any) -> Any:
            params_N, state = exact(*given)
            return params_N * factor, state

        return step

    monkeypatch.setattr(round_merge, "outer_step", scaled(1 + 2**-18))
    after = run.merger()
    assert set(logged_codes(caplog)) == {"restore.nearly"}
    for old, new in zip(merger.fragments.values(), after.fragments.values(), strict=True):
        assert np.asarray(new.published_N).tolist() == np.asarray(old.published_N).tolist(), "what the islands hold"
        momentum, kept = (outer.named(fragment.params_N, fragment.outer) for fragment in (old, new))
        for name in momentum.keys() - {PARAMETERS}:
            np.testing.assert_allclose(kept[name], momentum[name], rtol=1e-4)
            assert np.any(momentum[name])
    run.play(after, 6, 7)
    run.balance()

    monkeypatch.setattr(round_merge, "outer_step", scaled(2.0))
    with failing(ConfigError, "config.lost-state"):  # one that merges something else has no right momentum
        run.merger()


def test_compactions_write_fewer_bytes_than_rounds_whose_entries_they_free() -> None:
    run, commits, compactions = MergerRun(SMALL, quorum=2), list[Commit](), list[Compaction]()

    def note(name: str, epoch: object = None, what: Any = None, *_: object) -> None:
        if name in ("commit", "compact"):
            (commits if name == "commit" else compactions).append(what)

    merger, most = run.merger(transport=run.faulty(before=note)), 0
    for number in range(1, 61):
        run.play(merger, number)
        needed = {
            m.entry
            for entry in run.transport.reader.tape(100)
            if entry.version > run.stored.fragments[entry.fragment][0].version
            for m in entry.members
        }
        assert set(run.stored.kept) == needed
        assert commits[-1].uncovered == number - min(snapshot.round for snapshot, _ in run.stored.fragments.values())
        most = max(most, len(needed))
    assert 4 < most < 40
    run.stored.kept["a/1-0"] = next(iter(run.stored.kept.values()))  # of a round that the tape has lost
    again = run.merger()
    assert again.compactor.fragments == merger.compactor.fragments
    assert {member.entry for entry in again.compactor.kept for member in entry.members} == set(run.stored.kept)
    assert not any(commit.compaction for commit in commits)
    small = sum(entry.bytes_up for entry in run.transport.reader.tape(100)) + sum(len(c.difference) for c in commits)
    assert len(compactions) > 2
    assert sum(len(c.payload) + len(c.outer) for c in compactions) < 1.5 * small  # of 32 elements, headers are a third
    assert sum(state_bytes(merger.fragments[c.snapshot.fragment]) for c in compactions) <= small


def slow(run: MergerRun, spawn: Any) -> Merger:
    """Return a merger whose compactions are uploaded by `spawn`."""

    def executor(kind: str, threads: int = 1) -> Spawn:
        return spawn if kind == "compaction" else at_once

    return run.merger(executor=executor)


def test_a_commit_carries_the_full_state_before_a_difference_is_lost() -> None:
    run, uploads = MergerRun(SMALL, quorum=2), list[tuple[Future[Placed], Callable[[], Placed]]]()

    def later(job: Callable[[], Placed]) -> Future[Placed]:
        uploads.append((Future(), job))
        return uploads[-1][0]

    merger = slow(run, later)
    last = 2 * DIFFERENCES_KEPT + 2
    for number in range(1, last + 1):
        run.play(merger, number)
        for p in range(2):
            found = newest(run.transport.reader, run.manifest, p)
            assert digest_of(found.params_N) == digest_of(np.asarray(merger.fragments[p].published_N))
    assert full_versions(run) == [DIFFERENCES_KEPT, DIFFERENCES_KEPT]
    ((upload, job),) = uploads
    upload.set_result(job())
    merger.turn(0.0)
    assert full_versions(run) == [DIFFERENCES_KEPT, DIFFERENCES_KEPT], "an older one that arrives late is dropped"


def test_each_commit_carries_the_full_state_in_a_run_without_differences() -> None:
    run, merger = served_run(quorum=2)
    run.play(merger, 1)
    assert merger.compactor.fragments == {0: Uncovered(1, 1), 1: Uncovered()}
    snapshot, payload = run.stored.fragments[0]
    assert merger.snapshots[0] == snapshot
    assert (snapshot.bytes, snapshot.difference_bytes) == (len(payload), 0)


def test_a_failed_upload_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    run, failures = MergerRun(SMALL, quorum=2), [UnreachableError("the connection broke")]
    tried = list[float]()

    def failing(job: Callable[[], Placed]) -> Future[Placed]:
        tried.append(run.clock.now)
        if not failures:
            return at_once(job)
        future: Future[Placed] = Future()
        future.set_exception(failures.pop())
        return future

    merger = slow(run, failing)
    for number in range(1, 21):
        run.clock.now += 1.0
        run.play(merger, number)
    assert logged_codes(caplog) == ["compaction.failed"]
    assert tried[1] - tried[0] >= RETRY_SECONDS
    assert max(full_versions(run)) > 0


def test_a_run_that_stands_still_gets_full_snapshots_once() -> None:
    run, calls = MergerRun(SMALL, quorum=2), list[str]()
    merger = run.merger(transport=run.faulty(before=lambda name, *_: calls.append(name)))
    run.play(merger, 1, 2)
    for _ in range(3):
        merger.turn(0.0)
    assert full_versions(run) == [0, 0]
    run.clock.now += IDLE_SECONDS
    for _ in range(5):
        merger.turn(0.0)
    assert (full_versions(run), calls.count("compact")) == ([1, 1], 2)
    assert not run.stored.kept


def test_a_full_state_that_an_island_cannot_read_is_written_again_at_intervals() -> None:
    run, merger = served_run(SMALL, quorum=2)
    run.play(merger, 1, 2)

    def report(*fragments: int) -> list[int]:
        beat = samples.heartbeat("a", unreadable=" ".join(map(str, fragments)))
        run.transport.island.heartbeat(beat)
        for _ in range(3):
            merger.turn(0.0)
        return full_versions(run)

    assert report(9) == [0, 0], "of another shard"
    assert report(0) == [1, 0]
    run.clock.now += IDLE_SECONDS / 2
    run.play(merger, 3)
    assert report(0) == [1, 0]
    run.clock.now += IDLE_SECONDS / 2
    assert report(0) == [2, 0]
    merger.compactor.want({1}, run.clock.now + IDLE_SECONDS)
    merger.load()
    assert report(0) == [2, 1], "a load forgets no report"


# -- when one is due -------------------------------------------------------------------------------------------------


def test_one_is_due_by_bytes_and_by_the_time_of_a_restart() -> None:
    run, merger = served_run(SMALL, quorum=2)
    run.play(merger, 1)
    size, began = state_bytes(merger.fragments[0]), list[int]()

    def spawn(job: Callable[[], T]) -> Future[T]:
        began.append(1)
        return Future()

    half = DIFFERENCES_KEPT // 2
    for seconds, times, versions, is_due in (
        (0.0, 0.99, 1, False), (0.0, 1.0, 1, False), (9.0, 0.99, 1, False), (9.0, 1.0, 1, True), (0.0, MOST, 1, True),
        (0.0, 1.0, half - 1, False), (0.0, 1.0, half, True), (0.0, 0.99, half, False),
    ):  # fmt: skip
        began.clear()
        compactor = Compactor(merger.transport, run.manifest, spawn, restart_seconds=5.0)
        (entry,) = run.transport.reader.tape(1)
        entry = replace(entry, merge_seconds=seconds, bytes_up=int(times * size + 0.5) - 8)
        compactor.fragments[0] = Uncovered(version=merger.snapshots[0].version - versions)
        compactor.fragments[0].add(entry, difference_bytes=8)
        compactor.write(1, merger.state, merger.fragments, merger.snapshots, 0.0)
        assert bool(began) == is_due, (seconds, times, versions)


def test_a_full_state_has_the_arrays_of_the_merger() -> None:
    """A checkpoint would take twice the memory with copies."""
    run, merger = served_run(SMALL, quorum=2)
    run.play(merger, 1)
    fragment = merger.fragments[0]
    full = full_state(merger.snapshots[0], fragment)
    assert np.shares_memory(full.published_N, np.asarray(fragment.published_N))
    assert np.shares_memory(full.own[PARAMETERS], np.asarray(fragment.params_N))


def test_a_tape_that_does_not_say_what_came_before_a_round_is_damage() -> None:
    """A fresh state would merge the round again with other bits."""
    run, merger = served_run(SMALL, quorum=2)
    run.play(merger, 1)
    (entry,) = run.transport.reader.tape(1)
    for before in ("", "{"):
        with pytest.raises(WireError, match="tape"):
            state_before(replace(entry, before=before))
