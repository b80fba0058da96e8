"""Checkpoints of a run over several shards: one cut over all of them, from which the whole run continues."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import UnreachableError
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.shards.transport import claim_checkpoint, of_shard, whole
from archipelago.broker.transport import Transport
from archipelago.islands.checkpoint import IslandStore, cut
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.rejoin import Rejoin
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.ledger import closed_rounds
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.worker import Island
from archipelago.merger.beside import Spawn, at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import KEEP, MergerFolder
from archipelago.ops.experiments.recorded_run import repeat
from archipelago.ops.experiments.replay import read
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.failing import failing

EVERY = 9.0
RUN = "cut"
T = TypeVar("T")


class CheckpointedRun(VirtualRun):
    """A run with checkpoints, whose mergers and connections lag behind each other at random.

    Attributes:
        sent: The contributions that each island had sent to each shard at its part of each checkpoint.
    """

    def __init__(
        self, config: RunConfig, corpus: OpenCorpus, path: Path, shards: int, name: str = "memory", seed: int = 0
    ) -> None:
        self.path, self.folder = path, MergerFolder(path / "merger")
        self.chance = random.Random(seed)
        self.sent: dict[tuple[str, int], list[int]] = {}
        connection: Callable[[], Transport] = partial(connect, f"fakeredis://{path.name}-{name}-{shards}", RUN)
        self._work_of_run = our_work(replace(config, inner=replace(config.inner, steps=96)), corpus)
        super().__init__(
            self._work_of_run,
            [1.0, 1.1, 1.7],
            connect=connection if name == "fakeredis" else None,
            run=RUN,
            shards=shards,
        )

    def _merger_of(self, shard: int) -> Merger:
        transport = of_shard(self.connect_as("merger"), self.manifest, shard)
        part = self.folder.of_shard(self.manifest, shard)
        checkpointer = part.checkpointer(transport, self.manifest.of_shard(shard), EVERY, self.spawn_of(shard))
        merger = Merger(
            transport, self.clock, "virtual", live_poll_seconds=0.0, checkpointer=checkpointer, wall=self.clock
        )
        assert merger.acquire()
        merger.load()
        return merger

    def spawn_of(self, shard: int) -> Spawn:
        """Return how the merger of a shard writes its parts."""
        return at_once

    def turn(self) -> None:
        for merger in self.mergers:
            if self.chance.random() < 0.6:
                merger.turn(0.0)

    def _exchange(self, island: Island) -> None:
        island.link.pump_send()
        island.link.pump_heartbeat()
        for channel in island.link.channels:
            if self.chance.random() < 0.6:
                channel.inbox.pump()

    def add_island(self, name: str, step_seconds: float, moments: object = "fresh") -> Island:
        transport = whole(self.connect_as(name), self.manifest)
        self._born += 1
        store = IslandStore(self.path / name, self.manifest)
        returned = claim_checkpoint(transport, name)
        found = store.find(*returned) if returned else None
        link = Link(transport, self.manifest, f"{name}/v{self._born}", (), clock=self.clock, wall=self.clock)
        arrivals = link.join()
        supply = self._work_of_run.supply(
            TaskRun(name, self._born, self.manifest.config.seed, link, pause=lambda seconds: link.pump())
        )

        def on_marker(island: Island, number: int) -> None:
            self.sent[f"{name}/{island.incarnation}", number] = list(island._sequences)
            store.save(cut(island, number))

        island = self._work_of_run.island(
            name, self.manifest, supply, link, arrivals,
            clock=self.clock, incarnation=f"v{self._born}", on_marker=on_marker,
        )  # fmt: skip
        rejoin = Rejoin(transport, store, island, arrivals, seconds=0.0)
        return self.begin(island, rejoin, step_seconds, found=found)

    def finish(self) -> None:
        """Play to the end, until everything is merged."""
        self.advance_until(lambda: False)
        for _ in range(100):
            self.clock.now += 1.0
            self.turn()

    # -- losses -------------------------------------------------------------------------------------------------------

    def lose_redis(self) -> None:
        """End all processes, and delete all that the broker has."""
        self.islands.clear()
        home = self.connect_as("admin")
        if isinstance(home, RedisTransport):
            home.connection.redis.flushall()
        else:
            home._broker.runs.clear()  # type: ignore[attr-defined]

    def begin_again(self) -> int:
        """Restore the run, and begin all processes again. Return the number of the checkpoint."""
        self.folder, self.began = MergerFolder(self.path / "merger"), self.clock.now
        assert self.folder.find_or_bring_back(self.connect_as("admin"), resume=True) == self.manifest
        self.mergers = [self._merger_of(shard) for shard in range(self.manifest.shards)]
        for name, seconds in self._step_seconds.items():
            self.add_island(name, seconds)
        return self.folder.newest()[0].number

    # -- what must hold -----------------------------------------------------------------------------------------------

    def of_shards(self) -> list[Transport]:
        """Return a connection to each shard."""
        home = self.connect_as("admin")
        return [of_shard(home, self.manifest, k) for k in range(self.manifest.shards)]

    def complete(self) -> list[int]:
        """Return the numbers of the checkpoints that are complete."""
        self.folder.parts(self.manifest)
        return self.folder.store.complete()

    def check_cut(self, number: int) -> int:
        """Check that a complete checkpoint is one cut. Return how many islands have a part in it."""
        images = [image for part in self.folder.parts(self.manifest) if (image := part.store.load(number))]
        assert len(images) == self.manifest.shards
        parts = 0
        for (who, at), sent in self.sent.items():
            found = IslandStore(self.path / who.partition("/")[0], self.manifest).find(number) if at == number else None
            if found is None or found.who != who:
                continue
            parts += 1
            in_flight = {(fields["round"], fields["sequence"]) for fields in found.rest["in_flight"]}
            for k, image in enumerate(images):
                held = [*(member for entry in image.tape for member in entry.members), *(c for c, _ in image.pending)]
                mine = {int(one.sequence) for one in held if f"{one.island}/{one.incarnation}" == who}
                assert max(mine, default=-1) < sent[k], "a shard's part has what the island sent after its own"
                layout = self.manifest.shard_layout
                flying = {int(sequence) for r, sequence in in_flight if layout.shard_of(int(r)) == k}
                assert mine | flying == set(range(sent[k])), "what the island sent before its part is in no part"
                known = closed_rounds(found.rest["ledger"])[k]
                assert known <= layout.run_round(k, image.round), "the island knew a round that the shard's part lacks"
        return parts

    def check_end(self) -> None:
        """Check that every contribution was merged once or refused, in each shard."""
        for shard in self.of_shards():
            books, merged = shard.reader.books(), [m for entry in shard.reader.tape(1 << 20) for m in entry.members]
            assert books.published == books.merged + books.refused
            assert books.merged == len(merged) == len({member.identity_text for member in merged})
            assert len(merged) > 0
        assert self.transport.reader.pending().contributions == 0


class SlowJob(Future[T]):
    """A part that is written at some time of the run's clock."""

    def __init__(self, write: Callable[[], T], clock: Callable[[], float], ends_at: float) -> None:
        super().__init__()
        self._write, self._clock, self._ends_at = write, clock, ends_at

    def done(self) -> bool:
        if not super().done() and self._clock() >= self._ends_at:
            self.set_result(self._write())
        return super().done()


