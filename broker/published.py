"""The newest published parameters of a fragment: its newest full snapshot and the differences after it."""

from __future__ import annotations

from typing import NamedTuple

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.transport import ReaderClient
from archipelago.broker.wire import Unpacking, digest, digest_of

#: How often the newest version is read again because a newer full snapshot has replaced differences meanwhile.
TRIES = 4


class Published(NamedTuple):
    """A version of a fragment.

    Attributes:
        snapshot: Its header.
        params_N: Its parameters, float32.
        bytes: How many bytes were downloaded.
    """

    snapshot: Snapshot
    params_N: Vector
    bytes: int


def newest(reader: ReaderClient, manifest: Manifest, p: int) -> Published:
    """Download the newest version of fragment `p`.

    Raises:
        WireError: It cannot be read, or what can be read leads to other parameters (`wire.snapshot`).
    """
    tries = 0
    while True:
        full = full_snapshot(reader, manifest, p)
        head = reader.heads()[p]
        if head is None or head.version <= full.snapshot.version or not manifest.config.wire.sends_differences:
            is_same = head is not None and head.round == full.snapshot.round and head.held == full.snapshot.held
            return full._replace(snapshot=head) if is_same and head is not None else full
        found = _later(reader, manifest, full, head)
        if found is not None:
            return found
        if (tries := tries + 1) == TRIES:
            version = full.snapshot.version
            raise WireError(
                f"the differences of fragment {p} after version {version} do not lead to version {head.version}",
                code="wire.snapshot",
            )


def full_snapshot(reader: ReaderClient, manifest: Manifest, p: int) -> Published:
    """Download the newest full snapshot of fragment `p`. Raises WireError for a payload that was not announced."""
    unpacking = Unpacking(manifest.sizes[p])
    snapshot, payload = reader.fragment(p, unpacking.arrived)
    if digest(payload) != snapshot.digest or snapshot.fragment != p:
        raise WireError(f"the snapshot of fragment {p} is not the announced one", code="wire.snapshot")
    return Published(snapshot, unpacking.finish(payload), len(payload))


def _later(reader: ReaderClient, manifest: Manifest, full: Published, head: Snapshot) -> Published | None:
    """Return the version of the header, or None if a difference is missing or they lead to other parameters."""
    vector_N, size = full.params_N, full.bytes
    for version in range(full.snapshot.version + 1, head.version + 1):
        unpacking = onto(manifest, head.fragment, vector_N)
        payload = reader.difference(head.fragment, version, unpacking.arrived)
        if payload is None:
            return None
        vector_N = unpacking.finish(payload)
        size += len(payload)
    return Published(head, vector_N, size) if digest_of(vector_N) == head.held else None


def onto(manifest: Manifest, p: int, before_N: Vector) -> Unpacking:
    """Return what adds a difference that arrives to the parameters before it."""
    return Unpacking(manifest.sizes[p], manifest.config.wire.down, before_N)
