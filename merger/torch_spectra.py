"""The spectra of `merger.spectra`, with products of int8 matrices by PyTorch, on a processor.

PyTorch brings oneDNN, whose products use a processor's VNNI or AMX fully. Those of XLA took two to three times as long.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import torch

from archipelago.merger.spectra import Array, Matrix, Products, in_rows, with_power

#: An int32 holds the sum of twice as many products of two int8.
_TERMS_MAX: Final = 1 << 16
#: The rows that are rounded at once, so that their sums in float64 stay in the core's cache.
_ROUNDED_ROWS: Final = 32


def power(matrix_RC: Matrix, exponent: float) -> Matrix:
    """Do what `with_power` does. PyTorch has one thread in this process from then on."""
    return with_power(matrix_RC, exponent, TorchProducts())


class TorchProducts(Products):
    """Products in int8, with sums in int32. An integer of 14 bits is 128 times an int8 plus another int8."""

    def integers(self, values: Array) -> Array:
        return torch.from_numpy(values).round().to(torch.int16).numpy()

    def product(self, left_AK: Array, right: Array, axis: int) -> Array:
        right_KB = right if axis == 0 else right.T
        return in_rows(partial(_product, left_AK, *_bytes(right_KB)), left_AK, right_KB.shape[1])


def _product(left_AK: Array, other_high_KB: torch.Tensor, other_low_KB: torch.Tensor, rows: slice) -> Matrix:
    """Return these rows of a product. The public function for it has no result in int32."""
    torch.set_num_threads(1)  # of this thread: `in_rows` shares the work, and OpenMP would start a team for each
    high_AK, low_AK = _bytes(left_AK[rows])
    products = []
    for start in range(0, left_AK.shape[1], _TERMS_MAX):
        terms = slice(start, start + _TERMS_MAX)
        for left, of_left in ((high_AK, 2.0**7), (low_AK, 1.0)):
            for other, of_other in ((other_high_KB, 2.0**7), (other_low_KB, 1.0)):
                products.append((torch._int_mm(left[:, terms], other[terms]), of_left * of_other))
    out_AB = torch.empty((len(high_AK), other_high_KB.shape[1]))
    for start in range(0, len(out_AB), _ROUNDED_ROWS):
        part = slice(start, start + _ROUNDED_ROWS)
        total = torch.zeros_like(out_AB[part], dtype=torch.float64)
        for product_AB, unit in products:
            total.add_(product_AB[part], alpha=unit)
        out_AB[part] = total
    found_AB: Matrix = out_AB.numpy()
    return found_AB


def _bytes(integers: Array) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy((integers >> 7).astype(np.int8)), torch.from_numpy((integers & 127).astype(np.int8))
