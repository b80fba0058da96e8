"""The outbox of an island: contributions on their way to the broker, until the merger has decided about them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from archipelago.broker.codecs import Parts, body_of
from archipelago.broker.config import WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.messages import Contribution
from archipelago.broker.transport import MEMORY_SHARE_MAX, IslandTransport
from archipelago.broker.wire import digest, pack_body
from archipelago.islands.sync.measures import PACKED_SECONDS_A_BYTE, Uplink

#: How many merged contributions are kept in any case. In int4, they take half the bytes of one float32 fragment.
KEPT_MIN = 4
#: Others are kept for this long, because a failover forgets about a second, and as long as all have few bytes.
KEPT_SECONDS = 10.0
KEPT_BYTES_MAX = 64 << 20
#: The exponent of a bfloat16 number. All its bits are set in NaN and in infinity.
_EXPONENT = np.uint16(0x7F80)
#: The entry of a contribution that the broker has lost.
LOST = "lost"


@dataclass
class Draft:
    """A measured contribution. Its header lacks the payload's size and digest, which `sent` has once it is encoded."""

    header: Contribution
    parts: Parts
    elements: int
    sent: Sent | None = None

    def is_sound(self) -> bool:
        """Return whether no value is NaN or infinite. This waits for the device.

        The first array of every codec holds either the numbers themselves, as float32 or the bits of bfloat16, or the
        scales of its blocks as the bits of bfloat16. A block with a NaN or an infinity has the scale NaN.
        """
        first = np.asarray(self.parts[0])
        if first.dtype == np.uint16:
            return not bool(np.any((first & _EXPONENT) == _EXPONENT))
        return bool(np.all(np.isfinite(first)))


@dataclass(eq=False)
class Sent:
    """A contribution that the broker has or may have.

    Attributes:
        entry: Its stream entry; empty until the broker has acknowledged it, `LOST` if it must be sent again.
        merged_in: The round that merged it; None until the merger has decided.
        merged_at: When this island heard of that.
    """

    contribution: Contribution
    identity: str
    payload: bytes
    entry: str = ""
    merged_in: int | None = None
    merged_at: float = 0.0


