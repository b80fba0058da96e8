"""Trees of JAX arrays: the names of their leaves, those that are merged, and those that are not trained.

Leaves of float32, bfloat16 and float16 are merged, in float32. Other floating-point leaves are refused, and all others
stay the island's own. If only some leaves are trained, the other weights are frozen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.islands.sync.arrays import own_pieces, sharding_of
from archipelago.islands.user_loop.tensors import KindOf, frozen_changed, nothing_trained, trained_by

#: Any tree of arrays of JAX. It has no type of its own.
PyTree = Any
MERGED_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
#: Longer names are refused, because every worker keeps all names.
NAME_MAX = 512


@dataclass(frozen=True)
class TreeLayout:
    """The leaves of a tree by name.

    Attributes:
        structure: The tree without its leaves.
        names: The names of all leaves in order.
        templates: The shape, dtype and sharding of each merged leaf by name. The values are not kept, because they
            would take the memory of a whole model.
        frozen: The shape, dtype and sharding of each weight that is not trained, by name.
        own: The leaves that are not merged, by name.
    """

    structure: Any
    names: Sequence[str]
    templates: Mapping[str, jax.ShapeDtypeStruct]
    frozen: Mapping[str, jax.ShapeDtypeStruct]
    own: Mapping[str, Any]

    @classmethod
    def of(cls, tree: Any, trained: Any = None) -> TreeLayout:
        """Return the layout of a tree of parameters. `trained` is as in `archipelago.create`.

        Raises:
            ConfigError: A leaf has no name of its own (`loop.unnamed`), a dtype that cannot be merged (`loop.dtype`),
                or is on other devices than the rest, if any is spread over processes (`loop.sharded`), no leaf is a
                floating-point array or none is trained (`loop.nothing`), or `trained` does not fit the tree
                (`loop.argument`).
        """
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [name_of(path) for path, _ in pairs]
        leaves = dict(zip(names, (leaf for _, leaf in pairs), strict=True))
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(
                f"several leaves of the parameters have the name {min(repeated)!r}",
                "Rename a key: the parts of a name are joined by dots.",
                code="loop.unnamed",
            )
        frozen: dict[str, jax.ShapeDtypeStruct] = {}
        if trained is None:
            templates = {name: _template(leaf) for name, leaf in leaves.items() if _is_merged(name, leaf)}
        else:
            is_trained = trained_by(trained)
            chosen = {name: leaf for name, leaf in leaves.items() if is_trained(name)}
            templates = {name: _template(leaf) for name, leaf in chosen.items() if _require_trainable(name, leaf)}
            others = {name: leaf for name, leaf in leaves.items() if name not in chosen}
            frozen = {name: _template(leaf) for name, leaf in others.items() if is_weight(leaf)}
        if not templates:
            raise nothing_trained(
                trained,
                names,
                "Give the floating-point arrays that the optimiser trains, such as `nnx.state(model, nnx.Param)`.",
            )
        if any(map(_is_spread, [*templates.values(), *frozen.values()])):
            _require_everywhere(templates)
        own = {name: leaf for name, leaf in leaves.items() if name not in templates}
        return cls(structure, names, templates, frozen, own)

    @property
    def is_spread(self) -> bool:
        """Whether the leaves are spread over several processes."""
        return _is_spread(next(iter(self.templates.values())))

    @property
    def unmerged(self) -> set[str]:
        """The names of the leaves whose type is not merged."""
        return self.own.keys() - self.frozen.keys()

    def leaves_of(self, tree: Any) -> dict[str, Any]:
        """Return the merged leaves of a tree of this layout, by name."""
        leaves = dict(zip(self.names, jax.tree.leaves(tree), strict=True))
        return {name: leaves[name] for name in self.templates}

    def tensors(self, kind_of: KindOf) -> tuple[Tensor, ...]:
        """Return the tensors of a manifest, in the order of the tree."""
        return tuple(Tensor(name, tuple(leaf.shape), kind_of(name)) for name, leaf in self.templates.items())


def _template(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return a leaf without its values. An array on the default device may be moved by the loop's own computations."""
    may_move = isinstance(leaf, jax.Array) and not leaf.committed
    sharding = None if may_move else getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def name_of(path: Sequence[Any]) -> str:
    """Return the name of a leaf, such as `layers.0.kernel`."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]  # a variable of flax nnx
    is_named = path and not any(isinstance(key, jax.tree_util.FlattenedIndexKey) for key in path)
    name = jax.tree_util.keystr(tuple(path), simple=True, separator=".") if is_named else ""
    if not name or len(name) > NAME_MAX or not name.isprintable():
        raise ConfigError(
            f"a leaf of the parameters has no name that can be used ({jax.tree_util.keystr(tuple(path))[:80]!r})",
            f"Give a dictionary of arrays, with keys of at most {NAME_MAX} printable characters in all, or register "
            "your class with `jax.tree_util.register_pytree_with_keys`.",
            code="loop.unnamed",
        )
    return name


def _require_trainable(name: str, leaf: Any) -> bool:
    """Return whether a leaf has elements. Raise ConfigError (`loop.dtype`) unless it is a floating-point array."""
    if 0 in getattr(leaf, "shape", ()):
        return False
    if not _is_merged(name, leaf):
        raise ConfigError(
            f"the leaf {name!r} is trained, and it is of {getattr(leaf, 'dtype', type(leaf).__name__)}",
            "Only floating-point arrays are trained. Choose fewer leaves with `trained`.",
            code="loop.dtype",
        )
    return True


def _is_merged(name: str, leaf: Any) -> bool:
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None or not jnp.issubdtype(dtype, jnp.floating) or 0 in shape:
        return False
    if dtype not in MERGED_DTYPES:
        raise ConfigError(
            f"the leaf {name!r} is of {dtype}, which is not merged",
            "Convert it to float32, bfloat16 or float16, or keep it out of the tree. A script freezes it by `trained`.",
            code="loop.dtype",
        )
    return True


def _is_spread(template: jax.ShapeDtypeStruct) -> bool:
    sharding = sharding_of(template)
    return sharding is not None and not sharding.is_fully_addressable


def _require_everywhere(templates: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise ConfigError (`loop.sharded`) unless all leaves are on all devices of all processes."""
    for name, template in templates.items():
        sharding = sharding_of(template)
        if sharding is None or sharding.device_set != {*jax.devices()}:
            raise ConfigError(
                f"the leaf {name!r} is not on all devices, and another leaf is spread over several processes",
                "Put all leaves on one mesh of `jax.devices()`: `PartitionSpec()` keeps a leaf whole on each.",
                code="loop.sharded",
            )


