"""Full states of fragments as bytes. Whoever reads them has compared their digest, but another version may differ."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from archipelago.broker.config import WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.full_state import MAGIC, FullState, joined, separated
from archipelago.broker.wire import unpack
from tests import samples

ARRAYS: dict[str, Any] = {
    "params": np.arange(8, dtype=np.float32),
    "state.rounds": np.asarray(3, np.int32),
    "empty": np.zeros((0, 2)),
}


def test_arrays_survive_bytes_without_a_copy() -> None:
    data = joined(ARRAYS)
    found = separated(data)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape, found[name].tolist()) == (
            array.dtype,
            array.shape,
            array.tolist(),
        )
    assert not found["params"].flags.owndata


def test_a_full_state_survives_a_compaction() -> None:
    snapshot = samples.commit([]).snapshot
    for own in (ARRAYS, dict[str, Any]()):
        packed = FullState(snapshot, np.arange(8, dtype=np.float32), own).packed(WireConfig())
        assert unpack(packed.payload, 8).tolist() == [*map(float, range(8))]
        assert list(separated(packed.outer) if packed.outer else {}) == list(own)
        assert packed.snapshot.bytes == len(packed.payload)


def headed(header: Any, body: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return MAGIC + len(packed).to_bytes(4, "big") + packed + body


OTHERS = [
    b"", b"ARO1", MAGIC, headed(b""), headed(b"\x91" * 5000), headed(7), headed([1.0]), headed([["a", "float32"]]),
    headed([["a", "float32", [8]]], b"\0" * 31), headed([["a", "float32", [8]]], b"\0" * 33),
    headed([["a", "float32", [1 << 62]]]), headed([["a", "float32", [-1]]]), headed([["a", "object", [1]]], b"\0" * 8),
    headed([["a", ",", [8]]], b"\0" * 32), headed([["a", "float32", "x"]], b"\0" * 32), headed([[7, "float32", [0]]]),
]  # fmt: skip


@pytest.mark.parametrize("data", OTHERS, ids=range(len(OTHERS)))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        separated(data)