class Outbox:
    """Queued and sent contributions of one island. The training thread queues, the sending thread publishes.

    A sent contribution is kept until the merger has refused it, and some seconds longer if it was merged, because a
    failover may forget its round.
    """

    def __init__(
        self,
        transport: IslandTransport,
        wire: WireConfig,
        uplink: Uplink,
        clock: Callable[[], float],
        changed: threading.Condition,
        unsound: list[int],
    ) -> None:
        """Create an empty outbox.

        The fragments of drafts that are not sound, and so are dropped, are added to `unsound`.
        The measures of the link decide whether compression pays. `changed` is notified when a contribution has left
        the queue, or was decided about.
        """
        self._transport, self._wire, self._uplink, self._clock = transport, wire, uplink, clock
        self._changed, self._unsound = changed, unsound
        #: Whether nothing more is sent, because another process has the island's name.
        self.is_closed = False
        #: The contributions that the broker has not taken yet.
        self.queued: deque[Draft] = deque()
        self._sent: dict[str, Sent] = {}  # by identity
        self._merged: deque[Sent] = deque()  # those of them that were merged, in that order
        self._lock = threading.Lock()

    # -- the training thread's side -----------------------------------------------------------------------------------

    def queue(self, draft: Draft) -> None:
        """Queue a contribution. The window bounds the queue, because an island owes nothing beyond it.

        The sending thread copies what the device has encoded: to ask for the copy takes JAX 7 ms for 10 MB.
        """
        self.queued.append(draft)

    def unresolved_rounds(self) -> set[int]:
        """Return the rounds of all contributions that are queued, or sent and neither merged nor refused yet."""
        queued = {draft.header.round for draft in list(self.queued)}  # read first, so that none is missed
        with self._lock:
            return queued | {sent.contribution.round for sent in self._undecided()}

    def undecided_entries(self) -> list[str]:
        """Return the stream entries of the contributions that the merger has neither merged nor refused yet."""
        with self._lock:
            return [sent.entry for sent in self._undecided() if sent.entry not in ("", LOST)]

    def _undecided(self) -> list[Sent]:
        return [sent for sent in self._sent.values() if sent.merged_in is None]

    # -- sending ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Encode and publish everything queued, oldest first. A contribution whose sending fails stays queued."""
        while self.queued and not self.is_closed:
            self.send_oldest()

    def send_oldest(self) -> None:
        """Encode and publish the oldest queued contribution. It stays queued if that fails."""
        draft = self.queued[0]
        if not draft.is_sound():
            self._unsound.append(draft.header.fragment)
            self._dequeue()
            return
        self._require_room()
        is_retry = draft.sent is not None
        sent = draft.sent = draft.sent or self._encode(draft)  # encoded once: a retry must carry the same bytes
        with self._lock:  # noted first, because the merger's decision may arrive before the broker's acknowledgement
            # A failed attempt may have reached the broker, and the merger may have decided about it since.
            is_decided = is_retry and (sent.identity not in self._sent or sent.merged_in is not None)
            if not is_decided:
                self._sent[sent.identity] = sent
        if not is_decided:
            began = self._clock()
            sent.entry = self._transport.island.publish(sent.contribution, sent.payload)
            if not is_retry:  # a retry sends only what is missing, so its time says nothing about the link
                self._uplink.sent(len(sent.payload), self._clock() - began)
        self._uplink.bytes_up += len(sent.payload)
        self._uplink.contributions += 1
        self._dequeue()

    def _dequeue(self) -> None:
        with self._changed:
            self.queued.popleft()
            self._changed.notify_all()

    def _encode(self, draft: Draft) -> Sent:
        """Encode a draft, compressed if that pays on this link."""
        header, body = draft.header, body_of(draft.parts)
        is_fast = 0.0 < self._uplink.seconds_a_byte < PACKED_SECONDS_A_BYTE
        payload = pack_body(body, header.codec, draft.elements, 0 if is_fast else self._wire.zstd_level)
        contribution = replace(header, bytes=len(payload), digest=digest(payload))
        return Sent(contribution, contribution.identity_text, payload)

    def _require_room(self) -> None:
        memory = self._transport.reader.memory()
        if memory.limit and memory.used > MEMORY_SHARE_MAX * memory.limit:
            raise BrokerError(
                f"Redis is nearly full ({memory.used >> 20} of {memory.limit >> 20} MiB), so this island sends nothing",
                "Sending resumes once the merger has caught up. Or raise the server's maxmemory.",
                code="broker.full",
            )

    def lost(self) -> list[Sent]:
        """Return the contributions that the broker does not hold. The merger may have decided about them just now."""
        with self._lock:
            found = [sent for sent in self._undecided() if sent.entry]
        return [sent for sent in found if sent.entry == LOST or not self._transport.island.holds(sent.entry)]

    def resend(self, lost: Sequence[Sent]) -> None:
        """Publish those of these contributions again about which the merger has not decided."""
        for sent in lost:
            if sent.identity in self._sent and sent.merged_in is None:
                sent.entry = self._transport.island.publish(sent.contribution, sent.payload)

    # -- decisions of the merger --------------------------------------------------------------------------------------

    def refused(self, identity: str) -> None:
        """Forget a contribution that was refused."""
        with self._lock:
            if (sent := self._sent.get(identity)) is not None and sent.merged_in is None:
                del self._sent[identity]
        with self._changed:
            self._changed.notify_all()

    def merged(self, identities: Collection[str], number: int) -> None:
        """Note the contributions that a round has merged, and forget those that are no longer needed."""
        with self._lock:
            newly = [sent for sent in self._undecided() if sent.identity in identities]
            now = self._clock() if newly else 0.0
            for sent in newly:
                sent.merged_in, sent.merged_at = number, now
            self._merged += newly
            size = sum(len(sent.payload) for sent in self._merged)
            while len(self._merged) > KEPT_MIN:
                oldest, newest = self._merged[0], self._merged[-1]
                if newest.merged_at - oldest.merged_at <= KEPT_SECONDS and size <= KEPT_BYTES_MAX:
                    break
                size -= len(oldest.payload)
                del self._sent[self._merged.popleft().identity]
        with self._changed:
            self._changed.notify_all()

    @property
    def first_merged_round(self) -> int | None:
        """The first round of the merged contributions that are kept for a failover; None if there are none."""
        with self._lock:
            return min((sent.merged_in for sent in self._merged if sent.merged_in is not None), default=None)

    def undo(self, closed: int, tape: Mapping[int, Set[str]]) -> None:
        """Take back the contributions that no round has merged after all, because the broker has lost their rounds.

        `resend` then publishes those that it has lost, too.

        Args:
            tape: The contributions that the tape names, by round. A contribution of a round that it lacks stays merged.
        """
        named = frozenset().union(*tape.values())
        with self._lock:
            for sent in list(self._merged):
                number = sent.merged_in or 0
                if sent.identity not in named and (number > closed or number in tape):
                    self._merged.remove(sent)
                    # The acknowledgement of its sending may not have come before the merger's decision.
                    sent.merged_in, sent.entry = None, sent.entry or LOST
