"""How merger processes share the shards of a run."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError, UnknownRunError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.administration import delete_shard
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.transport import create, of_shard
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.service import Merger
from archipelago.merger.shards import Sharing, is_above_share, seen, serve_shards, share
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.intercept import Intercepted

#: Long enough that no lease expires while the threads of a test stand still. Threads that end release theirs.
LEASE_SECONDS = 8.0
LOOK_SECONDS = 0.02
AGAIN_SECONDS = 0.2


# -- the rule, without a broker ---------------------------------------------------------------------------------------


class Processes:
    """Processes that follow the rule one after another. Each sees the run as it is."""

    def __init__(self, names: Sequence[str], shards: int) -> None:
        self.names, self.shards = list(names), shards
        self.holders: dict[int, str] = {}
        self.handed = 0

    def serving(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 0) | Counter(self.holders.values())

    def turn(self, name: str) -> bool:
        """Let one process act, and return whether it did."""
        serving, own = self.serving(), sorted(k for k, holder in self.holders.items() if holder == name)
        free = frozenset(range(self.shards)) - self.holders.keys()
        if free and len(own) < share(serving, self.shards):
            self.holders[min(free)] = name
            return True
        if not free and own and is_above_share(name, serving, self.shards):
            del self.holders[own[-1]]
            self.handed += 1
            return True
        return False

    def settle(self) -> None:
        for _ in range(4 * self.shards + 4):
            acted = [self.turn(name) for name in self.names]
            if not any(acted):
                return
        pytest.fail("the processes do not settle")

    def leave(self, name: str) -> None:
        self.names.remove(name)
        self.holders = {k: holder for k, holder in self.holders.items() if holder != name}


@given(st.integers(1, 9), st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_processes_that_come_and_go_settle_on_equal_shares(shards: int, changes: list[int]) -> None:
    """A number that names a process lets it leave, another one lets one come."""
    all_ = Processes(["p0"], shards)
    for born, change in enumerate(changes, 1):
        if change < len(all_.names) > 1:
            all_.leave(all_.names[change])
        else:
            all_.names.append(f"p{born}")
        all_.settle()
        counts = [all_.serving()[name] for name in all_.names]
        assert sum(counts) == shards
        assert max(counts) - min(counts) <= 1
    assert all_.handed <= shards * len(changes)


# -- over a broker ----------------------------------------------------------------------------------------------------


def manifest_with(shards: int) -> Manifest:
    return replace(samples.manifest(), shards=shards)


class Process:
    """A merger process of a run, as a thread."""

    def __init__(self, home: RedisTransport, name: str, shards: int = 2, folder: MergerFolder | None = None) -> None:
        manifest = manifest_with(shards)
        self.mergers = []
        for shard in range(shards):
            own, own_manifest = of_shard(home, manifest, shard), manifest.of_shard(shard)
            writer = folder.parts(manifest)[shard].checkpointer(own, own_manifest, 30.0) if folder else None
            self.mergers.append(Merger(own, holder=name, lease_seconds=LEASE_SECONDS, checkpointer=writer))
        self.is_finished = False
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.is_finished = serve_shards(self.mergers, self._stopped.is_set, LOOK_SECONDS, AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001 - the tests look at it
            self.error = error

    @property
    def served(self) -> list[int]:
        return [shard for shard, merger in enumerate(self.mergers) if merger.epoch]

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.fixture
def home() -> RedisTransport:
    """A connection to a run with two shards."""
    transport, manifest = connect(f"fakeredis://{uuid.uuid4().hex}", "sample"), manifest_with(2)
    create(transport, manifest, samples.first_snapshots(manifest))
    return transport


def stands_by(home: RedisTransport, shard: int, name: str) -> bool:
    return name in [standby.name for standby in home.of_shard(shard).reader.standbys()]


def delete(home: RedisTransport, shard: int) -> None:
    client = home.connection.redis
    client.delete(*client.keys(home.of_shard(shard).connection.keys.manifest.rpartition(":")[0] + ":*"))


def test_processes_share_the_shards_of_a_run_until_it_is_deleted(home: RedisTransport, until: Until) -> None:
    first = Process(home, "first")
    until(lambda: first.served == [0, 1], "the process to serve all shards")
    second = Process(home, "second")
    try:
        until(lambda: (first.served, second.served) == ([0], [1]), "the processes to share the shards")
        epochs = [first.mergers[0].epoch, second.mergers[1].epoch]
        for k, name in ((0, "second"), (1, "first")):
            until(partial(stands_by, home, k, name), "both to stand by")
        assert [first.mergers[0].epoch, second.mergers[1].epoch] == epochs, "they do not keep them"
    finally:
        second.stop()
    until(lambda: first.served == [0, 1], "the first process to take all shards again")
    delete(home, 1)
    until(lambda: not [t for t in threading.enumerate() if t.name == "shard 1"], "its thread to end")
    until(lambda: first.has_ended, "the process to end, because both shards go back together")
    assert isinstance(first.error, UnknownRunError)
    assert not home.of_shard(0).reader.is_served()


def test_all_processes_end_with_the_run_and_one_that_is_started_later_does(
    home: RedisTransport, until: Until, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each shard ends for itself, and then the other process takes it."""
    monkeypatch.setattr("archipelago.merger.service.FINISHED_SECONDS", 0.2)
    monkeypatch.setattr("archipelago.merger.checkpointer.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("archipelago.merger.serving.RETRY_SECONDS", 0.1)
    for p in (0, 1):
        values_N = np.ones(home.reader.manifest().sizes[p], np.float32)
        last = samples.packed(values_N, fragment=p, round=p + 1, global_step=2000, steps=2000, farewell=True)
        home.of_shard(p).island.publish(*last)
    processes = [Process(home, name, folder=MergerFolder(tmp_path)) for name in ("first", "second")]
    until(lambda: all(process.has_ended for process in processes), "both processes to end")
    assert [(process.is_finished, process.error) for process in processes] == [(True, None)] * 2
    assert [part.round for part in MergerFolder(tmp_path).newest()] == [1, 2]
    numbers = MergerFolder(tmp_path).store.numbers()
    later = Process(home, "later", folder=MergerFolder(tmp_path))
    until(lambda: later.has_ended, "the third process to end")
    assert (later.is_finished, later.error) == (True, None)
    assert MergerFolder(tmp_path).store.numbers() == numbers, "what was complete is not written again"


def test_a_shard_that_cannot_be_served_is_tried_again(
    home: RedisTransport, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, faults, loaded = Merger.load, [ConfigError("nothing can restore it", "")] * 3, list[int]()
    failed = list[float]()

    def fails_at_first(self: Merger) -> None:
        if self.manifest.shard == 1 and faults:
            failed.append(time.monotonic())
            raise faults.pop()
        load(self)
        loaded.append(self.manifest.shard or 0)

    monkeypatch.setattr(Merger, "load", fails_at_first)
    process = Process(home, "first")
    until(lambda: sorted(loaded) == [0, 1], "both shards to be served")
    assert all(later - earlier >= AGAIN_SECONDS for earlier, later in pairwise(failed)), "it waits before each try"
    assert not process.has_ended
    process.stop()
    assert process.error is None


def test_a_mistake_of_ours_ends_the_process(
    home: RedisTransport, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Merger.turn

    def broken(self: Merger, *_: object) -> bool:
        if self.manifest.shard == 1:
            raise ZeroDivisionError
        return turn(self, 0.0)

    monkeypatch.setattr(Merger, "turn", broken)
    process = Process(home, "first")
    until(lambda: process.has_ended, "the process to end")
    assert isinstance(process.error, ZeroDivisionError)


def test_a_shard_that_nobody_takes_is_taken_in_the_end(home: RedisTransport) -> None:
    clock = VirtualClock()
    shards = [home.of_shard(k) for k in (0, 1)]
    mergers = [Merger(shard, clock, "me", lease_seconds=5.0) for shard in shards]
    sharing = Sharing(mergers, clock)
    assert not sharing.may_take(0), "it has not looked yet"
    sharing.look()
    assert sharing.may_take(0)
    assert mergers[0].acquire()
    shards[1].merger.stand_by("other")
    sharing.look()
    assert not sharing.may_take(1), "the other one may take it"
    clock.now = 11.0
    assert sharing.may_take(1)
    sharing.look()
    assert seen(shards, "me", 5.0) == ({"me": 1, "other": 0}, frozenset({1}))
    assert seen(shards, "me", 0.0) == ({"me": 1}, frozenset({1})), "silent standbys do not count"
    assert mergers[1].acquire()
    sharing.look()
    assert sharing.is_to_hand_over(1)
    assert not sharing.is_to_hand_over(1), "one at a time"


class Away(Intercepted):
    """A connection to shard 0, whose server may be away."""

    is_away = False

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_away:
            raise UnreachableError("its server is away")
        return method(*args, **kwargs)


def test_no_merger_loads_a_shard_of_a_run_whose_shard_0_is_lost_or_away(home: RedisTransport) -> None:
    """A run is restored shard by shard, shard 0 last, and what a merger changed before that would be in the way."""
    primary = Away(home)
    merger = Merger(home.of_shard(1), VirtualClock(), primary=primary)
    assert merger.acquire()
    merger.load()
    primary.is_away = True
    with failing(UnreachableError):
        merger.load()
    primary.is_away = False
    delete_shard(home.of_shard(0).connection)
    with failing(UnknownRunError):
        merger.load()


def test_a_run_that_has_lost_one_shard_is_restored_after_the_others_are_deleted(
    home: RedisTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(CheckpointStore, "numbers", lambda _: [7])
    folder, remedies = MergerFolder(tmp_path), list[str]()
    home.island.heartbeat(samples.heartbeat("a"))
    home.connection.redis.delete(home.connection.keys.manifest)
    for _ in range(2):
        with pytest.raises(UnknownRunError) as read:
            home.reader.manifest()
        with failing(UnknownRunError, "broker.resumable") as begun:
            folder.find_or_bring_back(home, resume=False)
        remedies += [read.value.remedy, begun.value.remedy, folder.lost(read.value, home).remedy]
        home.connection.redis.delete(home.of_shard(1).connection.keys.manifest, home.connection.keys.notes)
    assert ["`archipelago rm sample --force`" in remedy for remedy in remedies] == [True] * 3 + [False] * 3


def test_the_merger_of_up_names_the_command_that_continues_the_run(
    home: RedisTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(CheckpointStore, "numbers", lambda _: [7])
    for place, named in (("redis", True), ("other", False)):
        (tmp_path / place / "sample" / place).mkdir(parents=True)
        error = MergerFolder(tmp_path / place / "sample" / "merger").lost(UnknownRunError("lost", ""), home)
        command = f"`archipelago up --run sample --folder {tmp_path / place} --resume`"
        assert (command in error.remedy, "archipelago up" in error.remedy) == (named, named), "the page can copy it"


def test_a_merger_can_start_while_the_server_of_its_shard_is_away(
    home: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no shard of the run would be served until that server is back."""
    away = home.of_shard(1)
    monkeypatch.setattr(away.reader, "manifest", Mock(side_effect=UnreachableError("its server is away")))
    manifest = manifest_with(2).of_shard(1)
    assert Merger(away, VirtualClock(), manifest=manifest).manifest == manifest
