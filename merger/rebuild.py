"""Rebuild fragments from a full state and the contributions that were merged after it.

The full state is that of a checkpoint, for the whole run, or that of a compaction in Redis, for one fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from archipelago.broker.commits import Image
from archipelago.broker.errors import WireError
from archipelago.broker.transport import MergerTransport
from archipelago.broker.wire import pack, unpack
from archipelago.merger import outer
from archipelago.merger.replay import replay_round
from archipelago.merger.round_log import RoundLog
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.weights import NormWindow

#: More rounds than any tape holds.
WHOLE_TAPE = 1 << 20


def rebuild(
    rules: RoundMerge, image: Image, transport: MergerTransport, last: int = WHOLE_TAPE
) -> tuple[RunState, list[FragmentState]]:
    """Return the run after round `last`: the checkpoint, and the replay of all later rounds on the tape.

    Raises:
        DifferenceError: The tape has a gap, an entry is missing, or a bit differs.
        WireError: The image is not of this run.
    """
    state = RunState.from_json(image.state)
    fragments = of_image(rules, image)
    state.covered = state.closed
    for tape in transport.reader.tape(WHOLE_TAPE):
        if state.closed < tape.round <= last:
            p = rules.manifest.fragment_of(tape.round)
            deliveries = transport.merger.read([member.entry for member in tape.members])
            fragments[p] = replay_round(rules, state, fragments[p], tape, deliveries)
    return state, fragments


def merge_again(
    rules: RoundMerge,
    fragment: FragmentState,
    logs: Sequence[RoundLog],
    transport: MergerTransport,
    between: Callable[[], object],
) -> FragmentState:
    """Return a fragment after the rounds of these logs, which are all of its rounds since then, in order.

    Raises:
        DifferenceError: An entry is missing, or a bit differs.
    """
    for tape, before in logs:
        deliveries = transport.merger.read([member.entry for member in tape.members])
        fragment = replay_round(rules, before.copy(), with_norms(fragment, before, tape.fragment), tape, deliveries)
        between()
    return fragment


def of_image(rules: RoundMerge, image: Image) -> list[FragmentState]:
    """Return the fragments in a checkpoint. Raises WireError if it is not of this run (`wire.other-run`)."""
    if image.manifest.to_fields() != rules.manifest.to_fields():
        raise WireError(f"checkpoint {image.number} is of another run", code="wire.other-run")
    state = RunState.from_json(image.state)
    both = zip(image.snapshots, image.outers, strict=True)
    return [with_norms(fragment_of(rules, p, payload, o), state, p) for p, ((_, payload), o) in enumerate(both)]


def fragment_of(rules: RoundMerge, p: int, payload: bytes | None, outer_state: bytes) -> FragmentState:
    """Return a fragment from its published payload and its own state. Raises WireError if they do not fit the run.

    Without the payload, what islands hold is the rounding of the exact parameters, which a full snapshot would have.
    """
    size, wire = rules.manifest.sizes[p], rules.manifest.config.wire
    if not (outer_state or payload):
        raise WireError("neither its snapshot nor its outer state is left")
    if not outer_state:
        return new_state(unpack(payload or b"", size), rules.outer)
    template = new_state(np.zeros(size, np.float32), rules.outer)
    params_N, state = outer.load(template.outer, outer_state, size)
    exact = wire.full == "float32" and not wire.sends_differences
    if payload is None:
        payload = pack(np.asarray(params_N), wire.full, 0)
    return FragmentState(params_N, state, NormWindow(), params_N if exact else jax.numpy.asarray(unpack(payload, size)))


def with_norms(fragment: FragmentState, state: RunState, p: int) -> FragmentState:
    """Return the fragment with its norms, which are in the run's state."""
    return replace(fragment, norms=state.norms.get(p, NormWindow()))
