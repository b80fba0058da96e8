"""The outbox of an island: contributions on their way to the broker, until the merger has decided about them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from archipelago.broker.codecs import Parts, body_of, codec
from archipelago.broker.config import WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.messages import Contribution
from archipelago.broker.transport import MEMORY_SHARE_MAX, IslandTransport
from archipelago.broker.wire import digest, pack_body
from archipelago.islands.sync.connection.uplink import Uplink

#: How many merged contributions are kept in any case. In int4, they take half the bytes of one float32 fragment.
KEPT_MIN = 4
#: Others are kept for this long, because a failover forgets about a second, and as long as all have few bytes.
KEPT_SECONDS = 10.0
KEPT_BYTES_MAX = 64 << 20


class Merged:
    """The newest merged contributions of one island, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, float, SentContribution]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, round_number: int, contribution: SentContribution, now: float) -> None:
        """Keep a contribution that was merged in that round, and drop those that are no longer needed."""
        self._kept.append((round_number, now, contribution))
        self._bytes += len(contribution.payload)
        while len(self._kept) > KEPT_MIN:
            _, since, oldest = self._kept[0]
            if now - since <= KEPT_SECONDS and self._bytes <= KEPT_BYTES_MAX:
                break
            self._kept.popleft()
            self._bytes -= len(oldest.payload)

    @property
    def first_round(self) -> int | None:
        """The first round that merged one of them; None if there are none."""
        return min((number for number, _, _ in self._kept), default=None)

    def undone(self, closed: int, tape: Mapping[int, Set[str]]) -> list[SentContribution]:
        """Return the contributions that no round has merged after all, and keep them no longer.

        Args:
            closed: The last closed round.
            tape: The contributions that the tape names, by round. A contribution of a round that it lacks stays merged.
        """
        named = frozenset().union(*tape.values())

        def is_undone(number: int, contribution: SentContribution) -> bool:
            return contribution.identity_text not in named and (number > closed or number in tape)

        out = [contribution for number, _, contribution in self._kept if is_undone(number, contribution)]
        self._kept = deque(each for each in self._kept if not is_undone(each[0], each[2]))
        self._bytes = sum(len(contribution.payload) for _, _, contribution in self._kept)
        return out


#: The value of `SentContribution.entry` for a contribution that a broker has lost.
LOST = "lost"


@dataclass(frozen=True)
class Draft:
    """A measured contribution that the link has yet to encode.

    Attributes:
        header: The contribution, without the size and the digest of its payload.
        parts: The codec's arrays, still on the device.
        elements: The number of the fragment's elements.
        is_sound: Whether the arrays may be sent, judged by the sending thread; None sends them in any case.
    """

    header: Contribution
    parts: Parts
    elements: int
    is_sound: Callable[[Draft], bool] | None = None

    def encoded(self, zstd_level: int) -> tuple[Contribution, bytes]:
        """Return the contribution and its payload."""
        payload = pack_body(body_of(self.parts), self.header.codec, self.elements, zstd_level)
        return replace(self.header, bytes=len(payload), digest=digest(payload)), payload


@dataclass(frozen=True)
class SentContribution:
    """A contribution that the broker has or may have, kept until the merger has decided about it.

    Attributes:
        contribution: The message.
        payload: Its payload.
        entry: Its stream entry; empty until the broker has acknowledged it, `LOST` if it must be sent again.
    """

    contribution: Contribution
    payload: bytes
    entry: str

    @property
    def identity_text(self) -> str:
        """The identity of the contribution."""
        return self.contribution.identity_text


