"""Preparation of an island: its data and compiled programs. A standby holds them before it has a name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archipelago.broker.manifest import Manifest
from archipelago.broker.process import Patience
from archipelago.broker.transport import IslandTransport
from archipelago.islands.creation import describe, require_readable
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.device import best_scan_steps
from archipelago.islands.inner import InnerSteps, compile_steps
from archipelago.islands.models.registry import build
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.tasks.file import TaskFile
from archipelago.islands.worker import Island
from archipelago.islands.workload import CorpusWorkload, Workload

#: The name of the island that `rehearse` builds. Its link never starts.
REHEARSING = "rehearsal"


@dataclass
class PreparedIsland:
    """Everything that an island of this run loads and compiles before it has a name.

    Attributes:
        manifest: The run.
        pinned: The name of a corpus on this machine that replaces the run's, if any.
        workload: What the island trains.
        scan_steps: Inner steps between two step boundaries; 0 until they are known.
    """

    manifest: Manifest
    pinned: str | None
    workload: Workload
    scan_steps: int = 0

    @property
    def steps(self) -> InnerSteps:
        """The compiled inner steps."""
        return self.workload.steps

    def fits(self, manifest: Manifest, pinned: str | None) -> bool:
        """Return whether an island of that run can use it."""
        return (self.manifest, self.pinned) == (manifest, pinned)

    def link(self, transport: IslandTransport, who: str) -> Link:
        """Return a link for `who`, an island's name and incarnation."""
        return Link(transport, self.manifest, who, self.workload.shards)

    def island(
        self,
        name: str,
        incarnation: str,
        link: Link,
        arrivals: Sequence[Arrival],
        on_marker: Callable[[Island, int], None] | None = None,
    ) -> Island:
        """Return an island that begins with these snapshots."""
        work = self.workload
        batches = work.supply(name, link, rehearses=name == REHEARSING)
        return Island(
            name, self.manifest, work.steps, batches, link, arrivals, incarnation=incarnation, on_marker=on_marker,
            first_state=work.first_state, bounds=work.bounds,
        )  # fmt: skip

    def warm_up(self, island: Island, scan_steps: int) -> None:
        """Compile everything that the island will run. `scan_steps` 0 measures which number is fastest."""
        known = scan_steps or self.scan_steps
        self.scan_steps = known or best_scan_steps(island)
        island.scan_steps = self.scan_steps
        island.warm_up(has_stepped=not known)

    def rehearse(self, transport: IslandTransport, awaited: Patience, scan_steps: int) -> None:
        """Build an island from the run's snapshots and warm it up. Its link never starts, so no peer hears of it."""
        link = self.link(transport, "")
        island = self.island(REHEARSING, "", link, awaited(link.join))
        self.warm_up(island, scan_steps)
        del island, link
        gc.collect()  # frees the model and its device memory


def prepare(manifest: Manifest, pinned: str | None, task: TaskFile | None = None) -> PreparedIsland:
    """Load the corpus, or take the users' task, and build the inner steps, without asking the broker for anything."""
    if task is not None:
        from archipelago.islands.tasks.workload import TaskWorkload

        return PreparedIsland(manifest, pinned, TaskWorkload(task, manifest))
    config = manifest.config
    corpus = training_text(manifest, pinned)
    steps = compile_steps(build(config.model), config.inner)
    return PreparedIsland(manifest, pinned, CorpusWorkload(manifest, pinned, corpus, steps))


def training_text(manifest: Manifest, pinned: str | None) -> OpenCorpus:
    """Open the text to train on: the run's, or a pinned one. Raises MismatchError if it is not the run's."""
    corpus = open_corpus(pinned or manifest.corpus.name)
    identity = manifest.corpus if pinned else corpus.identity
    manifest.require_same(describe(manifest.run, manifest.config, identity))
    require_readable(manifest.config, corpus, manifest.corpus.tokenizer)
    return corpus
