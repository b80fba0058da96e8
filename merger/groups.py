"""Groups: the rule by which each tensor of a fragment is merged, and in which blocks. No JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from archipelago.broker.config import MergeConfig
from archipelago.broker.manifest import Tensor
from archipelago.merger.spectra import Matrix, operations


@dataclass(frozen=True)
class Group:
    """One tensor in the fragment's vector.

    Attributes:
        start: Its first element.
        length: The number of its elements.
        rule: The name of its merge rule.
        shape: Its shape. Only matrices, and stacks of them along the leading axes, have a spectrum.
        exponent: The power of the singular values that `isotropic` leaves, 0 or ½.
        blocks: Into how many blocks `isotropic` cuts the shorter side of each matrix. Each block is merged as a matrix
            of its own, and keeps its norm.
    """

    start: int
    length: int
    rule: str
    shape: tuple[int, ...] = ()
    exponent: float = 0.0
    blocks: int = 1

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.length

    @property
    def changes_spectrum(self) -> bool:
        """Whether `isotropic` differs from `rda` for this tensor. Vectors, rows and columns have one singular value."""
        return self.rule == "isotropic" and len(self.shape) > 1 and min(self.shape[-2:]) > 1

    @property
    def operations(self) -> float:
        """The floating-point operations of changing the spectra of all blocks."""
        *stack, rows, columns = self.shape
        side, length = sorted((rows, columns))
        sides = [len(part) for part in np.array_split(range(side), self.blocks)]
        return math.prod(stack) * sum(operations((part, length), self.exponent) for part in sides)

    def matrices(self, fragment_N: Matrix) -> list[Matrix]:
        """Return the blocks as views of a fragment's vector."""
        *_, rows, columns = self.shape
        stack = fragment_N[self.start : self.end].reshape(-1, rows, columns)
        return [part_RC for each_RC in stack for part_RC in np.array_split(each_RC, self.blocks, int(rows > columns))]


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
    blocks = math.ceil(min(tensor.shape[-2:], default=1) / config.isotropic_side_max)
    return Group(offset, tensor.size, rule, tensor.shape, exponent, blocks if len(tensor.shape) > 1 else 1)


def cycle_work(tensors: Sequence[Tensor], config: MergeConfig) -> tuple[float, int]:
    """Return the floating-point operations and the elements of all spectra of a cycle: each fragment is merged once."""
    changed = [group for group in groups([(tensor, 0) for tensor in tensors], config) if group.changes_spectrum]
    return sum(group.operations for group in changed), sum(group.length for group in changed)
