"""What a JAX loop keeps: the tree of parameters that it gave last, and the inner optimiser's state, for newcomers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import STEPS_MAX
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Handover
from archipelago.islands.sync import recovery
from archipelago.islands.sync.arrays import device_copy, put_like
from archipelago.islands.user_loop.tree import FrozenLeaves, TreeLayout, name_of, require_values

log = logging.getLogger(__name__)


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
            ConfigError: The tree is not that of the run (`loop.other-tree`), its values are gone (`loop.meta`), or a
                step changed a frozen leaf (`loop.frozen-changed`).
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
        self._named = dict(named)
        leaves = list(self._leaves or ())
        for place in self.layout.merged:
            leaves[place] = self._named[self.layout.names[place]]
        self._leaves = leaves
        self.tree = jax.tree.unflatten(self._structure, leaves)

    def are_there(self) -> bool:
        """Return whether no array was donated to a later step."""
        return not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.tree))

    def not_finite(self) -> list[str]:
        """Return the names of the leaves with NaN or infinity."""
        return [name for name, leaf in self.named().items() if not bool(is_finite(leaf))]

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


@jax.jit
def is_finite(leaf: Any) -> jax.Array:
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


#: The newest state of a loop, or a function that returns it.
State = Any
#: The bytes of the widest number that travels. Longer ones are different on each kind of processor.
WIDTH_MAX = 8


class LoopState:
    """Gives and takes the state of one loop. Leaves that are not numeric arrays stay the island's own."""

    can_travel = True

    def __init__(self, newest: Callable[[], State]) -> None:
        self._newest = newest

    def now(self) -> State:
        """Return the state of the loop."""
        return self._newest()

    def copies(self) -> list[Any] | None:
        """Return the digest of the layout and copies of the arrays that no later step can donate.

        None if a step has taken them already, or the script's function fails: training goes on without a handover.
        """
        try:
            return state_copies(self._newest())
        except Exception as error:  # noqa: BLE001 - the function is the user's, and no peer needs the state to train
            log.warning(
                "the optimiser's state cannot be given to a newcomer: `state` raised %s: %s",
                type(error).__name__, error, extra={"code": "island.state"},
            )  # fmt: skip
            return None

    def decode(self, handover: Handover, payload: bytes) -> State:
        """Return the state that a peer sent, in the shardings of this loop's. Raises WireError if it does not fit."""
        return decode_state(handover, payload, self._newest(), _require_sound)


def state_copies(state: State) -> list[Any] | None:
    """Return the digest of a state's layout and copies of its arrays; None if a step has taken some of them."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if _travels(leaf)]
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        return None
    return [state_digest(state), *map(_copy, leaves)]


def decode_state(handover: Handover, payload: bytes, own: State, check: Callable[[State, State], None]) -> State:
    """Return the state in a payload, on the devices of the island's own, whatever those of the peer are.

    Args:
        handover: The message that announces the payload.
        payload: What a peer sent.
        own: The island's own state.
        check: Raises WireError for a state that is not sound. Takes the state and `own`.

    Raises:
        WireError: The payload does not fit the announcement or the island's own state, or it is not sound.
    """
    leaves, structure = jax.tree.flatten(own)
    places = [place for place, leaf in enumerate(leaves) if _travels(leaf)]
    found = recovery.decode(handover, payload, [leaves[place] for place in places], state_digest(own))
    sent = dict(zip(places, found, strict=True))
    # In the host's memory, where checking compiles nothing.
    check(jax.tree.unflatten(structure, [sent.get(place, leaf) for place, leaf in enumerate(leaves)]), own)
    placed = (put_like(leaf, sent[place]) if place in sent else leaf for place, leaf in enumerate(leaves))
    return jax.tree.unflatten(structure, placed)


def state_digest(state: State) -> NDArray[np.uint8]:
    """Return the digest of the names, shapes and dtypes of the arrays that travel."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return recovery.layout_digest(
        (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in pairs if _travels(leaf)
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


def _require_sound(state: State, own: State) -> None:
    """Raise WireError for second moments and counts that no optimiser of optax makes."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        names = {str(getattr(key, "name", "")) for key in path}
        if names & {"nu", "count"} and _travels(leaf) and bool((leaf < 0).any()):
            raise WireError("a negative second moment or count in the peer's optimiser state", code="handover.unsound")
        if "count" in names and _travels(leaf) and bool((leaf > STEPS_MAX).any()):
            raise WireError("more steps in the peer's optimiser state than in a run", code="handover.unsound")
