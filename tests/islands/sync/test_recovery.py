"""The handover of inner optimiser state by a peer: exact bits, and refusal of invalid state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.tree_utils import tree_get_all_with_path

from archipelago.broker.errors import UnreachableError, WireError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Handover
from archipelago.broker.wire import digest
from archipelago.islands.inner import begin, moment_bounds
from archipelago.islands.sync import recovery
from archipelago.islands.sync.recovery import Newcomer, StateForPeer, encode
from archipelago.islands.user_loop.parameters import LoopState
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import samples
from tests.failing import failing
from tests.harness import tiny
from tests.islands.sync.connection.link_run import FaultyTransport
from tests.limits import memory_below
from tests.tiers import examples


def fresh() -> Any:
    return {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(5, np.float32)}


def trained(steps: int = 3) -> Any:
    """Return optimiser state after some steps."""
    state = begin(tiny.CONFIG.inner, fresh())
    batches = jnp.asarray(np.arange(steps * 10, dtype=np.uint8).reshape(steps, 2, 5))
    return tiny.STEPS(state, batches, jnp.int32(0), jnp.int32(tiny.CONFIG.inner.steps))[0].optimizer


def held(state: Any, bounds: recovery.MomentBounds = recovery.NO_BOUNDS) -> LoopState:
    """Return how an island gives and takes a state."""
    return LoopState(lambda: state, bounds)


#: Of no steps, and of three. They are computed without XLA, because each worker that collects this file makes them.
LIKE = jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: begin(tiny.CONFIG.inner, fresh()).optimizer)
)
STATE = jax.tree.map(lambda leaf: leaf + (np.int32(3) if leaf.dtype == np.int32 else np.float32(0.01)), LIKE)
MINE = held(LIKE)
SIZE = 16 + sum(leaf.nbytes for leaf in jax.tree.leaves(LIKE))
HANDOVER, PAYLOAD = encode(StateForPeer("new/z", held(STATE).copies() or (), 40), "a/x")


def announced(payload: bytes) -> Handover:
    """Return a handover that announces the payload."""
    return replace(HANDOVER, bytes=len(payload), digest=digest(payload))


def compressed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def raw(state: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in held(state).copies() or ())


# -- encode and decode ----------------------------------------------------------------------------------------------


def test_the_state_is_decoded_bit_for_bit() -> None:
    assert raw(STATE) != raw(LIKE)
    found = MINE.taken(MINE.decode(HANDOVER, PAYLOAD))
    assert tiny.leaf_bytes(found) == tiny.leaf_bytes(STATE)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(LIKE))
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(LIKE)]
    assert (HANDOVER.giver, HANDOVER.incarnation, HANDOVER.global_step) == ("a", "x", 40)


# -- invalid payloads -----------------------------------------------------------------------------------------------

WITH_NAN = jax.tree.map(lambda x: x * np.float32(np.nan) if x.dtype == np.float32 else x, STATE)
WITH_INF = jax.tree.map(lambda x: x + np.float32(np.inf) if x.dtype == np.float32 else x, STATE)


MALFORMED = {
    "empty": (b"", "handover.unsound"),
    "text": (b"no zstd at all", "handover.unsound"),
    "cut": (PAYLOAD[:-1], "handover.unsound"),
    "with trailing bytes": (PAYLOAD + b"more", "handover.unsound"),
    "short": (compressed(raw(STATE)[:-4]), "handover.shape"),
    "another tree": (compressed(raw(jax.tree.map(lambda x: np.append(x, x), STATE))), "handover.shape"),
    "nan": (compressed(raw(WITH_NAN)), "handover.unsound"),
    "inf": (compressed(raw(WITH_INF)), "handover.unsound"),
    "of unknown size": (zstandard.ZstdCompressor(write_content_size=False).compress(raw(STATE)), "handover.shape"),
}


def test_malformed_state_is_refused() -> None:
    for what, (payload, code) in MALFORMED.items():
        with failing(WireError, code):
            pytest.fail(f"{what}: {MINE.decode(announced(payload), payload)}")
    for payload in (PAYLOAD[:-1] + b"?", PAYLOAD + b"?"):
        with failing(WireError, "handover.unsound"):
            MINE.decode(HANDOVER, payload)


@settings(max_examples=examples(100))
@given(flips=st.dictionaries(st.integers(0, len(PAYLOAD) - 1), st.integers(1, 255), min_size=1, max_size=4))
def test_damaged_state_is_refused_or_finite_and_of_the_right_shape(flips: dict[int, int]) -> None:
    """A hostile peer can compute a valid digest of forged state."""
    payload = bytes(byte ^ flips.get(index, 0) for index, byte in enumerate(PAYLOAD))
    try:
        found = MINE.decode(announced(payload), payload)
    except WireError:
        return
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in jax.tree.leaves(LIKE)]
    assert all(np.isfinite(leaf).all() for leaf in found)


def lying(declared: int, content: bytes) -> bytes:
    """Return a zstd frame whose header declares a wrong size."""
    frame = zstandard.ZstdCompressor().compress(content)
    size = len(content).to_bytes(4, "little")
    assert 0 < frame.index(size) < 14  # in the header
    forged = frame.replace(size, declared.to_bytes(4, "little"), 1)
    assert zstandard.get_frame_parameters(forged).content_size == declared
    return forged


def test_a_decompression_bomb_takes_no_memory() -> None:
    """It declares its true size, or that of the state."""
    for payload in (compressed(bytes(1 << 26)), lying(SIZE, bytes(1 << 26))):
        with memory_below(1 << 20), pytest.raises(WireError):
            MINE.decode(announced(payload), payload)


# -- asking ---------------------------------------------------------------------------------------------------------


class Waiting:
    """A newcomer `new/z` that waits on virtual time. `meanwhile` is called at each pause, with the pause's number."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        manifest = samples.manifest()
        self.transport = self.broker.connect("sample")
        self.transport.create(manifest, samples.first_snapshots(manifest))
        self.transport.island.heartbeat(samples.heartbeat("new", "joining", incarnation="z"))
        self.transport.island.request_state("new/z")
        self.beats = self.pauses = 0
        self.meanwhile: Callable[[int], object] = lambda number: None

    def _beat(self, state: str) -> None:
        self.beats += 1

    def _pause(self, seconds: float) -> None:
        assert seconds > 0
        self.clock.now += seconds
        self.pauses += 1
        assert self.pauses < 10_000, "the wait does not end"
        self.meanwhile(self.pauses)

    def receive(self, transport: Any = None, seconds: float = 5.0) -> Any:
        island: Any = SimpleNamespace(name="new", incarnation="z", clock=self.clock, beat=self._beat)
        newcomer = Newcomer(transport or self.transport, island, seconds, self._pause)
        return newcomer.wait(MINE.decode)

    def assert_withdrawn(self) -> None:
        run = self.broker.runs["sample"]
        assert (run.requests, run.handovers) == ({}, {})


