"""Checkpoints of a run over several shards, on disk: they hold one cut of the whole run, and its record is replayed.

The storms of the simulation lose the broker of such a run, and check that it goes on from one cut. The merger's own
tests have checkpoints that lack a part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.shards.transport import of_shard
from archipelago.merger.executor import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.replay import read, repeat
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.harness.merger_run import finish
from tests.harness.played import started
from tests.integration.virtual import CONFIG, require_balanced, work

EVERY = 12.0
RUN = "cut"


class CheckpointedRun(VirtualRun):
    """A run of two shards and two islands with checkpoints in a folder."""

    def __init__(self, path: Path) -> None:
        self.folder = MergerFolder(path)
        super().__init__(work(replace(CONFIG, record=True)), [1.0, 1.7], run=RUN, shards=2)

    def merger_of(self, shard: int) -> Merger:
        transport = of_shard(self.connect_as("merger"), self.manifest, shard)
        part = self.folder.parts(self.manifest)[shard]
        checkpointer = part.checkpointer(transport, self.manifest.of_shard(shard), EVERY, at_once)
        return started(
            Merger(transport, self.clock, "virtual", live_poll_seconds=0.0, checkpointer=checkpointer, wall=self.clock)
        )


def test_a_checkpoint_holds_one_cut_of_all_shards_and_the_record_is_replayed(tmp_path: Path) -> None:
    run = CheckpointedRun(tmp_path / "merger")
    run.finish()
    require_balanced(run, pending=0)
    for merger in run.mergers:
        finish(merger)
    closed = [merger.state.closed for merger in run.mergers]
    assert [image.round for image in run.folder.newest()] == closed, "the last checkpoint lacks rounds"
    assert len(run.folder.store.complete()) > 1
    again = MemoryBroker().connect(RUN)
    assert MergerFolder(tmp_path / "merger").find_or_bring_back(again, resume=True) == run.manifest
    for shard, image in enumerate(run.folder.newest()):
        assert of_shard(again, run.manifest, shard).reader.merger_state() == image.state

    found, tape = repeat(read(run.folder.path)), run.transport.reader.tape(1 << 20)
    assert (found["same"], found["first_difference"]) == (True, "")
    assert (found["rounds"], found["contributions"]) == (len(tape), run.transport.reader.counters().merged)
    records = read(run.folder.path)
    entry, members = records[1].rounds[closed[1]]
    records[1].rounds[closed[1]] = replace(entry, digest="0" * 32), members
    assert repeat(records)["first_difference"].startswith(f"shard 1: round {closed[1]} ")
    repeated = {entry.fragment: entry.digest for entry in tape}  # to which each round was compared
    assert repeated == {head.fragment: head.held for head in run.transport.reader.heads() if head is not None}
