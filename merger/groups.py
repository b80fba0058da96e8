"""Decide by which rule each tensor of a fragment is merged. Pure, and without JAX, so that costs can be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor


@dataclass(frozen=True)
class Group:
    """One tensor in the fragment's vector.

    Attributes:
        start: Its first element.
        length: The number of its elements.
        rule: The name of its merge rule.
        shape: Its shape. Only matrices, and stacks of them along the leading axes, have a spectrum.
        exponent: The power of the singular values that `isotropic` leaves.
    """

    start: int
    length: int
    rule: str
    shape: tuple[int, ...] = ()
    exponent: float = 0.0

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.length

    @property
    def changes_spectrum(self) -> bool:
        """Whether `isotropic` differs from `rda` for this tensor. Vectors, rows and columns have one singular value."""
        return self.rule == "isotropic" and len(self.shape) > 1 and min(self.shape[-2:]) > 1


def groups(layout: Sequence[tuple[Tensor, int]], config: MergeConfig) -> tuple[Group, ...]:
    """Return the tensors of one fragment in order, from its row of `Manifest.layout`. Empty tensors are left out."""
    return tuple(_group(tensor, offset, config) for tensor, offset in layout if tensor.size)


def _group(tensor: Tensor, offset: int, config: MergeConfig) -> Group:
    is_embedding = tensor.kind == "embedding"
    rule, exponent = (
        (config.embedding, config.embedding_exponent) if is_embedding else (config.rest, config.rest_exponent)
    )
    if rule != "isotropic":  # then the shape decides nothing, and equal groups share a program
        return Group(offset, tensor.size, rule)
    if len(tensor.shape) > 1 and min(tensor.shape[-2:]) > config.isotropic_side_max:
        return Group(offset, tensor.size, "rda")
    return Group(offset, tensor.size, rule, tensor.shape, exponent)
