"""Inner optimiser state between users' loops: a digest of its layout comes first, so that only the same state fits.

The message of a handover describes no arrays, and the state of another optimiser may have as many bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Handover
from archipelago.islands.sync import recovery


def layout_digest(layout: Iterable[tuple[str, Sequence[int], str]]) -> NDArray[np.uint8]:
    """Return 16 bytes that stand for the names, shapes and dtypes of arrays in order."""
    listed = [[name, list(shape), dtype] for name, shape, dtype in layout]
    return np.frombuffer(hashlib.sha256(json.dumps(listed).encode()).digest()[:16], np.uint8)


def decode(handover: Handover, payload: bytes, digest: NDArray[np.uint8], like: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the arrays that a peer sent after the digest of their layout.

    Args:
        handover: The message that announces the payload.
        payload: What the peer sent.
        digest: The digest of the layout that this loop has.
        like: Arrays of the expected shapes and dtypes.

    Raises:
        WireError: The peer's state has another layout (`handover.shape`), or is damaged.
    """
    found = recovery.decode(handover, payload, [digest, *like])
    if found[0].tobytes() != digest.tobytes():
        raise WireError("the peer's optimiser state is of another optimiser or model", code="handover.shape")
    return found[1:]