class Outbox:
    """Queued and undecided contributions of one island. The training thread queues, the sending thread publishes."""

    def __init__(
        self,
        transport: IslandTransport,
        wire: WireConfig,
        uplink: Uplink,
        clock: Callable[[], float],
        changed: threading.Condition,
    ) -> None:
        """Create an empty outbox.

        Args:
            transport: Where contributions are published.
            wire: The run's settings for payloads.
            uplink: Measures of this island's link; they decide whether compression pays.
            clock: Monotonic seconds.
            changed: Notified each time a contribution has left the queue, or was decided about.
        """
        self._transport = transport
        self._wire = wire
        self._uplink = uplink
        self._clock = clock
        self._changed = changed
        #: The fragments of drafts that were not sound. They were dropped.
        self.unsound: list[int] = []
        self.bytes_up = 0
        self.sent = 0
        self._queue: deque[Draft] = deque()
        self._unresolved: dict[str, SentContribution] = {}
        self._merged = Merged()
        self._encoded: tuple[Draft, Contribution, bytes] | None = None
        self._attempted = ""  # identity of the contribution that was published last, successfully or not
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of contributions that the broker has not taken yet."""
        return len(self._queue)

    # -- the training thread's side -----------------------------------------------------------------------------------

    def queue(self, draft: Draft) -> None:
        """Queue a contribution. The window bounds the queue, because an island owes nothing beyond it."""
        for part in draft.parts:
            part.copy_to_host_async()  # only the compressed arrays leave the device
        self._queue.append(draft)

    def unresolved_rounds(self) -> set[int]:
        """Return the rounds of all contributions that are queued, or sent and neither merged nor refused yet."""
        queued = {draft.header.round for draft in list(self._queue)}  # read first, as above
        with self._lock:
            return queued | {published.contribution.round for published in self._unresolved.values()}

    @property
    def queued_tokens(self) -> int:
        """Tokens of the contributions that the broker has not taken yet."""
        return sum(draft.header.tokens for draft in list(self._queue))

    # -- sending ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Encode and publish everything queued, oldest first. A contribution whose sending fails stays queued."""
        while self._queue:
            self.send_oldest()

    def send_oldest(self) -> None:
        """Encode and publish the oldest queued contribution. It stays queued if that fails."""
        draft = self._queue[0]
        if draft.is_sound is not None and not draft.is_sound(draft):
            self.unsound.append(draft.header.fragment)
            self._dequeue()
            return
        self._require_room()
        if self._encoded is None or self._encoded[0] is not draft:
            self._encoded = (draft, *self._encode(draft))
        _, contribution, payload = self._encoded  # encoded once: a retry must carry the same bytes
        is_first = self._attempted != contribution.identity_text
        if self._begin_attempt(contribution, payload):
            began = self._clock()
            entry = self._transport.island.publish(contribution, payload)
            if is_first:  # a retry sends only what is missing, so its time says nothing about the link
                self._uplink.sent(len(payload), began, self._clock())
            self._acknowledge(contribution.identity_text, entry)
        self.bytes_up += len(payload)
        self.sent += 1
        self._dequeue()

    def _dequeue(self) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()

    def lost(self) -> list[str]:
        """Return the contributions that the broker does not hold. The merger may have decided about them just now."""
        with self._lock:
            entries = {identity: published.entry for identity, published in self._unresolved.items() if published.entry}
        return [each for each, entry in entries.items() if entry == LOST or not self._transport.island.holds(entry)]

    def resend(self, identities: Sequence[str]) -> None:
        """Publish those of these contributions again about which the merger has not decided."""
        for identity in identities:
            with self._lock:
                published = self._unresolved.get(identity)
            if published is not None:
                self._acknowledge(identity, self._transport.island.publish(published.contribution, published.payload))

    def _encode(self, draft: Draft) -> tuple[Contribution, bytes]:
        """Encode a draft, compressed if that pays on this link."""
        level = self._wire.zstd_level if self._uplink.should_pack() else 0
        began = self._clock()
        contribution, payload = draft.encoded(level)
        if level:
            before = codec(contribution.codec).encoded_size(draft.elements)
            self._uplink.packed(before, len(payload), self._clock() - began)
        return contribution, payload

    def _require_room(self) -> None:
        memory = self._transport.reader.memory()
        if memory.limit and memory.used > MEMORY_SHARE_MAX * memory.limit:
            raise BrokerError(
                f"Redis is nearly full ({memory.used >> 20} of {memory.limit >> 20} MiB), so this island sends nothing",
                "Sending resumes once the merger has caught up. Or raise the server's maxmemory.",
                code="broker.full",
            )

    def _begin_attempt(self, contribution: Contribution, payload: bytes) -> bool:
        """Note a contribution before it is published, and return whether to publish it.

        A failed attempt may have reached the broker. If the merger has decided about the contribution since, there is
        nothing left to publish.
        """
        identity = contribution.identity_text
        with self._lock:  # noted first, because the merger's decision may arrive before the broker's acknowledgement
            if self._attempted == identity and identity not in self._unresolved:
                return False
            self._unresolved[identity] = SentContribution(contribution, payload, entry="")
            self._attempted = identity
            return True

    def _acknowledge(self, identity: str, entry: str) -> None:
        with self._lock:
            if identity in self._unresolved:
                self._unresolved[identity] = replace(self._unresolved[identity], entry=entry)

    # -- decisions of the merger --------------------------------------------------------------------------------------

    def resolve(self, identities: Set[str], merged_in: int | None = None) -> None:
        """Forget contributions that were refused, or merged in the round `merged_in`."""
        with self._lock:
            for identity in self._unresolved.keys() & identities:
                published = self._unresolved.pop(identity)
                if merged_in is not None:
                    self._merged.add(merged_in, published, self._clock())
        with self._changed:
            self._changed.notify_all()

    @property
    def first_merged_round(self) -> int | None:
        """The first round of the merged contributions that are kept for a failover; None if there are none."""
        with self._lock:
            return self._merged.first_round

    def undo(self, closed: int, tape: Mapping[int, Set[str]]) -> None:
        """Take back the contributions that no round has merged after all, because the broker has lost their rounds.

        `resend` then publishes those that it has lost, too. For the arguments, see `Merged.undone`.
        """
        with self._lock:
            for published in self._merged.undone(closed, tape):
                # The acknowledgement of its sending may not have come before the merger's decision.
                again = published if published.entry else replace(published, entry=LOST)
                self._unresolved[published.identity_text] = again
