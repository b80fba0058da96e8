"""What a JAX loop keeps: the tree of parameters that it gave last, and the inner optimiser's state, for newcomers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Handover
from archipelago.islands.sync import recovery
from archipelago.islands.sync.arrays import device_copy, own_pieces, put_like
from archipelago.islands.sync.recovery import NO_BOUNDS, MomentBounds
from archipelago.islands.user_loop.tree import FrozenLeaves, TreeLayout, name_of, pieces

log = logging.getLogger(__name__)


class TreeParameters:
    """The parameters of a loop: the tree that it gave last, opened only when it is needed."""

    def __init__(self, tree: Any, trained: Any = None) -> None:
        """Begin with a tree. `trained` is what the script gives to `join`."""
        self.layout = layout = TreeLayout.of(tree, trained)
        self.tree = tree
        self._chooses = trained is not None
        self._structure = layout.structure
        self._leaves: dict[str, Any] = {}  # of the opened tree, in its order
        self._has_begun = False
        self._named: dict[str, Any] | None = None
        self._frozen: FrozenLeaves | None = None
        self._unassigned = UnassignedCheck()

    def choose(self, manifest: Manifest) -> None:
        """Train the leaves that the run trains, unless the script has chosen others."""
        trained = {tensor.name for tensor in manifest.tensors}
        if manifest.frozen and not self._chooses and trained & self.layout.templates.keys():
            self.layout = TreeLayout.of(self.tree, trained.__contains__)

    def offer(self, tree: Any) -> None:
        """Take the tree that the loop gives. It is checked when a fragment is sent or adopted, and after that."""
        self.keep(tree)
        if self._unassigned.waits:
            self._unassigned.look(self.named())
        if self._frozen is not None:
            self._frozen.require_same()

    def keep(self, tree: Any) -> None:
        """Take a tree without a look at it."""
        self.tree, self._named, self._leaves = tree, None, {}

    def start(self, named: Mapping[str, Any]) -> None:
        """Begin with these arrays and the island's own leaves. A second time, those of the newest tree stay."""
        if self._has_begun:
            self.named()
            self.replace(named)
            return
        self._has_begun, own = True, self.layout.own
        self._structure, self._leaves = self.layout.structure, {name: own.get(name) for name in self.layout.names}
        self.replace(named)
        if self.layout.frozen:
            self._frozen = FrozenLeaves({name: own[name] for name in self.layout.frozen})
        self.layout = replace(self.layout, own=dict.fromkeys(own))  # values that a later step replaces take memory

    def named(self) -> dict[str, Any]:
        """Return the arrays that are merged, by name.

        Raises ConfigError if the tree is not that of the run (`loop.other-tree`), its values are gone (`loop.meta`), or
        a step changed a frozen leaf (`loop.frozen-changed`).
        """
        if self._named is None:
            self._named = self._opened()
        return self._named

    def require_frozen(self) -> None:
        """Raise ConfigError (`loop.frozen-changed`) if a step changed a frozen leaf. This waits for the device."""
        if self._frozen is not None:
            self._frozen.require_same(waits=True)
            self._opened()
            self._frozen.require_same(waits=True)

    def replace(self, named: Mapping[str, Any]) -> None:
        """Replace the arrays, and build the tree for the loop."""
        if self._named is not None:
            self._unassigned.merged(self._named, named)
        self._named, self._leaves = dict(named), {**self._leaves, **named}
        self.tree = jax.tree.unflatten(self._structure, self._leaves.values())

    def tree_with(self, named: Mapping[str, Any]) -> Any:
        """Return the newest tree with these arrays in place of its own. Raises ConfigError as `named` does."""
        self.named()
        return jax.tree.unflatten(self._structure, {**self._leaves, **named}.values())

    def are_there(self) -> bool:
        """Return whether no array was donated to a later step."""
        return not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.tree))

    def not_finite(self) -> list[str]:
        return not_finite(self.named())

    def _opened(self) -> dict[str, Any]:
        leaves, structure = jax.tree.flatten(self.tree)
        if structure != self._structure:
            self._require_same_names()
        self._leaves, self._structure = dict(zip(self.layout.names, leaves, strict=True)), structure
        frozen = {} if self._frozen is None else self.layout.frozen
        for name, template in {**self.layout.templates, **frozen}.items():
            _require_like(name, self._leaves[name], template)
        if self._frozen is not None:
            self._frozen.offer({name: self._leaves[name] for name in frozen})
        return {name: self._leaves[name] for name in self.layout.templates}

    def _require_same_names(self) -> None:
        """Raise ConfigError unless the tree has the same leaves in the same order; its containers may differ."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.tree)
        found = [name_of(path) for path, _ in pairs]
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


def not_finite(named: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays with NaN or infinity in what this process has of them."""
    return [name for name, leaf in named.items() if not all(bool(_is_finite(piece)) for piece in own_pieces(leaf))]


