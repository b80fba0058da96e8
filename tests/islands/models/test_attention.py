"""What models compute in another way on a GPU. cuDNN itself needs one, so another function stands in for it."""

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


@pytest.mark.parametrize("cudnn", [_missing, lambda mixed: mixed * jnp.nan])
def test_a_gpu_without_a_sound_cudnn_uses_xla(
    cudnn: Callable[[jax.Array], jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _with(monkeypatch, cudnn)
    _attended(jnp.bfloat16)
    assert used[-1] is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_chosen_by_a_product_are_those_chosen_by_number(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    table_VxW = jnp.asarray(random.normal(size=(7, 5)), dtype)
    tokens_BxT = jnp.asarray(random.integers(0, 7, (3, 40)), jnp.uint8)
    weights_BxTxW = jnp.asarray(random.normal(size=(3, 40, 5)), dtype)

    def found(backend: str) -> tuple[jax.Array, jax.Array]:
        monkeypatch.setattr(jax, "default_backend", lambda: backend)

        def weighted(table_VxW: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows_BxTxW = layers.rows_of(table_VxW, tokens_BxT)
            return (rows_BxTxW * weights_BxTxW).sum().astype(jnp.float32), rows_BxTxW

        gradient, rows = jax.grad(weighted, has_aux=True)(table_VxW)
        return rows, gradient

    (rows, gradient), (rows_gpu, gradient_gpu) = found("cpu"), found("gpu")
    assert (rows == rows_gpu).all()
    np.testing.assert_allclose(gradient.astype(jnp.float32), gradient_gpu.astype(jnp.float32), rtol=0.05, atol=0.05)
