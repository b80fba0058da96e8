"""Inner optimiser state as a tree of JAX arrays, from the payload of a handover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.messages import Handover
from archipelago.islands.sync import recovery
from archipelago.islands.sync.arrays import device_copy

#: A tree of arrays, as the inner optimiser keeps it.
State = Any
#: Raises WireError for state that the optimiser's own steps cannot produce. Takes the state and one to compare with.
Check = Callable[[State, State], None]


def decode(handover: Handover, payload: bytes, like: State, check: Check) -> State:
    """Return the state in a payload.

    Args:
        handover: The message that announces the payload.
        payload: What a peer sent.
        like: State with the expected tree, shapes and dtypes. The state comes to its devices, whatever those of the
            peer are.
        check: Refuses state that is not sound.

    Raises:
        WireError: The payload does not fit the announcement or the model, or it is not sound.
    """
    leaves, tree = jax.tree.flatten(like)
    found = recovery.decode(handover, payload, leaves)
    state: State = jax.tree.unflatten(tree, [_where(own, values) for own, values in zip(leaves, found, strict=True)])
    check(state, like)
    return state


def _where(own: Any, values: NDArray[Any]) -> Any:
    """Return values where the island's own are. Each device gets its own shards only."""
    if isinstance(own, np.ndarray):
        return values.copy()
    is_committed = isinstance(own, jax.Array) and own.committed
    return jax.device_put(values.copy(), own.sharding, may_alias=False) if is_committed else device_copy(values)
