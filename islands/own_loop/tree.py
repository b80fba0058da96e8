"""Trees of JAX arrays: the names of their leaves, those that are merged, and a check of what a loop returns.

Leaves of float32, bfloat16 and float16 are merged, in float32. All others stay the island's own. If only some leaves
are trained, the other weights are frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Tensor
from archipelago.islands.own_loop.frozen import FrozenLeaves, chosen, is_weight, pieces
from archipelago.islands.own_loop.tensors import KindOf
from archipelago.islands.own_loop.trained import nothing_trained

MERGED_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
#: Longer names are refused, because every worker keeps all names.
NAME_MAX = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TreeLayout:
    """The leaves of a tree by name.

    Attributes:
        structure: The tree without its leaves.
        names: The names of all leaves in order.
        merged: The places of the leaves that are merged.
        templates: The shape, dtype and sharding of each merged leaf by name. The values are not kept, because they
            would take the memory of a whole model.
        frozen: The shape, dtype and sharding of each weight that is not trained, by name.
        own: The leaves that are not merged, by name.
    """

    structure: Any
    names: Sequence[str]
    merged: Sequence[int]
    templates: Mapping[str, jax.ShapeDtypeStruct]
    frozen: Mapping[str, jax.ShapeDtypeStruct]
    own: Mapping[str, Any]

    @classmethod
    def of(cls, tree: Any, trained: Any = None) -> TreeLayout:
        """Return the layout of a tree of parameters.

        Args:
            tree: The tree.
            trained: Which leaves are trained: a regular expression, a function of the name, or a tree of booleans. None
                for all floating-point leaves.

        Raises:
            ConfigError: A leaf has no name of its own (`loop.unnamed`), a dtype that cannot be merged (`loop.dtype`),
                or is on another host (`loop.several-hosts`), no leaf is a floating-point array or none is trained
                (`loop.nothing`), or `trained` does not fit the tree (`loop.trained`).
        """
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        names, leaves = [_name(path) for path, _ in pairs], [leaf for _, leaf in pairs]
        frozen: list[int] = []
        if trained is None:
            merged = [place for place, leaf in enumerate(leaves) if _is_merged(names[place], leaf)]
        else:
            places = chosen(trained, names, _named)
            merged = [place for place in places if _require_trainable(names[place], leaves[place])]
            frozen = [place for place in sorted({*range(len(names))} - {*places}) if is_weight(leaves[place])]
            if not merged:
                raise nothing_trained(trained, names)
        if not merged:
            raise ConfigError(
                f"none of the {len(leaves)} leaves of the parameters is a floating-point array",
                "Give the tree of arrays that the optimiser changes, such as `nnx.state(model, nnx.Param)`.",
                code="loop.nothing",
            )
        repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if repeated:
            raise ConfigError(
                f"several leaves of the parameters have the name {min(repeated)!r}",
                "Rename a key: the parts of a name are joined by dots.",
                code="loop.unnamed",
            )
        templates = {names[place]: _template(leaves[place]) for place in merged}
        unchanged = {names[place]: _template(leaves[place]) for place in frozen}
        own = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name not in templates}
        return cls(structure, names, merged, templates, unchanged, own)

    def leaves_of(self, tree: Any) -> dict[str, Any]:
        """Return the merged leaves of a tree of this layout, by name."""
        leaves = jax.tree.leaves(tree)
        return {self.names[place]: leaves[place] for place in self.merged}

    def frozen_values(self) -> list[FrozenValues]:
        """Return the frozen leaves. Raises ConfigError for one without values (`loop.meta`, `loop.deleted`)."""
        return [
            FrozenValues(
                name, tuple(template.shape), str(template.dtype), partial(pieces, _present(name, self.own[name]))
            )
            for name, template in self.frozen.items()
        ]

    def tensors(self, kind_of: KindOf) -> tuple[Tensor, ...]:
        """Return the tensors of a manifest, in the order of the tree."""
        return tuple(Tensor(name, tuple(leaf.shape), kind_of(name)) for name, leaf in self.templates.items())

    def tell_of_own(self) -> None:
        """Log which leaves are not merged."""
        own = [name for name in self.own if name not in self.frozen]
        if own:
            shown = ", ".join(own[:8]) + (f" and {len(own) - 8} more" if len(own) > 8 else "")
            log.warning("these leaves are not floating-point arrays and stay this island's own: %s", shown)


def _template(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return a leaf without its values. An array on the default device may be moved by the loop's own computations."""
    may_move = isinstance(leaf, jax.Array) and not leaf.committed
    sharding = None if may_move else getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _name(path: Sequence[Any]) -> str:
    """Return the name of a leaf, such as `layers.0.kernel`."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]  # a variable of flax nnx
    if not path or any(isinstance(key, jax.tree_util.FlattenedIndexKey) for key in path):
        where = jax.tree_util.keystr(tuple(path)) or "the whole tree"
        raise ConfigError(
            f"a leaf of the parameters has no name ({where})",
            "Give a dictionary of arrays, or register your class with `jax.tree_util.register_pytree_with_keys`.",
            code="loop.unnamed",
        )
    name = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    if not name or len(name) > NAME_MAX or not name.isprintable():
        raise ConfigError(
            f"the name {name[:80]!r} of a leaf cannot be used",
            f"Use 1 to {NAME_MAX} printable characters.",
            code="loop.unnamed",
        )
    return name


def _named(tree: Any) -> dict[str, Any]:
    """Return all leaves of a tree by name."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _require_trainable(name: str, leaf: Any) -> bool:
    """Return True. Raise ConfigError (`loop.dtype`) for a leaf that is not a floating-point array."""
    if not _is_merged(name, leaf):
        raise ConfigError(
            f"the leaf {name!r} is trained, and it is {_kind(leaf)}",
            "Only floating-point arrays are trained. Choose fewer leaves with `trained`.",
            code="loop.dtype",
        )
    return True


