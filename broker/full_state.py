"""The full state of a fragment: the arrays that a merger needs to go on from one version of it.

A checkpoint holds these arrays. A compaction in Redis holds them as two payloads: the published parameters, which
islands download, too, and everything that only mergers need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import Vector
from archipelago.broker.config import WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Snapshot
from archipelago.broker.wire import digest, pack

#: The name of the exact parameters among the arrays of a merger.
PARAMETERS = "params"
MAGIC = b"ARO2"
_PREFIX = len(MAGIC) + 4


@dataclass(frozen=True)
class Compaction:
    """The full state of a fragment as payloads. A merger that loads the run merges later rounds again.

    Attributes:
        payload: The published parameters, as a full snapshot.
        outer: The exact parameters and outer optimiser state, which only mergers read; empty for version 0.
    """

    snapshot: Snapshot
    payload: bytes
    outer: bytes = b""


@dataclass(frozen=True, eq=False)
class FullState:
    """The full state of a fragment at one version.

    Attributes:
        published_N: What the islands hold, float32.
        own: The exact parameters (PARAMETERS) and the leaves of the outer optimiser's state, each under its path;
            empty for version 0, of which both are known.
    """

    snapshot: Snapshot
    published_N: Vector
    own: Mapping[str, NDArray[Any]]

    def packed(self, wire: WireConfig) -> Compaction:
        """Return the payloads, with a header that announces the snapshot's size and digest."""
        payload = pack(self.published_N, wire.full, wire.full_zstd_level)
        header = replace(self.snapshot, bytes=len(payload), digest=digest(payload))
        return Compaction(header, payload, joined(self.own) if self.own else b"")


def joined(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return named arrays as bytes: MAGIC, the length of a header in msgpack, the header, and the arrays in order."""
    header = msgpack.packb([[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()])
    return b"".join([MAGIC, len(header).to_bytes(4, "big"), header, *map(octets, arrays.values())])


def octets(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in row-major order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def separated(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the named arrays in bytes that `joined` made, as views of these. Raises WireError for any others."""
    try:
        start = _PREFIX + int.from_bytes(data[len(MAGIC) : _PREFIX], "big")
        if data[: len(MAGIC)] != MAGIC or start > len(data):
            raise ValueError("they are damaged, or of another version")
        out = {}
        for name, kind, shape in msgpack.unpackb(data[_PREFIX:start]):
            count = math.prod(shape)
            if not isinstance(name, str) or count < 0:
                raise ValueError("an impossible name or shape")
            out[name] = np.frombuffer(data, np.dtype(kind), count, start).reshape(shape)
            start += out[name].nbytes
        if start != len(data):
            raise ValueError("bytes after the last array")
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
        SyntaxError,  # numpy parses the names of dtypes
        msgpack.exceptions.UnpackException,
    ) as error:
        raise WireError(f"the arrays of a full state cannot be read ({error!r:.100})") from None
    return out
