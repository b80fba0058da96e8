"""Checkpoints of a run over several shards, on disk: the whole run continues from one cut, and its record is replayed.

The storms of the simulation check that every checkpoint is one cut, with mergers that lag behind and write slowly. The
merger's own tests have checkpoints that lack a part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.shards.transport import of_shard, whole
from archipelago.broker.transport import Transport
from archipelago.islands.checkpoint import IslandStore, taken
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.replay import read, repeat
from archipelago.ops.experiments.virtual_time import VirtualClock, VirtualRun
from tests.harness.merger_run import finish
from tests.integration.virtual import CONFIG, work

EVERY = 12.0
RUN = "cut"


class CheckpointedRun(VirtualRun):
    """A run of two shards and two islands with checkpoints in a folder."""

    def __init__(self, of: Workload, path: Path) -> None:
        self.path, self.folder, self.of = path, MergerFolder(path / "merger"), of
        clock = VirtualClock()
        self.broker = MemoryBroker(clock)
        super().__init__(of, [1.0, 1.7], lambda: self.broker.connect(RUN), clock, RUN, shards=2)

    def merger_of(self, shard: int) -> Merger:
        transport = of_shard(self.connect_as("merger"), self.manifest, shard)
        part = self.folder.parts(self.manifest)[shard]
        checkpointer = part.checkpointer(transport, self.manifest.of_shard(shard), EVERY, at_once)
        merger = Merger(
            transport, self.clock, "virtual", live_poll_seconds=0.0, checkpointer=checkpointer, wall=self.clock
        )
        assert merger.acquire()
        merger.load()
        return merger

    def add_island(self, name: str, step_seconds: float, origin: object = "fresh") -> Island:
        transport = whole(self.connect_as(name), self.manifest)
        self._born += 1
        store = IslandStore(self.path / name, self.manifest)
        link = Link(transport, self.manifest, f"{name}/v{self._born}", (), clock=self.clock, wall=self.clock)
        arrivals = link.join()
        supply = self.of.supply(TaskRun(name, self._born, self.manifest.config.seed, link))
        island = Island(
            name, self.manifest, self.of.computation(self.manifest), supply, link, arrivals, self.clock,
            f"v{self._born}", on_marker=lambda island, number: store.save(taken(island)),
        )  # fmt: skip
        return self.begin(island, Newcomer(transport, island, seconds=0.0), step_seconds, store=store)

    def finish(self) -> None:
        """Play to the end, until everything is merged, and check that each contribution was merged once."""
        self.advance_until(lambda: False)
        for _ in range(100):
            self.clock.now += 1.0
            self.turn()
        for shard in self.of_shards():
            counters, merged = (
                shard.reader.counters(),
                [m for entry in shard.reader.tape(1 << 20) for m in entry.members],
            )
            assert counters.published == counters.merged + counters.refused
            assert counters.merged == len(merged) == len({member.identity_text for member in merged})
            assert len(merged) > 0
        assert self.transport.reader.pending().contributions == 0

    def lose_everything(self) -> None:
        """End all processes, and delete all that the broker has."""
        self.islands.clear()
        self.broker.runs.clear()

    def begin_again(self) -> int:
        """Restore the run, and begin all processes again. Return the number of the checkpoint."""
        self.folder = MergerFolder(self.path / "merger")
        assert self.folder.find_or_bring_back(self.connect_as("admin"), resume=True) == self.manifest
        self.mergers = [self.merger_of(shard) for shard in range(self.manifest.shards)]
        for name, seconds in self._step_seconds.items():
            self.add_island(name, seconds)
        assert {island.optimizer_origin for island in self.islands.values()} == {"own checkpoint"}
        return self.folder.newest()[0].number

    def of_shards(self) -> list[Transport]:
        """Return a connection to each shard."""
        home = self.connect_as("admin")
        return [of_shard(home, self.manifest, k) for k in range(self.manifest.shards)]

    def complete(self) -> list[int]:
        """Return the numbers of the checkpoints that are complete."""
        self.folder.parts(self.manifest)
        return self.folder.store.complete()


def test_a_lost_run_goes_on_from_one_cut_and_is_replayed(tmp_path: Path) -> None:
    run = CheckpointedRun(work(replace(CONFIG, record=True)), tmp_path)
    run.advance_until(lambda: len(run.complete()) >= 2 and run.clock.now % EVERY > EVERY / 2)
    images = run.folder.newest()
    for _ in range(2):  # and once more before the next checkpoint
        run.lose_everything()
        assert run.begin_again() == images[0].number
        assert [shard.reader.merger_state() for shard in run.of_shards()] == [image.state for image in images]
        began = run.clock.now
        run.advance_until(lambda began=began: run.clock.now > began + EVERY / 3)  # type: ignore[misc]
    run.finish()
    assert run.complete()[-1] > images[0].number
    for merger in run.mergers:
        finish(merger)
    closed = [merger.state.closed for merger in run.mergers]
    assert [image.round for image in run.folder.newest()] == closed, "the last checkpoint lacks rounds"

    found, merged = repeat(read(run.folder.path)), run.transport.reader.counters().merged
    assert (found["same"], found["first_difference"]) == (True, "")
    assert found["rounds"] == len(run.transport.reader.tape(1 << 20))
    assert found["contributions"] == merged
    records = read(run.folder.path)
    entry, members = records[1].rounds[closed[1]]
    records[1].rounds[closed[1]] = replace(entry, digest="0" * 32), members
    assert repeat(records)["first_difference"].startswith(f"shard 1: round {closed[1]} ")
    heads = run.transport.reader.heads()
    assert [each["digest"] for each in found["fragments"]] == [head.held for head in heads if head is not None]
