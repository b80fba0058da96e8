"""The codecs of contributions in PyTorch, on the model's device. The bits are those of `broker.codecs`.

PyTorch computes little with unsigned integers of 16 and 32 bits, so `quantise` and `restore` are written again here.
The bits of numbers are int32, and a shift to the right of a negative number is masked. Divisors are tensors, because
CUDA multiplies by the reciprocal of a plain number, which rounds differently. Every operation on a whole vector is a
pass over the device's memory, so what can be done in place or in bytes is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from archipelago.broker.codecs import (
    HUGE,
    INT4_BLOCK,
    INT8_BLOCK,
    ROUNDER,
    TINY,
    TOP_BLOCK,
    TOP_KEPT,
    TOP_LARGE,
    TOP_UNITS,
)

#: A tensor of PyTorch, which has no types here: PyTorch is optional.
Tensor = Any
#: The tensors of one encoded vector. The bits of bfloat16 numbers are int16, which stands for uint16.
Parts = tuple[Tensor, ...]

#: The bits of numpy's NaN in bfloat16.
_NAN = 0x7FC0
_SIGN_FREE = 0x7FFFFFFF


class TorchCodec(NamedTuple):
    """One codec on a device.

    Attributes:
        quantise: From a float32 vector [N] to flat tensors.
        restore: Called as `restore(parts, N)`. Returns the float32 vector that the merger reads.
    """

    quantise: Callable[[Tensor], Parts]
    restore: Callable[[Parts, int], Tensor]


def _blocks(values_N: Tensor, size: int) -> Tensor:
    """Return the vector as rows of `size` elements. The last row is padded with zeros, which copies the vector."""
    missing = -values_N.shape[0] % size
    padded_N = torch.nn.functional.pad(values_N, (0, missing)) if missing else values_N
    return padded_N.reshape(-1, size)


def _last_apart(quantise: Callable[[Tensor], Parts], size: int) -> Callable[[Tensor], Parts]:
    """Return the function that encodes a last block of fewer than `size` elements apart, so that nothing is padded."""

    def quantised(values_N: Tensor) -> Parts:
        whole = values_N.shape[0] // size * size
        if whole in (0, values_N.shape[0]):
            return quantise(values_N)
        blocks, last = quantise(values_N[:whole]), quantise(values_N[whole:])
        return tuple(torch.cat(part) for part in zip(blocks, last, strict=True))

    return quantised


def _to_bfloat16(values: Tensor) -> Tensor:
    """Return the upper halves of float32 numbers as int16, rounded to nearest, ties to even."""
    bits = values.view(torch.int32)
    upper = (bits >> 16) & 0xFFFF
    # A NaN keeps its upper half. The sum of no other number overflows int32, but it may change the sign.
    rounded = ((bits.to(torch.int64) & 0xFFFFFFFF) + 0x7FFF + (upper & 1)) >> 16
    return torch.where(values.isnan(), upper | 0x40, rounded).to(torch.int16)


def _from_bfloat16(bits: Tensor) -> Tensor:
    return (bits.to(torch.int32) << 16).view(torch.float32)


def _scales(top: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales as the bits of bfloat16, and each block's divisor: 1 where zero, infinity where unsound."""
    bits = _to_bfloat16(torch.where(top < float(TINY), 0.0, top))
    bits = bits.masked_fill(top.isnan(), _NAN)  # CUDA's arithmetic gives NaN other bits than a CPU's
    scale = _from_bfloat16(bits)
    return bits, torch.where(scale > 0, scale, 1.0).masked_fill_(scale.isnan(), torch.inf)


