"""Scanned and rematerialised layers compared with unrolled ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import ModelConfig
from archipelago.islands.models import moe
from archipelago.islands.models.interface import Model, Params
from archipelago.islands.models.llama import Size
from archipelago.islands.models.moe import Routing
from archipelago.islands.models.registry import build
from archipelago.islands.models.transformer import Depth, transformer
from tests.islands.models import mini

SIZE = Size(width=16, layers=2, heads=2, hidden=24)
KINDS = {
    "dense": partial(transformer, SIZE),
    "experts": partial(moe.transformer, SIZE, Routing(experts=4, choices=2)),
}
TOKENS = np.random.default_rng(5).integers(0, 10, (4, 65), np.uint8)
BOTH = Depth(scan=True, rematerialise=True)
CASES = [
    ("dense", BOTH),
    pytest.param("experts", BOTH, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_the_passage_through_layers_changes_no_name_and_no_gradient(kind: str, depth: Depth) -> None:
    plain, other = KINDS[kind](jnp.float32), KINDS[kind](jnp.float32, depth=depth)
    assert other.tensors == plain.tensors
    params = mini.params_of(plain)

    def objective(model: Model, params: Params) -> tuple[jax.Array, Params]:
        slope = jax.value_and_grad(mini.as_task(model).objective, has_aux=True)
        (value, _), slopes = slope(params, jnp.asarray(TOKENS, jnp.int32))
        return value, slopes

    compiled = jax.jit(objective, static_argnums=0)
    (expected, slopes), (found, others) = compiled(plain, params), compiled(other, params)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    for name, slope in slopes.items():
        np.testing.assert_allclose(others[name], slope, rtol=1e-3, atol=1e-6, err_msg=name)


def test_the_settings_of_a_run_choose_the_passage_and_the_dtype() -> None:
    params = mini.params_of(build(ModelConfig("tiny")))

    def program(**settings: Any) -> str:
        model = build(ModelConfig(**settings))
        assert model.tensors == build(ModelConfig("tiny")).tensors
        with jax.numpy_dtype_promotion("standard"):  # attention and norms mix bfloat16 with float32
            traced = jax.make_jaxpr(jax.grad(model.loss))(params, TOKENS)
        assert {value.dtype for value in traced.out_avals} == {jnp.dtype("float32")}
        return str(traced)

    single, half = program(compute_dtype="float32"), program(compute_dtype="bfloat16")
    assert ("bf16[" in single, "bf16[" in half) == (False, True)
    assert ("scan[" in single, "scan[" in program(scan_layers=True)) == (False, True)
    recomputing = [ModelConfig(size).recomputes_layers for size in ("124m", "1b")]
    assert recomputing == [False, True] and not ModelConfig("1b", rematerialise="never").recomputes_layers
    assert ("remat" in single, "remat" in program(rematerialise="always")) == (False, True)
