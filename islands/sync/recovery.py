"""Inner optimiser state for a newcomer, handed over by a peer through Redis while the giver trains (the paper's E.3).

Parameters always come from the merger; a fresh island lacks only optimiser state. The giver copies its state on its
device between two steps, and another thread sends the copy. It is sent in full precision. A digest of the layout comes
first, because the state of another optimiser may have as many bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from archipelago.broker.config import STEPS_MAX
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.messages import Handover
from archipelago.broker.presence import Presence
from archipelago.broker.transport import IslandTransport
from archipelago.broker.wire import digest, is_digest

if TYPE_CHECKING:
    from archipelago.islands.checkpoint import IslandStore
    from archipelago.islands.sync.participant import Participant

log = logging.getLogger(__name__)


#: How long a newcomer waits for a peer's answer once it is ready to train.
ASK_SECONDS = 10.0
POLL_SECONDS = 0.05
#: How often a newcomer looks whether peers still live. This reads the heartbeats of all islands.
PEERS_SECONDS = 1.0
#: After so long without an answer another peer is asked. The one that has promised it may have none to give.
ASK_AGAIN_SECONDS = 4.0
#: How many answers that it cannot use a newcomer asks for. Each costs a peer a copy of its state.
ANSWERS_MAX = 8


#: The moments of a peer may exceed those that steps can produce by this factor, for rounding.
MOMENTS_SLACK = 2.0
#: A first moment below this moves no parameter, although the square of such a gradient is 0 in float32.
TINY = 1e-12
#: The names that optax and PyTorch give to counts of steps, to first moments, to second moments, and to the other
#: arrays of an optimiser that are never negative.
COUNTS = frozenset({"count", "step"})
FIRST_MOMENTS = frozenset({"mu", "exp_avg"})
SECOND_MOMENTS = frozenset({"nu", "exp_avg_sq"})
NOT_NEGATIVE = COUNTS | SECOND_MOMENTS | {"max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"}

#: Inner optimiser state in whatever form the loop keeps it, such as a tree of arrays.
State = Any
#: From a handover and its payload to the state. Raises WireError for state that is not sound.
Decode = Callable[[Handover, bytes], State]


@dataclass(frozen=True)
class StateForPeer:
    """Inner optimiser state on its way to `who`: its arrays in order, as copies that no step donates."""

    who: str
    leaves: Sequence[Any]
    global_step: int


@dataclass(frozen=True)
class OptimizerAccess:
    """The state of a loop's inner optimiser, as a membership gives and takes it.

    Attributes:
        copies: Returns copies of its arrays, or None if they are not there now. Without it, the island gives no state.
        decode: Reads the state from a peer's answer. Without it, no peer is asked.
        use: Goes on with such a state.
    """

    copies: Callable[[], Sequence[Any] | None] | None = None
    decode: Decode | None = None
    use: Callable[[State], None] | None = None

    def present(self) -> Sequence[Any] | None:
        """Return copies of the arrays, if the island gives them and they are there now."""
        return None if self.copies is None else self.copies()


def encode(state: StateForPeer, giver: str) -> tuple[Handover, bytes]:
    """Return the message and its payload: the bytes of all leaves in order, compressed by zstd."""
    leaves = [np.asarray(leaf) for leaf in state.leaves]
    payload = zstandard.ZstdCompressor(level=1).compress(b"".join(leaf.tobytes() for leaf in leaves))
    island, _, incarnation = giver.partition("/")
    return Handover(island, incarnation, state.global_step, len(payload), digest(payload)), payload


def layout_digest(layout: Iterable[tuple[str, Sequence[int], str]]) -> NDArray[np.uint8]:
    """Return 16 bytes that stand for the names, shapes and dtypes of arrays in order."""
    listed = [[name, list(shape), dtype] for name, shape, dtype in layout]
    return np.frombuffer(hashlib.sha256(json.dumps(listed).encode()).digest()[:16], np.uint8)


def decode(handover: Handover, payload: bytes, like: Sequence[Any], layout: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return the arrays in a payload.

    Args:
        handover: The message that announces the payload.
        payload: What a peer sent.
        like: Arrays of the expected shapes and dtypes.
        layout: The digest of the layout that must come before them.

    Raises:
        WireError: The payload does not fit the announcement or the model, or a value is not finite.
    """
    like = [layout, *like]
    if len(payload) != handover.bytes or not is_digest(handover.digest, payload):
        raise WireError("the peer's optimiser state is not the announced one", code="handover.unsound")
    expected = sum(leaf.nbytes for leaf in like)
    try:
        if zstandard.get_frame_parameters(payload).content_size != expected:
            raise WireError("the peer's optimiser state does not fit this model", code="handover.shape")
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"the peer's optimiser state is not zstd ({error})", code="handover.unsound") from None
    out, start = [], 0
    for leaf in like:
        values = np.frombuffer(data, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        if not np.isfinite(values).all():
            raise WireError("NaN or infinity in the peer's optimiser state", code="handover.unsound")
        out.append(values)
        start += leaf.nbytes
    if out[0].tobytes() != layout.tobytes():
        raise WireError("the peer's optimiser state is of another optimiser or model", code="handover.shape")
    return out[1:]


class MomentBounds(NamedTuple):
    """The largest moments that the steps of an optimiser can produce.

    Without them, a peer could hand over moments that are finite and still throw an island's parameters far away.

    Attributes:
        first: The magnitude of a first moment.
        second: A second moment.
        ratio: The magnitude of one of Adam's first moments, as a multiple of the root of its second moment.
    """

    first: float = math.inf
    second: float = math.inf
    ratio: float = math.inf


NO_BOUNDS = MomentBounds()


def require_sound(name: str, values: NDArray[Any], bounds: MomentBounds, second: NDArray[Any] | None = None) -> None:
    """Raise WireError for an array that no steps can produce. First moments of Adam have `second` ones, too."""
    if name in NOT_NEGATIVE and (values < 0).any():
        raise WireError(f"a negative {name!r} in the peer's optimiser state", code="handover.unsound")
    most: Any = math.inf
    if name in COUNTS:
        most = STEPS_MAX
    elif name in FIRST_MOMENTS:
        most = bounds.first
        if second is not None and math.isfinite(bounds.ratio):
            most = np.minimum(most, bounds.ratio * np.sqrt(np.abs(second)) + TINY)
    elif name in SECOND_MOMENTS:
        most = bounds.second
    if (np.abs(values) > most).any():
        raise WireError(f"a {name!r} in the peer's optimiser state that no steps can produce", code="handover.unsound")


def adam_ratio(beta1: float, beta2: float) -> float:
    """Return the largest magnitude of Adam's first moment, as a multiple of the root of its second moment.

    With m = (1 − b1) Σ b1^i g_i and v = (1 − b2) Σ b2^i g_i², the inequality of Cauchy and Schwarz gives it.
    """
    if not 0.0 <= beta1 < 1.0 or not beta1**2 < beta2 < 1.0:
        return math.inf
    return (1.0 - beta1) / math.sqrt((1.0 - beta1**2 / beta2) * (1.0 - beta2))


def peers(presences: list[Presence], name: str) -> list[str]:
    """Return the islands that could answer a newcomer of that name."""
    return [p.heartbeat.island for p in presences if p.is_training and p.heartbeat.island != name]


#: An island hands its optimiser state over to this many newcomers at a time. Each copy takes memory of the device.
HANDOVERS_AT_ONCE = 2
#: How many newcomers are remembered as answered.
ANSWERED_KEPT = 4096


class Giver:
    """Hands an island's inner optimiser state to newcomers who ask for it, if there is one (`is_willing`)."""

    def __init__(self, transport: IslandTransport, who: str) -> None:
        """Create a giver; `who` is the island and its incarnation."""
        self._broker, self._who = transport.island, who
        self.is_willing = True
        self._states: deque[StateForPeer] = deque()
        self._asked_by: deque[str] = deque()
        self._answered: dict[str, None] = {}  # newcomers, in order; a flood of repeated requests gets one answer each

    def take(self) -> list[str]:
        """Return the newcomers since the last call to whom this island has promised its state."""
        return [self._asked_by.popleft() for _ in range(len(self._asked_by))]

    def hand_over(self, state: StateForPeer) -> None:
        """Queue a state for a newcomer."""
        self._states.append(state)

    def offer(self) -> None:
        """Look for newcomers, and promise to answer some of them."""
        room = HANDOVERS_AT_ONCE - len(self._asked_by) - len(self._states)
        if room <= 0:
            return
        found = self._broker.open_requests(self._who)
        for who in islice((who for who in found if who != self._who and who not in self._answered), room):
            if self._broker.promise_answer(who, self._who):
                self._answered[who] = None
                self._asked_by.append(who)
        while len(self._answered) > ANSWERED_KEPT:
            del self._answered[next(iter(self._answered))]

    def pump(self) -> None:
        """Send the queued states."""
        while self._states:
            state = self._states[0]
            self._broker.hand_over(state.who, *encode(state, self._who))
            self._states.popleft()


class Newcomer:
    """The start of one incarnation. Call `ask` before its first heartbeat, and `complete` after compilation."""

    def __init__(
        self,
        transport: IslandTransport,
        island: Participant,
        seconds: float = ASK_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Store the parts, and contact no peer. `complete` waits up to `seconds` for a peer's answer."""
        self.transport, self.island = transport, island
        self.seconds, self.pause = seconds, pause
        self.who = f"{island.name}/{island.incarnation}"
        self._asked = False

    def ask(self, *, wants_state: bool = True) -> None:
        """Look for peers, and ask them for optimiser state unless the run is at its beginning."""
        island = self.island
        wants_state = wants_state and island.optimizer.decode is not None and island.ledger.global_step > 0
        try:
            if wants_state and peers(self.transport.reader.presences(), island.name):
                self.transport.island.request_state(self.who)
                self._asked = True
        except BrokerError as error:
            log.warning("no peer can be asked for optimiser state: %s", error.what)

    def complete(self, store: IslandStore | None = None) -> None:
        """Take the inner optimiser's state of a peer, else the own one of a store, else begin with fresh state.

        The totals of earlier incarnations go on. What they did and lost was trained, too.
        """
        island, received, decode = self.island, None, self.island.optimizer.decode
        try:
            received = self.wait(decode) if self._asked and decode else None
        except (BrokerError, WireError) as error:
            log.warning("no optimiser state from a peer: %s", error.what)
        if received is not None:
            giver, state = received
            island.use_optimizer(state, f"peer {giver}")
        elif store is not None:
            store.restore(island)
        totals, before = island.totals, island.link.heartbeats.first
        totals.steps, totals.tokens = max(totals.steps, before.steps), max(totals.tokens, before.tokens)

    def wait(self, decode: Decode) -> tuple[str, State] | None:
        """Wait for a peer's answer to `ask`, and return its name and its state; None if no peer answered.

        An outage is waited for, too.

        An answer that cannot be used, such as the state of a peer in another framework, is withdrawn with its request,
        and the request is made again, as after a peer that stays silent. Each peer answers an incarnation once, so
        another one answers next.

        Args:
            decode: Reads the state from an answer.

        Raises:
            BrokerError: The broker refuses to answer, or cannot be reached in the end.
            WireError: No answer can be used. This is the fault of the last one.
        """
        clock, broker = self.island.clock, self.transport.island
        asked_at = look_at = clock()
        deadline = asked_at + self.seconds
        faults: list[WireError] = []
        others, useless = set[str](), set[str]()
        try:
            while True:
                self.island.beat("joining")
                found: tuple[Handover, bytes] | None = None
                fault: WireError | None = None
                with suppress(UnreachableError):
                    try:
                        if (found := broker.handed_over(self.who)) is not None:
                            return found[0].giver, decode(*found)
                    except WireError as error:
                        fault = error
                        faults.append(error)
                        useless |= {found[0].giver} if found is not None else set()
                    if clock() >= look_at:
                        others = {*peers(self.transport.reader.presences(), self.island.name)}
                        look_at = clock() + PEERS_SECONDS
                    left = others - useless
                    if not left or len(faults) >= ANSWERS_MAX:
                        break
                    if fault is not None or (len(left) > 1 and clock() - asked_at >= ASK_AGAIN_SECONDS):
                        why = "no answer" if fault is None else fault.what
                        log.info("another peer is asked for optimiser state: %s", why)
                        broker.withdraw_request(self.who)
                        broker.request_state(self.who)
                        asked_at = clock()
                if clock() >= deadline:
                    break
                self.pause(POLL_SECONDS)
            if faults:
                raise faults[-1]
            return None
        finally:
            broker.withdraw_request(self.who)