def host_vector(leaf: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return an array as a float32 vector in the memory of the host."""
    return np.asarray(leaf).astype(np.float32).reshape(-1)


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
        self._pending: dict[str, Any] = {}

    def offer(self, named: Mapping[str, Any]) -> None:
        """Take the leaves that a step returned. Raises ConfigError (`loop.frozen-changed`) if earlier ones differed."""
        self.require_same()
        if not self._pending and any(self._seen[name]() is not leaf for name, leaf in named.items()):
            self._seen = _references(named)
            self._pending = _sums(named)

    def require_same(self, *, waits: bool = False) -> None:
        """Compare what the device has added up; with `waits`, all. Raises ConfigError (`loop.frozen-changed`)."""
        if not waits and not all(found.is_ready() for sums in self._pending.values() for found in sums):
            return
        pending, self._pending = self._pending, {}
        for name, found in pending.items():
            if list(map(int, found)) != list(map(int, self._expected[name])):
                raise frozen_changed(name)


def _references(named: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return references to the leaves that do not keep arrays in memory. Scalars of numpy allow no such references."""
    return {name: _reference(leaf) for name, leaf in named.items()}


def _reference(leaf: Any) -> Callable[[], Any]:
    return (lambda: leaf) if isinstance(leaf, np.generic) else weakref.ref(leaf)


def _sums(named: Mapping[str, Any]) -> dict[str, list[jax.Array]]:
    """Return the sums of the bits of this process's pieces of each leaf. The devices begin to compute them."""
    return {name: [_add_up(piece) for piece in own_pieces(leaf)] for name, leaf in named.items()}


@jax.jit
def _add_up(leaf: jax.Array) -> jax.Array:
    return jnp.sum(_bits(leaf), dtype=jnp.uint32)


def _bits(leaf: jax.Array) -> jax.Array:
    """Return the elements as unsigned integers."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.astype(jnp.uint32)
    width = int(jnp.finfo(leaf.dtype).bits)  # type: ignore[no-untyped-call]
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}.get(width)
    bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32) if unsigned is None else leaf, unsigned or jnp.uint32)
    return bits.astype(jnp.uint32)