@jax.jit
def _is_finite(leaf: Any) -> jax.Array:
    """Return whether no element is NaN or infinity. As one program, this takes no memory of the leaf's size."""
    return jnp.isfinite(leaf).all()


def _require_like(name: str, leaf: Any, template: Any) -> None:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if (shape, dtype) != (template.shape, template.dtype):
        found = f"a {type(leaf).__name__}" if shape is None else f"{dtype}{list(shape)}"
        raise ConfigError(
            f"the leaf {name!r} is {found}, and {template.dtype}{list(template.shape)} in `join`",
            "Give the parameters that the step returned, and let it keep their shapes and dtypes.",
            code="loop.other-tree",
        )
    require_values(name, leaf)


def require_values(name: str, leaf: Any) -> Any:
    """Return a leaf. Raise ConfigError (`loop.meta`) for one without values, such as one that a computation took."""
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer)
    if is_abstract or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
        fault = f"is a {type(leaf).__name__}" if is_abstract else "was donated to a computation"
        raise ConfigError(
            f"the leaf {name!r} has no values: it {fault}",
            "Give arrays that no step has taken, such as those that the last step returned, and call `create`, `join` "
            "and `sync` outside of functions that JAX transforms.",
            code="loop.meta",
        )
    return leaf


def frozen_values(layout: TreeLayout) -> list[FrozenValues]:
    """Return the frozen leaves of a tree. Raises ConfigError (`loop.meta`) for one without values."""
    return [
        FrozenValues(name, tuple(like.shape), str(like.dtype), partial(pieces, require_values(name, layout.own[name])))
        for name, like in layout.frozen.items()
    ]


#: The most elements of a leaf that is looked at. Reading it waits for the device.
SIZE_MAX = 1 << 16
#: A value is that of before if it is this many times nearer to it than to the merged one, and the other way round.
NEARER = 4.0
#: It warns when this many merges in a row were lost. One proves nothing: in a convex problem, a step may lead back
#: to where the parameters were before the merge.
LOST_MIN = 3
#: It stops to look after this many merges.
LOOKS_MAX = 100


