"""Leaves of a JAX tree that are not trained: which they are, their bytes, and whether a step has changed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.islands.own_loop.trained import frozen_changed, trained_by, trained_error


def chosen(trained: Any, names: Sequence[str], named: Callable[[Any], Mapping[str, Any]]) -> list[int]:
    """Return the places of the leaves that a script trains.

    Args:
        trained: A regular expression, a function from a name to a boolean, or a tree of booleans.
        names: The names of the leaves.
        named: Returns the leaves of such a tree by name.

    Raises:
        ConfigError: It does not fit the tree (`loop.trained`).
    """
    is_tree = not jax.tree_util.treedef_is_leaf(jax.tree.structure(trained)) and jax.tree.leaves(trained)
    if not is_tree:
        is_trained = trained_by(trained)
        return [place for place, name in enumerate(names) if is_trained(name)]
    mask, known = named(trained), {*names}
    if mask.keys() != known:
        more, less = sorted(mask.keys() - known), sorted(known - mask.keys())
        said = f"it has a leaf {more[0]!r}" if more else f"it has no leaf {less[0]!r}"
        raise trained_error(f"the tree of `trained` is not the tree of the parameters: {said}")
    for name, leaf in mask.items():
        if not isinstance(leaf, bool | np.bool_):
            raise trained_error(f"the leaf {name!r} of `trained` is {leaf!r:.60}, and not a boolean")
    return [place for place, name in enumerate(names) if mask[name]]


def is_weight(leaf: Any) -> bool:
    """Return whether a leaf is a weight: floating-point, or quantised to integers of at most eight bits.

    Wider integers are counters and keys, which are different on each island.
    """
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None or 0 in shape:
        return False
    is_narrow = jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).itemsize == 1
    return bool(jnp.issubdtype(dtype, jnp.floating) or is_narrow)


def pieces(leaf: Any) -> Iterator[memoryview]:
    """Yield the bytes of a leaf, which is copied to the memory of the host."""
    yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


class FrozenLeaves:
    """Finds out whether a step has changed a frozen leaf, without waiting for the device.

    A step returns new arrays for leaves that it does not change. The device adds up their bits, which takes as long as
    reading them once, and the sums are compared at a later call.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        """Note the leaves as they should be."""
        self._seen = _references(named)
        self._expected = _sums(named)
        self._pending: list[tuple[tuple[str, ...], Any]] = []

    def offer(self, named: Mapping[str, Any]) -> None:
        """Take the leaves that a step returned. Raises ConfigError (`loop.frozen-changed`) if earlier ones differed."""
        self.require_same()
        if not self._pending and any(self._seen[name]() is not leaf for name, leaf in named.items()):
            self._seen = _references(named)
            self._pending = _sums(named)

    def require_same(self, *, waits: bool = False) -> None:
        """Compare what the device has added up by now, or with `waits` all.

        Raises:
            ConfigError: A leaf has changed (`loop.frozen-changed`).
        """
        if not self._pending or not (waits or all(sums.is_ready() for _, sums in self._pending)):
            return
        found, self._pending = _by_name(self._pending), []
        for name, expected in _by_name(self._expected).items():
            if found[name] != expected:
                raise frozen_changed(name)


def _references(named: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return references to the leaves that do not keep arrays in memory. Scalars of numpy allow no such references."""
    return {name: _reference(leaf) for name, leaf in named.items()}


def _reference(leaf: Any) -> Callable[[], Any]:
    return (lambda: leaf) if isinstance(leaf, np.generic) else weakref.ref(leaf)


def _sums(named: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the sums of the leaves' bits, which the devices begin to compute: one array for each sharding.

    A step may return leaves in other shardings than it got, so the groups of two calls may differ.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, leaf in named.items():
        groups.setdefault(leaf.sharding if getattr(leaf, "committed", False) else None, {})[name] = leaf
    return [(tuple(group), _add_up(list(group.values()))) for group in groups.values()]


def _by_name(sums: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, int]:
    """Return the sum of each leaf by name, once the devices have computed it."""
    return {name: int(value) for names, values in sums for name, value in zip(names, np.asarray(values), strict=True)}


@jax.jit
def _add_up(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.sum(_bits(leaf), dtype=jnp.uint32) for leaf in leaves])


def _bits(leaf: jax.Array) -> jax.Array:
    """Return the elements as unsigned integers."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.astype(jnp.uint32)
    width = int(jnp.finfo(leaf.dtype).bits)  # type: ignore[no-untyped-call]
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}.get(width)
    bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32) if unsigned is None else leaf, unsigned or jnp.uint32)
    return bits.astype(jnp.uint32)