def _tops(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each row; NaN if it is above HUGE, or the row contains NaN or infinity."""
    least, most = blocks.aminmax(dim=1)
    top = torch.maximum(-least, most)
    return torch.where(top <= float(HUGE), top, torch.nan)


def _ratios(rows: Tensor, divisor: Tensor) -> Tensor:
    """Return the rows, each divided by its divisor. Those of unsound blocks are zeros and NaN."""
    return rows * (1.0 / divisor)[:, None]


def _sound(codes: Tensor, divisor: Tensor, zero: int) -> Tensor:
    """Write the code of zero into the rows of unsound blocks. Codes have fewer bytes to pass over than ratios."""
    return codes.masked_fill_(divisor.isinf()[:, None], zero)


def _quantise_int8(values_N: Tensor) -> Parts:
    blocks = _blocks(values_N, INT8_BLOCK)
    bits, divisor = _scales(_tops(blocks) * (1 / 127))
    return bits, _sound(_ratios(blocks, divisor).round_().to(torch.int8), divisor, 0).reshape(-1)


def _restored(codes: Tensor, bits: Tensor) -> Tensor:
    """Return each row of codes (int8) times its scale, as one float32 vector."""
    return codes.to(torch.float32).mul_(_from_bfloat16(bits)[:, None]).reshape(-1)


def _restore_int8(parts: Parts, elements: int) -> Tensor:
    bits, codes = parts
    return _restored(codes.reshape(-1, INT8_BLOCK), bits)[:elements]


def _quantise_int4(values_N: Tensor) -> Parts:
    blocks = _blocks(values_N, INT4_BLOCK)
    bits, divisor = _scales(_tops(blocks) * (1 / 7))
    # Adding ROUNDER leaves the code in the lowest four bits of a float32.
    codes = _ratios(blocks, divisor).add_(float(ROUNDER)).view(torch.int32).to(torch.uint8)
    half = INT4_BLOCK // 2
    return bits, _sound((codes[:, :half] & 15) | (codes[:, half:] << 4), divisor, 0x88).reshape(-1)


def _restore_int4(parts: Parts, elements: int) -> Tensor:
    bits, packed = parts
    rows = packed.reshape(-1, INT4_BLOCK // 2)
    codes = torch.cat([rows & 15, rows >> 4], dim=1).view(torch.int8).sub_(8)
    return _restored(codes, bits)[:elements]


def _quantise_top(values_N: Tensor) -> Parts:
    blocks = _blocks(values_N, TOP_BLOCK)
    top = _tops(blocks)
    kept = _largest(blocks, TOP_KEPT)
    values = blocks.gather(1, kept)
    _, divisor = _scales(top)
    whole = _sound(_ratios(values.abs(), divisor).mul_(float(TOP_UNITS)).round_().to(torch.int32), divisor, 0)
    large = whole >= TOP_LARGE
    scales = [_mean(whole, large) * divisor, _mean(whole, ~large) * divisor]
    scales = [torch.where(top.isnan(), top, torch.where(top < float(TINY), 0.0, scale)) for scale in scales]
    bits = torch.stack([_to_bfloat16(scale) for scale in scales], dim=1)
    codes = (large.to(torch.uint8) | ((values < 0).to(torch.uint8) << 1)).reshape(-1, 4)
    packed = codes[:, 0] | (codes[:, 1] << 2) | (codes[:, 2] << 4) | (codes[:, 3] << 6)
    first, second = kept.reshape(-1, 2).unbind(dim=1)
    places = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1).to(torch.uint8)
    return bits.reshape(-1), places.reshape(-1), packed


def _largest(blocks: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest magnitudes of each row, ascending. Earlier indices win ties.

    The bits of float32 magnitudes, read as integers, have the order of the magnitudes.
    """
    magnitudes, width = blocks.view(torch.int32) & _SIGN_FREE, blocks.shape[1]
    least = magnitudes.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    larger, equal = magnitudes > least, magnitudes == least
    room = count - larger.sum(dim=1, keepdim=True)
    chosen = larger | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    places = torch.where(chosen, torch.arange(width, device=blocks.device), width)
    return places.topk(count, dim=1, largest=False, sorted=True).values


def _mean(whole: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of each row's chosen values, divided by TOP_UNITS, as `broker.codecs` rounds it."""
    total, count = torch.where(chosen, whole, 0).sum(dim=1), chosen.sum(dim=1)
    return ((total << 11) // count.clamp(min=1)).to(torch.float32) * (2.0**-11 / float(TOP_UNITS))


def _restore_top(parts: Parts, elements: int) -> Tensor:
    bits, places, packed = parts
    low, middle, high = places.reshape(-1, 3).to(torch.int64).unbind(dim=1)
    kept = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).reshape(-1, TOP_KEPT)
    codes = torch.stack([(packed >> (2 * i)) & 3 for i in range(4)], dim=1).reshape(-1, TOP_KEPT)
    scales = _from_bfloat16(bits).reshape(-1, 2)
    magnitude = torch.where((codes & 1) > 0, scales[:, :1], scales[:, 1:])
    values = torch.where(codes > 1, -magnitude, magnitude)
    blocks = values.new_zeros((kept.shape[0], TOP_BLOCK)).scatter_(1, kept, values)
    return blocks.reshape(-1)[:elements]


#: By the names of `broker.codecs.CODECS`.
CODECS: dict[str, TorchCodec] = {
    "float32": TorchCodec(lambda values_N: (values_N,), lambda parts, elements: parts[0]),
    "bfloat16": TorchCodec(
        lambda values_N: (_to_bfloat16(values_N),), lambda parts, elements: _from_bfloat16(parts[0])
    ),
    "int8": TorchCodec(_last_apart(_quantise_int8, INT8_BLOCK), _restore_int8),
    "int4": TorchCodec(_last_apart(_quantise_int4, INT4_BLOCK), _restore_int4),
    "top3": TorchCodec(_quantise_top, _restore_top),
}
