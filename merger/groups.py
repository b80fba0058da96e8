"""Decide by which rule each tensor of a fragment is merged. Pure, and without JAX, so that costs can be predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor

#: The merge rule of first moments, which no config names.
MOMENT = "moment"


@dataclass(frozen=True)
class Group:
    """One tensor in the fragment's vector.

    Attributes:
        start: Its first element.
        length: The number of its elements.
        rule: The name of its merge rule.
        shape: Its shape. Only matrices, and stacks of them along the leading axes, have a spectrum.
        exponent: The power of the singular values that `isotropic` leaves.
        limit: Only for first moments: a larger norm of all first moments of a contribution is clipped to this one.
    """

    start: int
    length: int
    rule: str
    shape: tuple[int, ...] = ()
    exponent: float = 0.0
    limit: float = math.inf

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.length

    @property
    def changes_spectrum(self) -> bool:
        """Whether `isotropic` differs from `rda` for this tensor. Vectors, rows and columns have one singular value."""
        return self.rule == "isotropic" and len(self.shape) > 1 and min(self.shape[-2:]) > 1


def groups(
    layout: Sequence[tuple[Tensor, int]], config: MergeConfig, moment_limit: float = math.inf
) -> tuple[Group, ...]:
    """Return the tensors of one fragment in order, from its row of `Manifest.layout`. Empty tensors are left out.

    `moment_limit` is the largest norm of a fragment's first moments.
    """
    return tuple(_group(tensor, offset, config, moment_limit) for tensor, offset in layout if tensor.size)


def parameters_end(groups: tuple[Group, ...]) -> int:
    """Return one past the last parameter. First moments, if there are any, come after it."""
    return max((group.end for group in groups if group.rule != MOMENT), default=0)


def _group(tensor: Tensor, offset: int, config: MergeConfig, moment_limit: float) -> Group:
    if tensor.kind == "moment":
        return Group(offset, tensor.size, MOMENT, limit=moment_limit)
    is_embedding = tensor.kind == "embedding"
    rule, exponent = (
        (config.embedding, config.embedding_exponent) if is_embedding else (config.rest, config.rest_exponent)
    )
    if rule != "isotropic":  # then the shape decides nothing, and equal groups share a program
        return Group(offset, tensor.size, rule)
    if len(tensor.shape) > 1 and min(tensor.shape[-2:]) > config.isotropic_side_max:
        return Group(offset, tensor.size, "rda")
    return Group(offset, tensor.size, rule, tensor.shape, exponent)