class SlowRun(CheckpointedRun):
    """A run whose further shards write for longer than the time between two checkpoints, and do not end together."""

    def spawn_of(self, shard: int) -> Spawn:
        seconds = {0: [0.0], 1: [1.3], 2: [2.2, 1.3]}[shard]

        def spawn(write: Callable[[], T], /) -> SlowJob[T]:
            lasts = EVERY * (seconds.pop(0) if len(seconds) > 1 else seconds[0])
            return SlowJob(write, self.clock, self.clock() + lasts)

        return spawn


BROKERS = [
    ("memory", 2),
    pytest.param("memory", 3, marks=pytest.mark.full),
    pytest.param("fakeredis", 2, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("broker", "shards"), BROKERS)
def test_a_lost_run_goes_on_from_one_cut_and_is_replayed(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, broker: str, shards: int
) -> None:
    run = CheckpointedRun(replace(config, record=True), corpus, tmp_path, shards, broker)
    run.advance_until(lambda: len(run.complete()) >= 2 and run.clock.now % EVERY > EVERY / 2)
    assert run.check_cut(run.complete()[-1]) == 3
    images = run.folder.newest()
    for _ in range(2):  # and once more before the next checkpoint
        run.lose_redis()
        assert run.begin_again() == images[0].number
        assert [shard.reader.merger_state() for shard in run.of_shards()] == [image.state for image in images]
        assert {island.moments for island in run.islands.values()} == {"own checkpoint"}
        run.advance_until(lambda: run.clock.now > run.began + EVERY / 3)
    run.finish()
    run.check_end()
    assert run.complete()[-1] > images[0].number
    for merger in run.mergers:
        merger.finish()
    closed = [merger.state.closed for merger in run.mergers]
    newest = run.folder.newest()
    assert [image.round for image in newest] == closed, "the last checkpoint lacks rounds"

    found = repeat(read(run.folder.path), islands=True)
    assert found["first_difference"] == ""
    assert found["same"]
    assert found["rounds"] == sum(closed)
    assert found["islands_from_payloads"] == {}
    assert found["trained_again"] == found["contributions"] == run.transport.reader.books().merged
    records = read(run.folder.path)
    entry, members = records[1].rounds[closed[1]]
    records[1].rounds[closed[1]] = replace(entry, digest="0" * 32), members
    assert repeat(records, islands=False)["first_difference"].startswith(f"shard 1: round {closed[1]} ")
    heads = run.transport.reader.heads()
    assert [each["digest"] for each in found["fragments"]] == [head.held for head in heads if head is not None]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 6))])
