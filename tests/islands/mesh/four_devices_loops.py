"""A user's loop whose tree has any shardings. `test_four_devices.py` runs this file in a process with four devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from archipelago.islands.sync.replica import Replica
from tests.conftest import optimising
from tests.islands.user_loop.any_framework import Values
from tests.islands.user_loop.own_runs import OwnRun, trained

SPECS: dict[str, tuple[Any, ...]] = {
    "whole": (), "rows": ("a",), "both": ("a", "b"), "columns": (None, ("a", "b")), "odd": (),
}  # fmt: skip
SHAPES = {"whole": (8,), "rows": (4, 3), "both": (4, 6), "columns": (3, 8), "odd": (5, 3)}


def plain(dtype: Any) -> dict[str, Any]:
    """Return the parameters on the default device."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {n: jax.random.normal(key, SHAPES[n]).astype(dtype) for n, key in zip(SHAPES, keys, strict=True)}


def on_mesh(axes: AxisType, dtype: Any) -> dict[str, Any]:
    """Return the parameters spread over all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"), axis_types=(axes, axes))
    return {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*SPECS[name])))  # type: ignore[no-untyped-call]
        for name, x in plain(dtype).items()
    }


def mixed(dtype: Any) -> dict[str, Any]:
    """Return parameters of which some are on one device, and others on a mesh."""
    spread = on_mesh(AxisType.Auto, dtype)
    return {**spread, "odd": jax.device_put(plain(dtype)["odd"], jax.devices()[1])}


def merged_after(params: Any) -> Values:
    """Train an island with the shardings of this tree. Check that they come back, and return what the run holds."""
    run = OwnRun(plain(jnp.float32))
    island = run.island(model=params)
    for _ in range(12):
        island.sync({name: trained(x) for name, x in island.params.items()})
    assert run.merger.state.closed >= 4
    for name, leaf in island.params.items():
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim), name
        assert getattr(leaf.sharding, "mesh", None) == getattr(params[name].sharding, "mesh", None), name
        assert leaf.dtype == params[name].dtype
    assert run.transport.reader.counters().refused == 0
    return run.merged()


def test_a_snapshot_arrives_on_the_default_device_of_the_loop() -> None:
    """The thread of the link prepares it. The array stays free to follow those of the loop to other devices."""
    run = OwnRun(plain(jnp.float32))
    with jax.default_device(jax.devices()[2]):
        replica = Replica(run.transport.reader.manifest())
    size = replica.sizes[0]
    with ThreadPoolExecutor(1) as link:
        new_N = link.submit(replica.prepare, 0, np.zeros(size, np.float32)).result()
    assert new_N.devices() == {jax.devices()[2]}
    assert (new_N + jax.device_put(np.ones(size, np.float32), jax.devices()[1])).devices() == {jax.devices()[1]}


@optimising()
def test_any_sharding_comes_back_and_gives_the_bits_of_one_device() -> None:
    for dtype, spread in (
        (jnp.float32, mixed(jnp.float32)),
        (jnp.bfloat16, on_mesh(AxisType.Explicit, jnp.bfloat16)),
    ):
        alone, together = merged_after(plain(dtype)), merged_after(spread)
        for name, value in alone.items():
            np.testing.assert_array_equal(together[name], value, err_msg=name)
