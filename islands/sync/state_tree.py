"""Inner optimiser state as a tree of JAX arrays, from the payload of a handover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

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
        like: State with the expected tree, shapes and dtypes.
        check: Refuses state that is not sound.

    Raises:
        WireError: The payload does not fit the announcement or the model, or it is not sound.
    """
    leaves, tree = jax.tree.flatten(like)
    state: State = jax.tree.unflatten(tree, [device_copy(leaf) for leaf in recovery.decode(handover, payload, leaves)])
    check(state, like)
    return state
