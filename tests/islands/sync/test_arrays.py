"""Copies of arrays on the device."""

from __future__ import annotations

import jax
import numpy as np

from archipelago.islands.sync.arrays import device_copy


def test_a_copy_shares_memory_with_neither_the_host_nor_another_copy() -> None:
    for _ in range(32):  # whether a CPU keeps reading the host's memory depends on its alignment
        host = np.ones(1 << 12, np.float32)
        first = device_copy({"x": host})
        second = device_copy(first)
        host[:] = 5.0
        assert first["x"][0] == 1.0
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(first)
        assert first["x"].is_deleted()
        assert second["x"][0] == 1.0
