"""The choice of an implementation of attention. cuDNN itself needs a GPU, so another function stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.islands.models import layers

plain = jax.nn.dot_product_attention


@pytest.fixture(autouse=True)
def _no_choice_is_kept() -> Iterator[None]:
    layers.flash_kind.cache_clear()
    yield
    layers.flash_kind.cache_clear()


def _with(monkeypatch: pytest.MonkeyPatch, cudnn: Callable[[jax.Array], jax.Array]) -> list[str | None]:
    asked: list[str | None] = []

    def stand_in(*inputs: jax.Array, implementation: str | None = None, **more: Any) -> jax.Array:
        asked.append(implementation)
        mixed = plain(*inputs, implementation="xla", **more)
        return cudnn(mixed) if implementation == "cudnn" else mixed

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return asked


def _attended(dtype: Any) -> jax.Array:
    """Attention inside a program that is being traced, as a model calls it."""
    inputs = np.random.default_rng(1).normal(size=(3, 1, 16, 2, 8)).astype(dtype)
    with jax.numpy_dtype_promotion("standard"):  # attention mixes bfloat16 with float32
        found: jax.Array = jax.jit(lambda inputs: layers.attend(*inputs))(tuple(inputs))
    return found


def test_bfloat16_on_a_gpu_uses_cudnn_and_float32_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _with(monkeypatch, lambda mixed: mixed)
    assert layers.flash_kind("cpu", "bfloat16", 2, 8) is None
    _attended(np.float32)
    assert used == [None]
    _attended(jnp.bfloat16)
    assert used[-1] == "cudnn"


def _missing(mixed: jax.Array) -> jax.Array:
    raise RuntimeError("cuDNN is not detected.")


@pytest.mark.parametrize("cudnn", [_missing, lambda mixed: 1.2 * mixed, lambda mixed: mixed * jnp.nan])
def test_a_gpu_without_a_sound_cudnn_uses_xla(
    cudnn: Callable[[jax.Array], jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _with(monkeypatch, cudnn)
    _attended(jnp.bfloat16)
    assert used[-1] is None
