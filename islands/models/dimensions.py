"""The dimensions of our transformers, and the constants that their weights depend on. This module does not import JAX.

A PyTorch script that trains one of our models needs them too.
"""

from __future__ import annotations

from dataclasses import dataclass

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Size:
    """The dimensions of a transformer.

    Attributes:
        width: The width of the residual stream.
        layers: The number of layers.
        heads: The number of attention heads.
        hidden: The width inside the gated MLP, about 8/3 of `width`.
    """

    width: int
    layers: int
    heads: int
    hidden: int


#: The dense transformers by the name of their size.
DENSE: dict[str, Size] = {
    "tiny": Size(width=64, layers=2, heads=2, hidden=176),
    "small": Size(width=128, layers=5, heads=4, hidden=344),
    "base": Size(width=512, layers=8, heads=8, hidden=1368),
    "124m": Size(width=896, layers=13, heads=14, hidden=2368),
    "1b": Size(width=2048, layers=20, heads=16, hidden=5504),
}
