"""A broker in dictionaries, for tests and virtual time. Its connections behave like connections to one Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from archipelago.broker.control import fields_in
from archipelago.broker.errors import RunExistsError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.islands import MemoryIsland
from archipelago.broker.memory.merger import MemoryMerger
from archipelago.broker.memory.reader import MemoryReader
from archipelago.broker.memory.state import MemoryRun, MemoryState, key_of
from archipelago.broker.messages import (
    Snapshot,
)
from archipelago.broker.transport import (
    Image,
)


class MemoryBroker(MemoryState):
    """A broker in memory, which its connections share."""

    def connect(self, run: str) -> MemoryTransport:
        """Connect to one run."""
        return MemoryTransport(self, run)


class MemoryTransport:
    """See `broker.transport.Transport`."""

    def __init__(self, broker: MemoryState, run: str, shard: int | None = None) -> None:
        self.run = run
        self._broker = broker
        self._key = key_of(run, shard)
        self.reader = MemoryReader(broker, run, shard)
        self.island = MemoryIsland(broker, self._key)
        self.merger = MemoryMerger(broker, self._key)

    def of_shard(self, shard: int) -> MemoryTransport:
        """Return a connection to one shard of the run."""
        return MemoryTransport(self._broker, self.run, shard)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        with self._broker.changed:
            if self._key in self._broker.runs:
                raise RunExistsError(f"a run {self.run!r} is here already", "Choose another name.")
            self._broker.runs[self._key] = MemoryRun(
                Manifest.from_fields(manifest.to_fields()).of_shard(manifest.shard),
                {s.fragment: (s, payload) for s, payload in snapshots},
                {s.fragment: s for s, _ in snapshots},
            )

    def restore(self, image: Image) -> None:
        with self._broker.changed:
            self.create(image.manifest, image.snapshots)
            run = self._broker.runs[self._key]
            run.outer = {p: data for p, data in enumerate(image.outers) if data}
            run.state, run.tape, run.restored = image.state, list(image.tape), (image.number, image.round)
            run.control = fields_in(image.state)
            run.evaluations, run.cursors = list(image.evaluations), dict(image.cursors)
            for contribution, payload in image.pending:
                run.add(contribution, payload)
            run.books = asdict(image.books)

    def mend_manifest(self, manifest: Manifest) -> bool:
        with self._broker.changed:
            return self._key in self._broker.runs

    def close(self) -> None:
        pass
