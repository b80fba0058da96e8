"""The inner optimiser's state of a user's loop, which newcomers take from peers: a tree of arrays of any kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import STEPS_MAX
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Handover
from archipelago.islands.own_loop.handover import decode, layout_digest
from archipelago.islands.sync.arrays import device_copy

#: The newest state of a loop, or a function that returns it.
State = Any
#: The bytes of the widest number that travels. Longer ones are different on each kind of processor.
WIDTH_MAX = 8

log = logging.getLogger(__name__)


class LoopState:
    """Gives and takes the state of one loop. Leaves that are not numeric arrays stay the island's own."""

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
            state = self._newest()
            leaves = [leaf for leaf in jax.tree.leaves(state) if _travels(leaf)]
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                return None
            return [_digest(state), *map(_copy, leaves)]
        except Exception as error:  # noqa: BLE001 - the function is the user's, and no peer needs the state to train
            log.warning(
                "the optimiser's state cannot be given to a newcomer: `state` raised %s: %s",
                type(error).__name__, error, extra={"code": "island.state"},
            )  # fmt: skip
            return None

    def decode(self, handover: Handover, payload: bytes) -> State:
        """Return the state that a peer sent, in the shardings of this loop's. Raises WireError if it does not fit."""
        own_state = self._newest()
        leaves, structure = jax.tree.flatten(own_state)
        places = [place for place, leaf in enumerate(leaves) if _travels(leaf)]
        found = decode(handover, payload, _digest(own_state), [leaves[place] for place in places])
        for place, values in zip(places, found, strict=True):
            own = leaves[place]
            if isinstance(own, jax.Array):
                home = own.sharding if own.committed else None
                leaves[place] = jax.device_put(values.copy(), home, may_alias=False)
            else:
                leaves[place] = values.copy() if isinstance(own, np.ndarray) else values[()]
        state = jax.tree.unflatten(structure, leaves)
        _require_sound(state)
        return state


def _digest(state: State) -> NDArray[np.uint8]:
    """Return the digest of the names, shapes and dtypes of the arrays that travel."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return layout_digest(
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


def _require_sound(state: State) -> None:
    """Raise WireError for second moments and counts that no optimiser of optax makes."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        names = {str(getattr(key, "name", "")) for key in path}
        if names & {"nu", "count"} and _travels(leaf) and bool((leaf < 0).any()):
            raise WireError("a negative second moment or count in the peer's optimiser state", code="handover.unsound")
        if "count" in names and _travels(leaf) and bool((leaf > STEPS_MAX).any()):
            raise WireError("more steps in the peer's optimiser state than in a run", code="handover.unsound")