def test_a_newcomer_waits_through_an_outage_and_seldom_looks_for_peers() -> None:
    new = Waiting()
    new.transport.island.heartbeat(samples.heartbeat("a"))
    faulty = FaultyTransport(new.transport)
    faulty.failing = frozenset({"handed_over", "presences"})

    def meanwhile(number: int) -> None:
        faulty.outage = UnreachableError("connection refused") if number < 20 else None
        if number == 60:
            new.transport.island.hand_over("new/z", HANDOVER, PAYLOAD)

    new.meanwhile = meanwhile
    assert new.receive(faulty)[0] == HANDOVER.giver
    assert faulty.calls["presences"] < 60 * recovery.POLL_SECONDS / recovery.PEERS_SECONDS + 2
    new.assert_withdrawn()


@pytest.mark.parametrize("is_silent", [False, True])
def test_after_a_useless_answer_or_silence_another_peer_is_asked(is_silent: bool) -> None:
    """Such as the answer of a peer in another framework, or of one whose state went into a step."""
    new, promised = Waiting(), list[str]()
    useless = encode(StateForPeer("new/z", [np.zeros(3)], 40), "a/x")
    right = encode(StateForPeer("new/z", held(STATE).copies() or (), 40), "b/x")

    def answer(number: int) -> None:
        for island in "ab":
            new.transport.island.heartbeat(samples.heartbeat(island))
            if island not in promised and new.transport.island.promise_answer("new/z", f"{island}/x"):
                promised.append(island)
                if island == "b" or not is_silent:
                    new.transport.island.hand_over("new/z", *(right if island == "b" else useless))

    new.meanwhile = answer
    answer(0)
    giver, state = new.receive(seconds=recovery.ASK_SECONDS)
    assert giver == "b"
    assert tiny.leaf_bytes(state) == tiny.leaf_bytes(STATE)
    assert promised == ["a", "b"], "each peer answers one incarnation once"
    new.assert_withdrawn()