def _present(name: str, leaf: Any) -> Any:
    """Return a frozen leaf, whose values are compared with those of the run."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ConfigError(
            f"the frozen leaf {name!r} is described, and its values were not given",
            "Give the array: `join` compares frozen leaves with those of the run.",
            code="loop.meta",
        )
    _require_not_donated(name, leaf, "Give `create` and `join` arrays that no step has taken.")
    return leaf


def _kind(leaf: Any) -> str:
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    return f"of the type {type(leaf).__name__}" if dtype is None else f"an array of {dtype} of the shape {shape}"


def _is_merged(name: str, leaf: Any) -> bool:
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None or not jnp.issubdtype(dtype, jnp.floating) or 0 in shape:
        return False
    if dtype not in MERGED_DTYPES:
        raise ConfigError(
            f"the leaf {name!r} is of {dtype}, which is not merged",
            "Convert it to float32, bfloat16 or float16, or choose with `trained` which leaves are trained.",
            code="loop.dtype",
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ConfigError(
            f"the leaf {name!r} is spread over several hosts",
            "An island of one host with several devices works. Let each host join as an island of its own.",
            code="loop.several-hosts",
        )
    return True


class TreeParameters:
    """The parameters of a loop: the tree that it gave last, opened only when it is needed.

    Attributes:
        tree: The tree.
    """

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout
        self.tree: Any = None
        self._structure = layout.structure
        self._leaves: list[Any] | None = None
        self._named: dict[str, Any] | None = None
        self._frozen: FrozenLeaves | None = None

    def offer(self, tree: Any) -> None:
        """Take the tree that the loop gives. It is checked when a fragment is sent or adopted."""
        self.tree, self._named, self._leaves = tree, None, None
        if self._frozen is not None:
            self._frozen.require_same()

    def start(self, named: Mapping[str, Any]) -> None:
        """Begin with these arrays and the island's own leaves."""
        own = self.layout.own
        self._structure, self._leaves = self.layout.structure, [own.get(name) for name in self.layout.names]
        self.replace(named)
        if self.layout.frozen:
            self._frozen = FrozenLeaves(self._frozen_of(self._leaves))
        self.layout = replace(self.layout, own=dict.fromkeys(own))  # values that a later step replaces take memory

    def named(self) -> dict[str, Any]:
        """Return the arrays that are merged, by name.

        Raises:
            ConfigError: The tree is not that of the run (`loop.other-tree`, `loop.shape`, `loop.dtype`,
                `loop.deleted`), or a step changed a frozen leaf (`loop.frozen-changed`).
        """
        if self._named is None:
            self._named = self._opened()
        return self._named

    def replace(self, named: Mapping[str, Any]) -> None:
        """Replace the arrays, and build the tree for the loop."""
        self._named = dict(named)
        leaves = list(self._leaves or ())
        for place in self.layout.merged:
            leaves[place] = self._named[self.layout.names[place]]
        self._leaves = leaves
        self.tree = jax.tree.unflatten(self._structure, leaves)

    def are_there(self) -> bool:
        """Return whether no array was donated to a later step."""
        return not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.tree))

    def not_finite(self, candidates: Sequence[str]) -> DivergedError:
        """Return the error that names a leaf with NaN or infinity."""
        named = self._opened() if self.are_there() else {}
        found = [name for name, leaf in named.items() if not bool(jnp.isfinite(jnp.asarray(leaf)).all())]
        where = f"the leaf {found[0]!r}" if found else f"one of the leaves {', '.join(candidates[:4])}"
        more = f" and {len(found) - 1} more leaves" if len(found) > 1 else ""
        return DivergedError(
            f"{where}{more} of the parameters holds NaN or infinity, so nothing of it was sent",
            "Start the script again: it takes the run's parameters. If that repeats, lower the learning rate.",
            code="loop.not-finite",
        )

    def _opened(self) -> dict[str, Any]:
        leaves, structure = jax.tree.flatten(self.tree)
        if structure != self._structure:
            self._require_same_names()
        self._leaves, self._structure = leaves, structure
        names = self.layout.names
        for place in self.layout.merged:
            _require_like(names[place], leaves[place], self.layout.templates[names[place]])
        if self._frozen is not None:
            frozen = self._frozen_of(leaves)
            for name, leaf in frozen.items():
                _require_like(name, leaf, self.layout.frozen[name])
            self._frozen.offer(frozen)
        return {names[place]: leaves[place] for place in self.layout.merged}

    def _frozen_of(self, leaves: Sequence[Any]) -> dict[str, Any]:
        return {name: leaf for name, leaf in zip(self.layout.names, leaves, strict=True) if name in self.layout.frozen}

    def _require_same_names(self) -> None:
        """Raise ConfigError unless the tree has the same leaves in the same order; its containers may differ."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.tree)
        found = [_name(path) for path, _ in pairs]
        known = list(self.layout.names)
        if found == known:
            return
        said = "the order of its leaves differs"
        if more := [name for name in found if name not in known]:
            said = f"the leaf {more[0]!r} is new"
        if less := [name for name in known if name not in found]:
            said = f"it has no leaf {less[0]!r}"
        raise ConfigError(
            f"`sync` was given another tree than `join`: {said}",
            "Give the parameters that the step returned, in the tree of `run.params`.",
            code="loop.other-tree",
        )


def _require_like(name: str, leaf: Any, template: Any) -> None:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape != template.shape:
        raise ConfigError(
            f"the leaf {name!r} has the shape {list(shape) if shape is not None else type(leaf).__name__}, and "
            f"{list(template.shape)} in `join`",
            "Give the parameters that the step returned.",
            code="loop.shape",
        )
    if dtype != template.dtype:
        raise ConfigError(
            f"the leaf {name!r} is of {dtype}, and of {template.dtype} in `join`",
            "Let the step keep the dtypes of its parameters.",
            code="loop.dtype",
        )
    require_values(name, leaf)
    _require_not_donated(name, leaf, "Give `sync` the parameters that the step returned.")


def _require_not_donated(name: str, leaf: Any, remedy: str) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(f"the leaf {name!r} was donated to a computation", remedy, code="loop.deleted")


def require_values(name: str, leaf: Any) -> None:
    """Raise ConfigError (`loop.meta`) for a leaf that has a shape and no values."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise ConfigError(
            f"the leaf {name!r} has no values: it is a {type(leaf).__name__}",
            "Give arrays, and call `create` and `sync` outside of functions that JAX transforms.",
            code="loop.meta",
        )


def host_vector(leaves: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return arrays as one float32 vector in the memory of the host."""
    return np.concatenate([np.asarray(leaf).astype(np.float32).reshape(-1) for leaf in leaves])
