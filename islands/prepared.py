"""What an island needs that no name decides: the run's manifest, its text, and the programs, loaded or compiled.

A process that waits to become an island has it before it is told which.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archipelago.broker.errors import MismatchError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import Patience
from archipelago.broker.transport import IslandTransport
from archipelago.islands.creation import describe, require_readable
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.device import best_scan_steps
from archipelago.islands.inner import InnerSteps, compile_steps
from archipelago.islands.models.registry import build
from archipelago.islands.sync.link import Link
from archipelago.islands.sync.snapshots import Arrival
from archipelago.islands.worker import Island

REHEARSING = "rehearsal"
"""the name of an island that nobody hears of"""


@dataclass
class PreparedIsland:
    """Of one run on one machine."""

    manifest: Manifest
    pinned: str | None
    """the corpus of this machine that is read instead of the run's"""
    corpus: OpenCorpus
    steps: InnerSteps
    scan_steps: int = 0
    """inner steps between two step boundaries, once they are known"""

    def fits(self, manifest: Manifest, pinned: str | None) -> bool:
        """Whether an island of that run can use it."""
        return (self.manifest, self.pinned) == (manifest, pinned)

    def link(self, transport: IslandTransport, who: str) -> Link:
        """Of an island with that name and incarnation."""
        config = self.manifest.config
        return Link(transport, self.manifest, who, shard_order(config.data.shards, config.seed, self.pinned or ""))

    def island(
        self,
        name: str,
        incarnation: str,
        link: Link,
        arrivals: Sequence[Arrival],
        on_marker: Callable[[Island, int], None] | None = None,
    ) -> Island:
        """One that begins with these snapshots."""
        batches = Batches(self.corpus.train, self.manifest.config, link.lease, fallback=_number_of(name))
        return Island(
            name, self.manifest, self.steps, batches, link, arrivals, incarnation=incarnation, on_marker=on_marker
        )  # fmt: skip

    def warm_up(self, island: Island, scan_steps: int) -> None:
        """Finds or compiles all that the island will run. `scan_steps`: as many, or 0 for what pays here."""
        self.scan_steps = scan_steps or self.scan_steps or best_scan_steps(island)
        island.scan_steps = self.scan_steps
        island.warm_up()

    def rehearse(self, transport: IslandTransport, awaited: Patience, scan_steps: int) -> None:
        """Builds an island from the run's snapshots and warms it up. Nobody hears of it: its link never starts."""
        link = self.link(transport, "")
        island = self.island(REHEARSING, "", link, awaited(link.join))
        self.warm_up(island, scan_steps)
        del island, link
        gc.collect()  # it held a model, and perhaps a device's memory


def prepare(manifest: Manifest, pinned: str | None) -> PreparedIsland:
    """All that can be had before there is an island. The broker is not asked for anything."""
    config = manifest.config
    corpus = training_text(manifest, pinned)
    return PreparedIsland(manifest, pinned, corpus, compile_steps(build(config.model), config.inner))


def training_text(manifest: Manifest, pinned: str | None) -> OpenCorpus:
    """The text to train on: the run's, or one that stays here. Raises MismatchError for another than the run's."""
    corpus = open_corpus(pinned or manifest.corpus.name)
    ours = manifest.corpus if pinned else corpus.identity
    manifest.require_same(describe(manifest.run, manifest.config, ours))
    require_readable(manifest.config, corpus, manifest.corpus.tokenizer)
    return corpus


def register_text(corpus: OpenCorpus, transport: IslandTransport, pinned: str | None) -> None:
    """Says which text an island reads under that name, if it is its own. Raises MismatchError where that is another."""
    theirs = transport.island.register_corpus(pinned, corpus.digest) if pinned else corpus.digest
    if theirs != corpus.digest:
        raise MismatchError(
            f"corpus {pinned!r}", theirs, corpus.digest,
            "Another island trains on a text of the same name: prepare this one under another (--name).",
        )  # fmt: skip


def _number_of(name: str) -> int:
    """A number of its own for each name: where an island without a shard would begin."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
