"""Inner optimiser state for a newcomer, from a healthy peer through Redis, without stopping either (the paper's E.3).

Parameters always come from the merger. The moments are what a fresh island lacks: they are copied on the giver's
device between two steps, and travel beside its training. Float32, so that a replay finds the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import zstandard
from optax import OptState
from optax.tree_utils import tree_get_all_with_path

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions, Handover, Presence
from archipelago.broker.transport import IslandTransport
from archipelago.broker.wire import digest
from archipelago.islands.sync.arrays import device_copy

ASK_SECONDS = 10.0
"""How long a newcomer waits for a peer's answer once it is ready to train."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Gift:
    """Inner optimiser state on its way to `who`; `optimizer` is a copy that no step donates."""

    who: str
    optimizer: OptState
    index: int
    global_step: int
    actions: Actions | None = None
    """what the giver did and has not told yet"""


@dataclass(frozen=True)
class Received:
    """Inner optimiser state from a peer."""

    handover: Handover
    optimizer: OptState


def encode(gift: Gift, giver: str) -> tuple[Handover, bytes]:
    """The message and its payload: the leaves' bytes one after the other, under zstd."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gift.optimizer)]
    payload = zstandard.ZstdCompressor(level=1).compress(b"".join(leaf.tobytes() for leaf in leaves))
    island, _, incarnation = giver.partition("/")
    return Handover(island, incarnation, gift.index, gift.global_step, len(payload), digest(payload)), payload


def decode(handover: Handover, payload: bytes, like: OptState) -> OptState:
    """The state in a payload, with the tree, shapes and dtypes of `like`. Raises WireError for anything else."""
    if len(payload) != handover.bytes or digest(payload) != handover.digest:
        raise WireError("the peer's optimiser state is not the announced one")
    leaves, tree = jax.tree.flatten(like)
    expected = sum(leaf.nbytes for leaf in leaves)
    try:
        if zstandard.get_frame_parameters(payload).content_size != expected:
            raise WireError("the peer's optimiser state is not of this model")
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"the peer's optimiser state is not zstd ({error})") from None
    out, start = [], 0
    for leaf in leaves:
        values = np.frombuffer(data, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        if not np.isfinite(values).all():
            raise WireError("NaN or infinity in the peer's optimiser state")
        out.append(device_copy(values))
        start += leaf.nbytes
    state: OptState = jax.tree.unflatten(tree, out)
    _require_sound(state, like)
    return state


def _require_sound(state: OptState, like: OptState) -> None:
    """Raises WireError for what no optimiser's own steps lead to."""

    def named(tree: OptState, *names: str) -> list[jax.Array]:
        found = [part for name in names for _, part in tree_get_all_with_path(tree, name)]
        return jax.tree.leaves(found)

    if any((leaf < 0).any() for leaf in named(state, "nu", "count")):
        raise WireError("a negative second moment or count in the peer's optimiser state")
    constant = zip(named(state, "ns_coeffs"), named(like, "ns_coeffs"), strict=True)  # of Muon's Newton-Schulz steps
    if any((theirs != ours).any() for theirs, ours in constant):
        raise WireError("other coefficients in the peer's optimiser state")


def peers(presences: list[Presence], name: str) -> list[str]:
    """Islands that could answer a newcomer of that name."""
    return [p.heartbeat.island for p in presences if p.is_training and p.heartbeat.island != name]


def receive(
    transport: IslandTransport,
    who: str,
    like: OptState,
    beat: Callable[[], None],
    seconds: float = ASK_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Received | None:
    """What a peer answered to `ask`, waiting up to `seconds` while some peer lives; None when none did. May raise."""
    deadline = clock() + seconds
    name = who.partition("/")[0]
    try:
        while True:
            beat()
            if (found := transport.island.handed_over(who)) is not None:
                return Received(found[0], decode(*found, like))
            if clock() >= deadline or not peers(transport.reader.presences(), name):
                return None
            pause(POLL_SECONDS)
    finally:
        transport.island.withdraw(who)
