"""The codecs in PyTorch give the bits of the numpy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.codecs import CODECS, TOP_BLOCK, Vector, body_of, codec
from tests import pytorch
from tests.tiers import examples

torch = pytorch.required()

from archipelago.islands.pytorch import codecs as ours  # noqa: E402 - it imports torch

pytestmark = pytest.mark.full

SEEDS = st.integers(0, 2**32 - 1)
#: The ends of a block of each codec, and sizes in between.
SIZES = st.sampled_from([1, 127, 128, 129, 255, 256, 257, TOP_BLOCK - 1, TOP_BLOCK, TOP_BLOCK + 1]) | st.integers(
    1, 9000
)
#: Shares of ordinary values, of zeros and subnormals, and of any bits, which include infinity and all kinds of NaN.
SHARES = st.sampled_from([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.9, 0.1, 0.0), (0.9, 0.0, 0.001), (0.5, 0.4, 0.1)])


def values(seed: int, elements: int, shares: tuple[float, float, float]) -> Vector:
    """Return values whose blocks differ in magnitude, with the shares of SHARES."""
    random = np.random.default_rng(seed)
    ordinary, small = shares[:2]
    drawn_N = random.standard_normal(elements).astype(np.float32)
    with np.errstate(all="ignore"):
        drawn_N *= np.repeat(np.exp2(random.integers(-140, 127, -(-elements // 64))), 64)[:elements].astype(np.float32)
        drawn_N = np.where(random.random(elements) < 0.1, np.round(drawn_N), drawn_N)  # many are equal
    kind = random.random(elements)
    tiny_N = (random.integers(0, 2**23, elements, np.uint32) * random.integers(0, 2, elements, np.uint32)).view(
        np.float32
    )
    any_N = random.integers(0, 2**32, elements, np.uint32).view(np.float32)
    return np.where(kind < ordinary, drawn_N, np.where(kind < ordinary + small, tiny_N, any_N))


def in_torch(name: str, values_N: Vector) -> tuple[bytes, Any]:
    parts = ours.CODECS[name].quantise(torch.from_numpy(values_N))
    restored_N = ours.CODECS[name].restore(parts, values_N.size)
    return body_of(tuple(part.numpy() for part in parts)), restored_N.numpy()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=examples(200))
@given(seed=SEEDS, elements=SIZES, shares=SHARES)
def test_the_bits_are_those_of_numpy(name: str, seed: int, elements: int, shares: tuple[float, float, float]) -> None:
    values_N = values(seed, elements, shares)
    body, restored_N = in_torch(name, values_N)
    reference = codec(name)
    assert body == reference.encode(values_N)
    assert restored_N.view(np.uint32).tobytes() == reference.decode(body, elements).view(np.uint32).tobytes()


def test_every_codec_exists_in_pytorch() -> None:
    assert ours.CODECS.keys() == CODECS.keys()