class UnassignedCheck:
    """A check for loops that drop what `sync` returns: `run.sync(params)` in place of `params = run.sync(params)`.

    Such a loop adopts nothing and sends what it has again, so the run diverges without an error. After a merge, one
    small leaf shows it: the next tree has the value of before with a step, and not the merged value with a step. The
    check looks at merges until the loop has taken one, until it has warned, or LOOKS_MAX times.
    """

    def __init__(self) -> None:
        self._left, self._lost = LOOKS_MAX, 0
        #: How far the step went after a merge that seems lost, while the next step is awaited.
        self._came: float | None = None
        self._seen: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def merged(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Note a leaf that a merge has changed."""
        if self._left <= 0 or self._came is not None:
            return
        self._left -= 1
        changed = [name for name, leaf in after.items() if leaf is not before.get(name) and _is_small(leaf)]
        if changed:
            name = min(changed, key=lambda each: int(after[each].size))
            self._seen = name, np.asarray(before[name], np.float32), np.asarray(after[name], np.float32)

    @property
    def waits(self) -> bool:
        """Whether the next tree says something."""
        return self._seen is not None

    def look(self, leaves: Mapping[str, Any]) -> None:
        """Compare the leaf with what it was, and warn if merges were lost.

        A merge that took one step back looks lost after the step that makes it again. The next step says how long a
        step is: that one only went back to where it was, unless it was about as long.
        """
        assert self._seen is not None  # noqa: S101
        (name, before, merged), self._seen = self._seen, None
        now = np.asarray(leaves[name], np.float32)
        to_before, to_merged = (float(np.linalg.norm(now - each)) for each in (before, merged))
        if self._came is not None:  # here `merged` is the value of the last look
            self._lost, self._came = self._lost + 1 if to_merged < 2.0 * self._came else 0, None
        elif NEARER * to_merged < to_before:
            self._left = 0
        elif NEARER * to_before < to_merged:
            self._came, self._seen = to_before, (name, before, now)
        else:
            self._lost = 0
        if self._lost == LOST_MIN:
            self._left = 0
            log.warning(
                "this loop seems to train on without the parameters that `sync` returns, and so without what the run "
                "has merged. Write `params = run.sync(params, …)`",
                extra={"code": "loop.not-adopted"},
            )


def _is_small(leaf: Any) -> bool:
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    return is_here and 0 < leaf.size <= SIZE_MAX


#: The state of an inner optimiser: any tree.
State = Any
#: The place of a leaf in a tree.
KeyPath = tuple[Any, ...]
#: The part of optax's states that holds second moments.
SECOND_MOMENT = jax.tree_util.GetAttrKey("nu")
#: The part that counts its steps.
COUNT = jax.tree_util.GetAttrKey("count")
#: The parts of optax's states that are checked. Other names may be those of a script's parameters.
CHECKED = frozenset({"count", "mu", "nu", "ns_coeffs"})
#: The bytes of the widest number that travels. Longer ones are different on each kind of processor.
WIDTH_MAX = 8


class LoopState:
    """Gives and takes the state of one loop. Leaves that are not numeric arrays stay the island's own."""

    can_travel = True

    def __init__(self, newest: Callable[[], State], bounds: MomentBounds = NO_BOUNDS) -> None:
        """Note what returns the newest state of the loop, and the largest moments that its optimiser can produce."""
        self.newest, self._bounds = newest, bounds

    def travelling(self) -> dict[KeyPath, Any]:
        """Return the arrays that peers can use, by their places in order."""
        return {path: leaf for path, leaf in jax.tree_util.tree_flatten_with_path(self.newest())[0] if _travels(leaf)}

    def copies(self) -> list[Any] | None:
        """Return the digest of the layout and copies of the arrays that no later step can donate.

        None if a step has taken them already, or the script's function fails: training goes on without a handover.
        """
        try:
            travelling = self.travelling()
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in travelling.values()):
                return None
            return [_layout_digest(travelling), *self._copied(travelling.values())]
        except Exception as error:  # noqa: BLE001 - the function is the user's, and no peer needs the state to train
            log.warning(
                "the optimiser's state cannot be given to a newcomer, which warms up instead: `state` raised %s: %s",
                type(error).__name__, error, extra={"code": "island.state"},
            )  # fmt: skip
            return None

    def _copied(self, leaves: Iterable[Any]) -> list[Any]:
        return [_copy(leaf) for leaf in leaves]

    def decode(self, handover: Handover, payload: bytes) -> list[NDArray[Any]]:
        """Return the arrays that a peer sent, in the memory of the host, where checking compiles nothing.

        Raises:
            WireError: The payload does not fit the announcement or this loop's state, or no steps can produce it.
        """
        own = self.travelling()
        values = recovery.decode(handover, payload, list(own.values()), _layout_digest(own))
        self._require_sound(own, dict(zip(own, values, strict=True)))
        return values

    def _require_sound(self, own: Mapping[KeyPath, Any], sent: Mapping[KeyPath, NDArray[Any]]) -> None:
        for path, values in sent.items():
            attributes = [place for place, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)]
            for place in attributes:
                name, count = path[place].name, sent.get((*path[:place], COUNT))
                # Deeper ones may be the script's parameters, unless the state counts steps, as optax's do in wrappers.
                is_own = place == attributes[0] or (count is not None and count.dtype.kind in "iu")
                if name not in CHECKED or not is_own:
                    continue
                second = (*path[:place], SECOND_MOMENT, *path[place + 1 :]) if name == "mu" else ()
                recovery.require_sound(name, values, self._bounds, sent.get(second))
                if name == "ns_coeffs" and (values != np.asarray(own[path])).any():  # of Muon's Newton-Schulz steps
                    raise WireError("wrong coefficients in the peer's optimiser state", code="handover.unsound")

    def taken(self, values: Iterable[Any]) -> State:
        """Return this loop's state with the arrays of a peer, on the devices of its own, whatever those of the peer."""
        sent = iter(values)
        return jax.tree.map(lambda leaf: put_like(leaf, next(sent)) if _travels(leaf) else leaf, self.newest())


def _layout_digest(travelling: Mapping[KeyPath, Any]) -> NDArray[np.uint8]:
    """Return the digest of the names, shapes and dtypes of the arrays."""
    return recovery.layout_digest(
        (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in travelling.items()
    )


def _copy(leaf: Any) -> Any:
    """Return a copy of an array where it is, in its own dtype: JAX may not have that of an array of numpy."""
    return device_copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def _travels(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers that every machine can read."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) or isinstance(leaf, np.ma.MaskedArray):
        return False
    dtype: Any = leaf.dtype
    is_number = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)) or dtype == jnp.bool_
    return is_number and dtype.itemsize <= WIDTH_MAX and getattr(dtype, "kind", "") != "m"
