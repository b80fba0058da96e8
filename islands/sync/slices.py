"""How a fragment is encoded where its shards lie: which blocks of its vector each device encodes.

On the wire, a fragment is one vector in blocks of a codec. A tensor that is spread over n devices is first brought into
rows, so that each device has a contiguous piece of the vector. A device encodes the whole blocks of its piece. What is
left at both ends of a piece, fewer elements than a block each, is an edge. The edges, and the tensors that every device
has whole, are encoded by all devices alike. So the bytes are those of one device, and no device gathers a tensor.

This module only plans, with whole numbers. `sharded_encoding` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.manifest import Tensor
from archipelago.islands.sync.arrays import Rows


@dataclass(frozen=True)
class Spread:
    """One tensor that is spread over several devices, as rows of which each device has equally many.

    Attributes:
        offset: Its first element in the fragment's vector.
        axes: The axes of the mesh that it is spread over, the slowest one first.
        devices: The number n of the devices along these axes.
        merged: The number of its leading dimensions that make up its rows.
        block: The elements of a block.
        steps: The axes of each dimension of the rows, on their way from the tensor's placement to that of its rows. The
            compiler moves a part of a tensor between devices only if one dimension gives its axes to another.
    """

    tensor: Tensor
    offset: int
    axes: tuple[str, ...]
    devices: int
    merged: int
    block: int
    steps: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def rows(self) -> int:
        return math.prod(self.tensor.shape[: self.merged])

    @property
    def padded_rows(self) -> int:
        """The number of rows after padding, which the number of devices divides."""
        return -(-self.rows // self.devices) * self.devices

    @property
    def length(self) -> int:
        """The elements L that each device has, with padding."""
        return self.padded_rows // self.devices * math.prod(self.tensor.shape[self.merged :])

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """For each device: the elements before its first whole block, its whole blocks, and the elements after them."""
        found = []
        for device in range(self.devices):
            start = device * self.length
            own = min(max(self.tensor.size - start, 0), self.length)
            head = min(-(self.offset + start) % self.block, own)
            blocks, tail = divmod(own - head, self.block)
            found.append((head, blocks, tail))
        return tuple(found)

    @property
    def blocks(self) -> int:
        """The largest number of whole blocks of a device."""
        return max(blocks for _, blocks, _ in self.pieces)

    @property
    def has_edges(self) -> bool:
        """Whether a device has anything but whole blocks, or fewer blocks than another."""
        return len(set(self.pieces)) > 1 or any(head or tail for head, _, tail in self.pieces)


class Segment(NamedTuple):
    """Consecutive blocks of the vector that one device has encoded together.

    Attributes:
        device: The index of the device along all axes of the plan.
        first: The first of these blocks among those that the device has encoded.
        blocks: Their number.
    """

    device: int
    first: int
    blocks: int


@dataclass(frozen=True)
class SlicePlan:
    """The slices of one fragment. A device encodes its whole blocks of each spread tensor, and then the rest.

    Attributes:
        axes: All axes that tensors are spread over.
        devices: The number of devices along them.
        rest: The rest of the vector in order: the name of a whole tensor, or the first and the last + 1 of some edges.
        edges: The place of each edge element among the edges of all devices. Each device has two blocks of places: one
            for the elements before its whole blocks, and one for those after them.
        segments: The blocks of the vector in order.
    """

    axes: tuple[str, ...]
    devices: int
    spread: tuple[Spread, ...]
    rest: tuple[str | tuple[int, int], ...]
    edges: NDArray[np.int32]
    places: int
    segments: tuple[Segment, ...]

    @cached_property
    def edge_sources(self) -> NDArray[np.int32]:
        """For each place the index of its edge element; the number of edge elements where there is none."""
        out = np.full(self.places, self.edges.size, np.int32)
        out[self.edges] = np.arange(self.edges.size, dtype=np.int32)
        return out


#: Where a tensor is: the axes of each of its dimensions. Those of the last dimensions may be missing.
TensorAxes = tuple[tuple[str, ...], ...]


def spread_of(tensor: Tensor, offset: int, placed: TensorAxes, mesh: Mapping[str, int], block: int) -> Spread | None:
    """Return how a tensor is sliced; None for one that every device has whole, or that is too small to be sliced."""
    used = [dimension for dimension, axes in enumerate(placed) if axes]
    if not used:
        return None
    merged = max(1, used[0])
    by_dimension = [*placed, *[()] * (len(tensor.shape) - len(placed))]
    now = [tuple(by_dimension[0]) if merged == 1 else (), *(tuple(axes) for axes in by_dimension[merged:])]
    steps = [tuple(now)]
    for dimension in range(1, len(now)):
        if now[dimension]:
            now[0], now[dimension] = (*now[0], *now[dimension]), ()
            steps.append(tuple(now))
    spread_over = tuple(axis for axes in placed for axis in axes)
    devices = math.prod(mesh[axis] for axis in spread_over)
    one = Spread(tensor, offset, spread_over, devices, merged, block, tuple(steps))
    return one if devices > 1 and one.rows >= devices and one.length >= 2 * block else None


class _Planner:
    """Collects the blocks of a fragment in the order of its vector."""

    def __init__(self, axes: Sequence[str], mesh: Mapping[str, int], spread: Sequence[Spread]) -> None:
        self.axes, self.mesh = axes, mesh
        self.block = spread[0].block if spread else 1
        self.rest: list[str | tuple[int, int]] = []
        self.edges: list[int] = []
        self.segments: list[Segment] = []
        self.places = 0
        self._waiting = 0  # elements of the rest since the last segment
        self._own = 0  # blocks of the spread tensors so far, as one device has encoded them
        self._rest = sum(one.blocks for one in spread)  # the rest comes after all of them

    def add_whole(self, tensor: Tensor) -> None:
        self.rest.append(tensor.name)
        self._waiting += tensor.size

    def add_spread(self, one: Spread) -> None:
        for device, (head, blocks, tail) in enumerate(one.pieces):
            place = self.places + 2 * one.block * device
            self._add_edges(place, head)
            if blocks:
                self.settle()
                self.segments.append(Segment(self._number(one, device), self._own, blocks))
            self._add_edges(place + one.block, tail)
        self.places += 2 * one.block * one.devices if one.has_edges else 0
        self._own += one.blocks

    def settle(self) -> None:
        """Put what waits into a segment of the first device. It ends with a block, or with the vector."""
        if self._waiting:
            blocks = -(-self._waiting // self.block)
            self.segments.append(Segment(0, self._rest, blocks))
            self._rest, self._waiting = self._rest + blocks, 0

    def _add_edges(self, place: int, count: int) -> None:
        if not count:
            return
        start = len(self.edges)
        self.edges.extend(range(place, place + count))
        if self.rest and not isinstance(self.rest[-1], str):
            start = self.rest.pop()[0]  # type: ignore[assignment]
        self.rest.append((start, len(self.edges)))
        self._waiting += count

    def _number(self, one: Spread, device: int) -> int:
        """Return the index along all axes of a device by its index along the axes of one tensor."""
        sizes = [self.mesh[axis] for axis in one.axes]
        own = dict(zip(one.axes, np.unravel_index(device, sizes), strict=True))
        return int(np.ravel_multi_index([own.get(axis, 0) for axis in self.axes], [self.mesh[a] for a in self.axes]))


def plan_slices(rows: Rows, placed: Sequence[TensorAxes], mesh: Mapping[str, int], block: int) -> SlicePlan:
    """Return the slices of a fragment.

    Args:
        rows: The fragment's tensors with their offsets.
        placed: Where each tensor is.
        mesh: The size of each axis.
        block: The elements of a block of the codec.
    """
    sliced = [spread_of(*row, where, mesh, block) for row, where in zip(rows, placed, strict=True)]
    spread = [one for one in sliced if one is not None]
    axes = tuple(axis for axis in mesh if any(axis in one.axes for one in spread))
    planner = _Planner(axes, mesh, spread)
    for (tensor, _), one in zip(rows, sliced, strict=True):
        if one is None:
            planner.add_whole(tensor)
        else:
            planner.add_spread(one)
    planner.settle()
    edges, devices = np.array(planner.edges, np.int32), math.prod(mesh[axis] for axis in axes)
    return SlicePlan(axes, devices, tuple(spread), tuple(planner.rest), edges, planner.places, tuple(planner.segments))
