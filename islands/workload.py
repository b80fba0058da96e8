"""What our worker trains: a model, its inner optimiser, its data and its evaluation.

It is one of our models on a corpus (`CorpusWorkload`), or a users' task (`archipelago.islands.tasks`). The worker sees
no difference.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from archipelago.broker.errors import MismatchError
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import IslandTransport
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.data.supply import Supply
from archipelago.islands.evaluation import Slices, corpus_slices
from archipelago.islands.evaluator import run_corpus
from archipelago.islands.inner import InnerState, InnerSteps, MomentBounds
from archipelago.islands.models.interface import Params
from archipelago.islands.sync.connection.link import Link


class Workload(ABC):
    """What an island trains.

    Attributes:
        steps: The compiled inner steps.
        first_state: Returns the inner optimiser's state for parameters; None for that of the run's config.
        bounds: The bounds on the moments that a peer hands over; None for those of the run's config.
    """

    steps: InnerSteps
    first_state: Callable[[Params], InnerState] | None = None
    bounds: MomentBounds | None = None

    @property
    @abstractmethod
    def shards(self) -> list[str]:
        """The shards that an island may lease from its beginning on, in its order of preference."""

    @abstractmethod
    def supply(self, name: str, link: Link, *, rehearses: bool) -> Supply:
        """Return the batches of the island of that name. One that rehearses has a link that never starts."""

    @abstractmethod
    def register(self, transport: IslandTransport) -> None:
        """Tell the run which data this island reads. Raises MismatchError if the run knows other data by that name."""

    @abstractmethod
    def evaluation(self) -> Callable[[Params], Slices] | None:
        """Return what compiles the evaluation for parameters; None if this machine cannot evaluate the run."""


@dataclass
class CorpusWorkload(Workload):
    """One of our models, on a corpus.

    Attributes:
        manifest: The run.
        pinned: The name of a corpus on this machine that replaces the run's, if any.
        corpus: The training text.
        steps: The compiled inner steps.
    """

    manifest: Manifest
    pinned: str | None
    corpus: OpenCorpus
    steps: InnerSteps

    @property
    def shards(self) -> list[str]:
        """All shards of the corpus."""
        config = self.manifest.config
        return shard_order(config.data.shards, config.seed, self.pinned or "")

    def supply(self, name: str, link: Link, *, rehearses: bool) -> Supply:
        """Return windows of the text, or examples."""
        return Batches(self.corpus.train, self.manifest.config, link.lease, fallback=number_of(name))

    def register(self, transport: IslandTransport) -> None:
        """Register a pinned text under its name. Raises MismatchError if the run knows another text by that name."""
        register_text(self.corpus, transport, self.pinned)

    def evaluation(self) -> Callable[[Params], Slices] | None:
        """Return what compiles the evaluation on the run's held-out text; None without that text on this machine."""
        corpus = run_corpus(self.manifest, self.corpus, self.pinned)
        return corpus_slices(self.manifest.config, corpus) if corpus is not None else None


def register_text(corpus: OpenCorpus, transport: IslandTransport, pinned: str | None) -> None:
    """Register a pinned text under its name. Raises MismatchError if the run knows another text by that name."""
    registered = transport.island.register_corpus(pinned, corpus.digest) if pinned else corpus.digest
    if registered != corpus.digest:
        raise MismatchError(
            f"corpus {pinned!r}", registered, corpus.digest,
            "Another island trains on a different text of this name. Prepare this text under another name (--name).",
        )  # fmt: skip


def number_of(name: str) -> int:
    """Return a number that depends on the name. An island without a lease begins to read there."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
