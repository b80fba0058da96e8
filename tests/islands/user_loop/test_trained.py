"""Runs that train some leaves of a tree: the others are compared by digest, never sent, and may not change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago import SyncConfig, create, join
from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.redis.transport import connect
from archipelago.islands.user_loop.tree import FrozenLeaves, TreeLayout
from tests.failing import failing
from tests.islands.user_loop.own_runs import OwnRun, only_kernels_trained

SYNC = SyncConfig(interval=4, fragments=2, quorum=1, grace=0.0)


def tree(base: float = 1.0) -> dict[str, Any]:
    """Return a model with adapters, and with leaves that are neither trained nor compared."""
    return {
        "base": {"kernel": jnp.full((8, 4), base, jnp.bfloat16), "packed": jnp.ones((4,), jnp.int8)},
        "lora": {"a": jnp.ones((8, 2)), "b": jnp.zeros((2, 4))},
        "key": jax.random.key(0),
        "count": jnp.int32(7),
    }


@pytest.fixture
def made(url: str) -> str:
    assert create(url, "own", tree(), sync=SYNC, steps=1000, trained="lora")
    return url


def test_a_choice_that_cannot_be_used_is_refused() -> None:
    wrongs: dict[str, list[Any]] = {
        "loop.nothing": ["nowhere", lambda name: False],
        "loop.argument": ["(", True, {}],
        "loop.dtype": ["packed|lora", "count|lora", "key|lora"],
    }  # fmt: skip
    for code, choices in wrongs.items():
        for choice in choices:
            with failing(ConfigError, code):
                create("fakeredis://never", "own", tree(), steps=10, trained=choice)
            with failing(ConfigError, code):
                join("fakeredis://never", "own", tree(), trained=choice)


def test_leaves_without_elements_are_never_trained() -> None:
    params = {**tree(), "lora.none": jnp.zeros((0, 4))}
    assert TreeLayout.of(params, "lora").templates.keys() == {"lora.a", "lora.b"}


def test_an_island_sends_nothing_but_what_is_trained() -> None:
    run = OwnRun(trained="kernel")
    island = run.island()
    began = island.params
    island.play(12, only_kernels_trained)
    assert sum(run.manifest.sizes) == 32
    assert set(run.merged()) == {"layers.0.kernel", "layers.1.kernel"}
    for number in range(2):
        assert (run.merged()[f"layers.{number}.kernel"] < 0.5 + number).all()
        assert island.params["layers"][number]["bias"] is began["layers"][number]["bias"]
    assert island.params["embedding"] is began["embedding"]


def test_other_frozen_leaves_are_refused_and_the_first_is_named(made: str) -> None:
    kernel, packed = (tree()["base"][name] for name in ("kernel", "packed"))
    others: list[tuple[dict[str, Any], str]] = [
        ({"kernel": kernel.at[3, 3].add(0.5), "packed": packed}, "base.kernel"),
        ({"kernel": kernel.astype(jnp.float32), "packed": packed}, "base.kernel"),
        ({"kernel": kernel, "packed": jnp.ones((5,), jnp.int8)}, "base.packed"),
        ({"kernel": kernel}, "base.packed"),
        ({"kernel": kernel, "packed": packed, "bias": jnp.ones(4)}, "base.bias"),
    ]
    for base, named in others:
        with failing(MismatchError, "loop.other-frozen") as caught, join(made, "own", {**tree(), "base": base}):
            pass
        assert named in caught.value.what


def test_a_step_that_changes_a_frozen_leaf_is_an_error(made: str) -> None:
    """Weight decay changes leaves whose gradients are zero."""
    decayed = jax.jit(lambda params: jax.tree.map(lambda x: x * 0.99, params))
    floats = {"base": {"kernel": jnp.ones((8, 4))}, "lora": tree()["lora"]}
    assert create(made, "decayed", floats, sync=SYNC, steps=1000, trained="lora")
    with failing(ConfigError, "loop.frozen-changed") as caught, join(made, "decayed", floats) as run:
        params = run.params
        for _ in range(1000):
            params = run.sync(decayed(params))
    assert "base.kernel" in caught.value.what


@pytest.mark.parametrize("syncs", [0, 1])
def test_a_frozen_leaf_that_the_last_steps_changed_is_an_error_at_the_end(made: str, syncs: int) -> None:
    """Nothing was sent since, or just now, so no later `sync` has compared the leaves."""
    with failing(ConfigError, "loop.frozen-changed") as caught, join(made, "own", tree()) as run:
        params = run.params
        params["base"]["kernel"] = params["base"]["kernel"] * 1.5
        for _ in range(1 + syncs):
            params = run.sync(params)
    assert "base.kernel" in caught.value.what
    assert connect(made, "own").reader.counters().published <= syncs, "the newest progress is not sent"
    (note,) = [note for note in connect(made, "own").reader.notes(10) if note.kind == "left"]
    assert "base.kernel" in note.text


def test_new_arrays_of_the_same_bits_are_no_change() -> None:
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")
    made = {dtype: jnp.arange(-4, 4).astype(dtype) for dtype in dtypes} | {"numpy": np.ones(8)}
    for changed in dtypes:
        leaves = FrozenLeaves(made)
        copies = {name: np.array(leaf) for name, leaf in made.items()}
        leaves.offer(copies)
        leaves.require_same(waits=True)
        copies[changed] = copies[changed].copy()
        copies[changed][3] = 3
        leaves.offer(dict(copies))
        with failing(ConfigError, "loop.frozen-changed") as caught:
            leaves.require_same(waits=True)
        assert changed in caught.value.what


def test_a_step_may_return_frozen_leaves_of_another_kind_or_place() -> None:
    """Arrays of numpy, arrays that JAX may move and arrays of one device all come back as arrays of that device."""
    device = jax.devices()[0]
    named = {"a": jnp.ones(2), "b": np.full(3, 2.0), "c": jax.device_put(jnp.ones(4), device), "d": np.float32(3)}
    placed = {name: jax.device_put(leaf, device) for name, leaf in named.items()}
    leaves = FrozenLeaves(named)
    leaves.offer(named)
    assert not leaves._pending
    for changed in (placed, {**placed, "b": placed["b"] + 1}):
        leaves.require_same(waits=True)
        leaves.offer(changed)
    with failing(ConfigError, "loop.frozen-changed") as caught:
        leaves.require_same(waits=True)
    assert "'b'" in caught.value.what
