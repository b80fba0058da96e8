"""A connection to all shards of a run, which are created and restored together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from archipelago.broker.commits import Image
from archipelago.broker.errors import ConfigError, MismatchError, RunExistsError
from archipelago.broker.manifest import SHARDS_MAX, Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.shards.reader import DisplayReader, ShardedReader
from archipelago.broker.transport import IslandClient, IslandTransport, ReaderClient, ReaderTransport, Transport

Kind = TypeVar("Kind", bound=ReaderTransport)
#: The code of the error that a shard of the run is left, in another state than that of the checkpoint.
SHARD_EXISTS = "broker.shard-exists"


class Shardable(Transport, Protocol):
    """A connection to a run, from which connections to its shards can be made."""

    def of_shard(self, shard: int) -> Transport:
        """Return a connection to one shard of the run, which this one closes."""
        ...


def of_shard(transport: ReaderTransport, manifest: Manifest, shard: int) -> Transport:
    """Return a connection to one shard of a run. That to a run with one shard is `transport` itself."""
    primary = cast(Shardable, transport)
    return primary.of_shard(shard) if manifest.shards > 1 else primary


class WholeRun:
    """A connection to all shards of a run, for its islands and readers.

    Attributes:
        island: The island's client of shard 0, which has what belongs to the run: names, leases, newcomers.

    Args:
        for_display: Whether `reader` leaves out further shards that cannot be reached (`DisplayReader`). Otherwise it
            raises UnreachableError.
    """

    def __init__(self, primary: ReaderTransport, manifest: Manifest, *, for_display: bool = False) -> None:
        self.run = primary.run
        self.shards: Sequence[Transport] = [of_shard(primary, manifest, k) for k in range(manifest.shards)]
        kind = DisplayReader if for_display else ShardedReader
        self.reader: ReaderClient = kind([shard.reader for shard in self.shards], manifest)
        self.island: IslandClient = self.shards[0].island


def whole(transport: Kind, manifest: Manifest, *, for_display: bool = False) -> Kind | WholeRun:
    """Return a connection to all shards of a run (`WholeRun`). That to a run with one shard is `transport` itself."""
    if manifest.shards == 1 or isinstance(transport, WholeRun):
        return transport
    return WholeRun(transport, manifest, for_display=for_display)


def opened(transport: Kind, *, for_display: bool = False) -> tuple[Manifest, Kind | WholeRun]:
    """Return the manifest of a run that exists, and a connection to all its shards. Raises BrokerError, ConfigError."""
    manifest = transport.reader.manifest()
    return manifest, whole(transport, manifest, for_display=for_display)


def shards_away(transport: ReaderTransport) -> Mapping[int, str]:
    """Return the shards that cannot be reached and that the reader leaves out, each with the reason."""
    return transport.reader.away if isinstance(transport.reader, ShardedReader) else {}


def shards_of(transport: IslandTransport) -> Sequence[IslandTransport]:
    """Return the connection to each shard. That of a run with one shard is `transport` itself."""
    return transport.shards if isinstance(transport, WholeRun) else [transport]


def with_shards(manifest: Manifest, shards: int) -> Manifest:
    """Return the manifest of a new run with that number of shards. Raises ConfigError (`config.value`)."""
    most = min(SHARDS_MAX, len(manifest.fragments))
    if not 1 <= shards <= most:
        raise ConfigError(
            f"a run with {len(manifest.fragments)} fragments cannot have {shards} shards",
            f"Each shard needs a fragment of its own: choose 1 to {most}, or more fragments (--sync.fragments).",
            code="config.value",
        )
    return replace(manifest, shards=shards)


def require_shards(manifest: Manifest, shards: int) -> None:
    """Raise MismatchError unless the run has that number of shards."""
    if manifest.shards != shards:
        remedy = f"Give {manifest.shards}, or create a run with another name."
        raise MismatchError("number of shards", str(manifest.shards), str(shards), remedy)


def create(transport: Transport, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
    """Create the run, with version 0 of every fragment in order. Raises RunExistsError.

    Each shard is created in a transaction of its own, shard 0 last: a run exists once it has its shard 0.
    """
    if manifest.shards == 1:
        transport.create(manifest, snapshots)
        return
    if transport.reader.uid() is not None:
        raise RunExistsError(f"a run {manifest.run!r} is here already", "Choose another name with --run.")
    for shard, fragments in reversed(list(enumerate(manifest.shard_layout.fragments))):
        try:
            of_shard(transport, manifest, shard).create(manifest.of_shard(shard), [snapshots[p] for p in fragments])
        except RunExistsError as error:
            raise RunExistsError(
                f"shard {shard} of a run {manifest.run!r} is here already",
                "Another process creates this run now, or one was interrupted: `archipelago rm "
                f"{manifest.run}` deletes what it has left. Or choose another name with --run.",
            ) from error


def restore(transport: Transport, images: Sequence[Image]) -> None:
    """Create the run from a checkpoint's parts, in order: each shard in a transaction, shard 0 last, as `create` does.

    Only the first process to begin restores the run. A shard that an interrupted process has restored from the same
    checkpoint stays as it is. Raises RunExistsError if the run exists, or another state of one of its shards.
    """
    for image in reversed(images):
        shard = of_shard(transport, image.manifest, image.manifest.shard or 0)
        try:
            shard.restore(image)
        except RunExistsError as error:
            if not image.manifest.shard:
                raise
            if shard.reader.uid() != image.manifest.uid or shard.reader.merger_state() != image.state:
                raise RunExistsError(
                    f"shard {image.manifest.shard} of the run {transport.run!r} is here, in another state than that of "
                    f"checkpoint {image.number}",
                    "Shards go back together, or work would count twice. If no other process restores the run now, "
                    f"stop its mergers, delete what is left with `archipelago rm {transport.run} --force`, and try "
                    "again. Islands without invitations may run on.",
                    code=SHARD_EXISTS,
                ) from error
