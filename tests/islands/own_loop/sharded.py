"""Train one tree on one device and on a mesh of four, and compare: `python -m tests.islands.own_loop.sharded KIND`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.islands.own_loop.own_runs import OwnRun, trained

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


def merged_after(params: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Train an island with the shardings of this tree. Check that they come back, and return what the run holds."""
    run = OwnRun(plain(jnp.float32))
    island = run.island(template=params)
    for _ in range(12):
        island.sync({name: trained(x) for name, x in island.params.items()})
    assert run.merger.state.closed >= 4
    for name, leaf in island.params.items():
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim), name
        assert getattr(leaf.sharding, "mesh", None) == getattr(params[name].sharding, "mesh", None), name
        assert leaf.dtype == params[name].dtype
    assert run.transport.reader.books().refused == 0
    return {name: np.asarray(value) for name, value in run.merged().items()}


def main(kind: str, dtype: str) -> None:
    """Compare a mesh of that kind with one device."""
    assert jax.device_count() == 4
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    spread = mixed(jnp.dtype(dtype)) if kind == "mixed" else on_mesh(kinds[kind], jnp.dtype(dtype))
    alone, together = merged_after(plain(jnp.dtype(dtype))), merged_after(spread)
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