def test_every_checkpoint_is_one_cut(config: RunConfig, corpus: OpenCorpus, tmp_path: Path, seed: int) -> None:
    run = CheckpointedRun(config, corpus, tmp_path, shards=2 + seed % 2, seed=seed)
    checked, parts, newest = 0, 0, 0
    while run.islands:
        run.advance_until(lambda: max(run.complete(), default=0) > newest)  # noqa: B023 - called at once
        if newest and run.islands:  # by now, the islands have taken their parts of the one before
            checked, parts = checked + 1, parts + run.check_cut(newest)
        newest = max(run.complete(), default=0)
    assert checked >= 4
    assert parts >= 2 * checked


def test_a_checkpoint_that_lacks_a_part_is_not_used(config: RunConfig, corpus: OpenCorpus, tmp_path: Path) -> None:
    run = CheckpointedRun(config, corpus, tmp_path, shards=2)
    run.advance_until(lambda: len(run.complete()) >= 2)
    earlier, newest = run.complete()[-2:]
    home, other = (part.store for part in run.folder.parts(run.manifest))
    shutil.rmtree(other.path_of(newest))
    assert home.numbers()[-1] == newest
    run.lose_redis()
    assert run.begin_again() == earlier
    assert {island.moments for island in run.islands.values()} == {"own checkpoint"}
    run.lose_redis()
    run.of_shards()[1].restore(run.folder.newest()[1])  # a restore that was interrupted
    with failing(UnreachableError):  # it would change the shard
        run._merger_of(1)
    assert run.begin_again() == earlier
    run.finish()
    run.check_end()


def test_checkpoints_are_complete_although_shards_write_slowly_and_in_turns(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path
) -> None:
    run, complete = SlowRun(config, corpus, tmp_path, shards=3), set[int]()
    while run.islands and len(complete) < 3:
        run.play_one()
        complete.update(run.complete())
    assert len(complete) == 3


def test_without_the_merger_of_a_shard_the_others_go_on_and_keep_the_last_checkpoint(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = CheckpointedRun(config, corpus, tmp_path, shards=2)
    run.advance_until(lambda: len(run.complete()) >= 1)
    alive, complete = run.mergers[0], run.complete()[-1]
    run.mergers = [alive]
    run.advance_until(lambda: run.folder.store.numbers()[-1] > complete and len(run.folder.store.numbers()) > KEEP)
    assert run.complete() == [complete]
    assert len(run.folder.store.numbers()) == KEEP + 1, "more than the newest and the last complete one were kept"
    assert [r.code for r in caplog.records if hasattr(r, "code")].count("checkpoint.incomplete") == 1
    run.mergers.append(run._merger_of(1))
    run.advance_until(lambda: run.complete()[-1] > complete)
    run.finish()
    run.check_end()
