"""Scanned and rematerialised layers compared with unrolled ones."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import ModelConfig
from archipelago.islands.models import moe, vision
from archipelago.islands.models.depth import Depth
from archipelago.islands.models.dimensions import Size
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.registry import build
from archipelago.islands.models.transformer import transformer

SIZE = Size(width=32, layers=2, heads=2, hidden=48)
KINDS = {
    "dense": partial(transformer, SIZE),
    "experts": partial(moe.transformer, SIZE, Routing(experts=4, choices=2)),
    "images": partial(vision.classifier, SIZE, vision.Images(side=8, patch=2, brightest=16, classes=10)),
}
TOKENS = np.random.default_rng(5).integers(0, 10, (4, 65), np.uint8)


BOTH = Depth(scan=True, rematerialise=True)
CASES = [
    ("dense", Depth(scan=True)),
    pytest.param("dense", Depth(rematerialise=True), marks=pytest.mark.full),
    pytest.param("experts", BOTH, marks=pytest.mark.full),
    pytest.param("images", BOTH, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_the_passage_through_layers_changes_no_name_and_no_gradient(kind: str, depth: Depth) -> None:
    plain, other = KINDS[kind](jnp.float32), KINDS[kind](jnp.float32, depth=depth)
    assert other.tensors == plain.tensors
    params = plain.init(0)
    jax.tree.map(np.testing.assert_array_equal, other.init(0), params)

    def objective(model: Model, params: Params) -> tuple[jax.Array, Params]:
        (value, _), slopes = jax.value_and_grad(model.objective, has_aux=True)(params, jnp.asarray(TOKENS, jnp.int32))
        return value, slopes

    compiled = jax.jit(objective, static_argnums=0)
    (expected, slopes), (found, others) = compiled(plain, params), compiled(other, params)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    for name, slope in slopes.items():
        np.testing.assert_allclose(others[name], slope, rtol=1e-3, atol=1e-6, err_msg=name)


def test_bfloat16_layers_are_stacked_in_bfloat16() -> None:
    """So the copy takes half of the bytes. An unrolled layer computes with the same kernels."""
    scanned = transformer(SIZE, jnp.bfloat16, depth=Depth(scan=True))
    params = jax.eval_shape(lambda: scanned.init(0))
    with jax.numpy_dtype_promotion("standard"):
        text = str(jax.make_jaxpr(scanned.loss)(params, TOKENS))
    assert "bf16[2,32,48]" in text
    assert "f32[2,32,48]" not in text.replace("bf16[2,32,48]", "")


def test_the_program_of_a_layer_is_compiled_once() -> None:
    """Forward and backward passes of a scan do not grow with the layers, unlike those that are unrolled."""

    def matrix_products(layers: int, depth: Depth) -> int:
        model = transformer(Size(32, layers, 2, 48), jnp.float32, depth=depth)
        params = jax.eval_shape(lambda: model.init(0))
        return jax.jit(jax.grad(model.loss)).lower(params, TOKENS).as_text().count("stablehlo.dot_general")

    assert matrix_products(4, Depth()) > 1.7 * matrix_products(2, Depth())
    assert matrix_products(4, Depth(scan=True)) == matrix_products(2, Depth(scan=True))


def test_rematerialisation_takes_less_memory() -> None:
    tokens = jnp.zeros((16, 129), jnp.uint8)

    def temporary_bytes(depth: Depth) -> int:
        model = transformer(Size(32, 6, 2, 48), jnp.float32, depth=depth)
        params = jax.eval_shape(lambda: model.init(0))
        analysis = jax.jit(jax.grad(model.loss)).lower(params, tokens).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert temporary_bytes(BOTH) < 0.5 * temporary_bytes(Depth())


def test_the_settings_of_a_run_choose_the_passage() -> None:
    model = build(ModelConfig(scan_layers=True))
    params = jax.eval_shape(lambda: model.init(0))
    assert "scan[" in str(jax.make_jaxpr(model.loss)(params, TOKENS))
    assert model.tensors == build("tiny").tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_compute_in_the_dtype_of_the_settings_and_gradients_are_float32(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    model = build(ModelConfig(compute_dtype=dtype))
    params = jax.eval_shape(lambda: model.init(0))
    with jax.numpy_dtype_promotion("standard"):  # attention and norms mix bfloat16 with float32
        program = jax.make_jaxpr(jax.grad(model.loss))(params, TOKENS)
    assert ("bf16[" in str(program)) == (dtype == "bfloat16")
    assert {value.dtype for value in (*jax.tree.leaves(params), *program.out_avals)} == {jnp.dtype("float32")}
