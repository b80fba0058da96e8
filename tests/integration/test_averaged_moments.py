"""A whole run whose islands average their first moments: hand-over, replay of the islands, and checkpoints.

The storms of the simulation check takeovers and the replay of the tape, for a part of their runs with averaged moments.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.config import WireConfig
from archipelago.broker.manifest import MOMENT_PREFIX
from archipelago.broker.messages import TapeEntry
from archipelago.broker.published import newest
from archipelago.broker.wire import digest_of, unpack
from archipelago.islands.checkpoint import IslandStore, cut
from archipelago.islands.evaluation import assemble, published
from archipelago.islands.rejoin import Rejoin
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.worker import Island
from archipelago.merger.beside import at_once
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.checkpointer import Checkpointer
from tests.harness import tiny
from tests.harness.merger_run import Shelf
from tests.harness.played import Boundary
from tests.harness.tiny import TinyRun, leaf_bytes

CONFIG = replace(
    tiny.CONFIG, sync=replace(tiny.CONFIG.sync, quorum=2), wire=WireConfig(up="int4", thin="", down="int4")
)


class AveragingRun(TinyRun):
    """A run of two islands, the second of which takes the optimiser's state of the first.

    Attributes:
        versions: The published elements and the step of each fragment and version.
    """

    def __init__(self) -> None:
        super().__init__(tiny.averaging(CONFIG))
        self.shelf = Shelf()
        # With a checkpointer that takes no checkpoint, Redis keeps all contributions.
        self.merger = self.new_merger(checkpointer=Checkpointer(self.connect(), self.shelf, None, 1e9, at_once))
        self.versions: dict[tuple[int, int], tuple[Vector, int]] = {}

    def pass_boundary(self, island: Boundary, seconds: float = 1.0) -> None:
        super().pass_boundary(island, seconds)
        for p in range(len(self.manifest.sizes)):
            found = newest(self.transport.reader, self.manifest, p)
            self.versions[p, found.snapshot.version] = (found.params_N, found.snapshot.step)

    def newcomer(self, giver: Island) -> Island:
        island = self.island("new", "z", silent=True)
        rejoin = Rejoin(self.connect(), None, island, island.link.join(), pause=lambda _: self.play(giver, 1))
        rejoin.ask()
        island.beat("joining")
        island.link.pump()
        rejoin.complete(None)
        assert island.moments == "peer a"
        return island

    def played(self) -> None:
        """Play the run. The newcomer is slower than the first island."""
        islands = [self.island("a")]
        self.play(islands[0], 9)
        islands.append(self.newcomer(islands[0]))
        for step in range(20):
            for island in islands[: 1 + (step % 3 > 0)]:
                self.play(island, 1)

    def tape(self) -> list[TapeEntry]:
        return self.transport.reader.tape(1000)


@pytest.fixture(scope="module")
def run() -> AveragingRun:
    run = AveragingRun()
    run.played()
    return run


def test_first_moments_travel_and_are_averaged_and_the_model_has_none(run: AveragingRun) -> None:
    assert {len(entry.members) for entry in run.tape()} == {1, 2}
    for p, fragment in enumerate(run.merger.fragments):
        start, seen_N = run.manifest.parameter_sizes[p], np.asarray(fragment.published_N)
        assert digest_of(seen_N[start:]) != digest_of(np.asarray(fragment.params_N)[start:]), "they travel in int4"
        assert not np.asarray(fragment.outer.trace)[start:].any(), "first moments have no momentum"
    params, _, _ = published(run.transport, run.manifest)
    assert list(params) == ["kernel", "scale"]
    vectors = [np.asarray(fragment.published_N) for fragment in run.merger.fragments]
    assert leaf_bytes(params) == leaf_bytes(assemble(run.manifest, vectors))
    assert run.manifest.parameters == 11


def test_a_checkpoint_of_the_run_holds_first_moments(run: AveragingRun, tmp_path: Path) -> None:
    """Their names are those of files, too."""
    run.merger.finish()
    image = run.shelf.load()
    assert image is not None
    store = CheckpointStore(tmp_path)
    store.save(image)
    found = store.load()
    assert found is not None
    assert found.snapshots == image.snapshots
    assert found.outers == image.outers
    for p, (snapshot, payload) in enumerate(found.snapshots):
        held_N = newest(run.transport.reader, run.manifest, p).params_N
        assert snapshot.held == digest_of(unpack(payload, run.manifest.sizes[p])) == digest_of(held_N)


def test_a_restored_island_continues_with_the_same_bits(tmp_path: Path) -> None:
    """Its checkpoint has the moments that it sent last, and how many steps ago."""
    run = AveragingRun()
    before = run.island("a")
    run.play(before, 10)
    assert any(count.steps for count in before.ledger.counts)
    store = IslandStore(tmp_path, run.manifest)
    store.save(cut(before, 7))
    after = AveragingRun().island("a", incarnation="y")
    found = store.find(7)
    assert found is not None
    assert store.restore_whole(found, after)
    new_N = [np.arange(1, size + 1, dtype=np.float32) for size in run.manifest.sizes]
    for island in (before, after):
        island.advance()
        for p, vector_N in enumerate(new_N):
            island.take_over(Arrival(run.transport.reader.fragment(p)[0], vector_N))
    assert leaf_bytes(before.inner) == leaf_bytes(after.inner)
    assert before.synced.tensors(0, before.inner).keys() == {"kernel", "scale", MOMENT_PREFIX + "kernel"}