def test_useless_answers_end() -> None:
    for others in (1, 2 * recovery.ANSWERS_MAX):
        new, answers = Waiting(), 0

        def answer(number: int, new: Waiting = new, others: int = others) -> None:
            nonlocal answers
            for island in range(others):
                new.transport.island.heartbeat(samples.heartbeat(f"i{island}"))
            if new.transport.island.promise_answer("new/z", f"i{answers}/x"):
                useless = encode(StateForPeer("new/z", [np.zeros(3)], 40), f"i{answers}/x")
                new.transport.island.hand_over("new/z", *useless)
                answers += 1

        new.meanwhile = answer
        answer(0)
        with failing(WireError, "handover.shape"):
            new.receive(seconds=1e3)
        assert answers == min(others, recovery.ANSWERS_MAX)
        new.assert_withdrawn()


def forged(state: Any, **changes: Any) -> tuple[Handover, bytes]:
    """Return the state with some parts replaced, each by a function of that part."""
    for name, change in changes.items():
        part = tree_get_all_with_path(state, name)[0][1]
        state = optax.tree_utils.tree_set(state, **{name: jax.tree.map(change, part)})
    return encode(StateForPeer("b/y", held(state).copies() or (), 7), "a/x")


def filled(value: float) -> Any:
    return partial(jnp.full_like, fill_value=value)


def negative(x: jax.Array) -> jax.Array:
    return -x - 1


def test_moments_that_no_steps_can_produce_are_refused() -> None:
    bounded, muon = held(STATE, moment_bounds(tiny.CONFIG.inner)), muon_state(1)
    impossible: list[dict[str, Any]] = [
        {"nu": negative},  # finite, but the first step would produce NaN
        {"count": negative},
        {"mu": filled(1e30)},  # finite, and yet the first step would throw the parameters away
        {"mu": filled(0.5), "nu": filled(1e-6)},
        {"nu": filled(1e30)},  # the parameters would not move for very long
        {"count": filled(2**31 - 1)},  # the next step would make it negative
    ]
    for changes in impossible:
        with failing(WireError, "handover.unsound"):
            bounded.decode(*forged(STATE, **changes))
    for name in ("nu", "count"):
        with failing(WireError, "handover.unsound"):
            MINE.decode(*forged(STATE, **{name: negative}))
    for name in ("nu", "count", "ns_coeffs"):
        with failing(WireError, "handover.unsound"):
            held(muon).decode(*forged(muon, **{name: negative}))


def test_moments_of_real_steps_are_within_the_bounds() -> None:
    for steps in (1, 20):
        for config, state, own in ((tiny.CONFIG, trained(steps), STATE), (tiny.MUON, muon_state(steps), muon_state(1))):
            held(own, moment_bounds(config.inner)).decode(*forged(state))


class Named(NamedTuple):
    """Parameters with the names that optimisers give to their arrays."""

    count: Any
    mu: Any
    nu: Any
    step: Any
    sum: Any


def test_parameters_may_have_the_names_of_moments() -> None:
    params = Named(*[jnp.ones(3)] * 5)
    for optimizer in (optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.inject_hyperparams(optax.adam)(0.1)):
        first = optimizer.init(params)
        with jax.numpy_dtype_promotion("standard"):
            state = optimizer.update(jax.tree.map(jnp.negative, params), first, params)[1]
        decoded = held(first).decode(*forged(state))
        assert [leaf.tolist() for leaf in decoded] == [leaf.tolist() for leaf in jax.tree.leaves(state)]
        if len(decoded) > len(params):  # Adam's, with second moments
            with failing(WireError, "handover.unsound"):
                held(first).decode(*forged(jax.tree.map(negative, state)))


# -- Muon's state ---------------------------------------------------------------------------------------------------


@cache
def muon_state(steps: int) -> Any:
    """Return the state after some steps: a momentum of the kernel, two moments of the scale, and two counts."""
    state = begin(tiny.MUON.inner, fresh())
    batches = jnp.asarray(np.arange(steps * 10, dtype=np.uint8).reshape(steps, 2, 5))
    return tiny.steps_by(tiny.MUON.inner)(state, batches, jnp.int32(0), jnp.int32(tiny.MUON.inner.steps))[0].optimizer
