"""Admission: which contributions join the sums of their fragments' next rounds, and why others are refused.

`reason_to_refuse` is pure and judges a contribution by its header, so that the payload of a refused one is never
downloaded. `Inbox` applies it to what arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from archipelago.broker.corpus_shards import parse_places
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Refusal
from archipelago.broker.transport import Delivery, MergerTransport
from archipelago.merger.round_merge import Addend, RoundMerge, RoundSum
from archipelago.merger.state import FragmentState, RunState
from archipelago.merger.steering import EXPELLED

#: An island may train batches that are larger than the run's by this factor, because weights grow with tokens squared.
TOKENS_PER_STEP_MAX = 64
#: A contribution may be ahead of the last closed round by this many times the number of fragments.
ROUNDS_AHEAD_MAX = 2
REASON_CHARACTERS_MAX = 500

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reason:
    """Why a contribution is refused: a stable `code` for programs, and `text` for the island and the operator."""

    code: str
    text: str


def reason_to_refuse(contribution: Contribution, manifest: Manifest, closed: int) -> Reason | None:
    """Return why a contribution may not be merged, judged by its header, or None when it may.

    Args:
        contribution: The header.
        manifest: The run.
        closed: The last closed round.
    """
    c, config, fragments = contribution, manifest.config, len(manifest.fragments)
    if c.fragment >= fragments or manifest.fragment_of(c.round) != c.fragment:
        return Reason("fragment", f"round {c.round} does not sync fragment {c.fragment}")
    version = version_after(closed, c.fragment, fragments)
    if c.round > closed + ROUNDS_AHEAD_MAX * fragments:
        return Reason("ahead", f"round {c.round} is far ahead of round {closed}, the last one closed")
    if c.base > version:
        return Reason("base", f"measured from version {c.base}, which does not exist yet (now {version})")
    if c.tokens > c.steps * config.tokens_per_step * TOKENS_PER_STEP_MAX:
        return Reason("tokens", f"{c.tokens} tokens in {c.steps} steps are impossible")
    if c.codec not in (config.wire.up, config.wire.thin):
        return Reason("codec", f"this run does not use codec {c.codec[:32]!r}")
    if fault := _fault_of_places(c.data, config.data.shards):
        return Reason("data", fault)
    staleness = version - c.base
    if staleness > config.sync.staleness_cap:
        return Reason("stale", f"staleness {staleness} is over the cap of {config.sync.staleness_cap}")
    return None


def version_after(closed: int, p: int, fragments: int) -> int:
    """Return the version of fragment `p` once round `closed` has closed: how many of its rounds have."""
    return (closed - p - 1) // fragments + 1


def _fault_of_places(data: str, shards: int) -> str:
    """Return what is wrong with the island's reading positions in the corpus, or an empty text."""
    try:
        places = parse_places(data)
    except WireError as error:
        return error.reason
    beyond = [place.shard for place in places if int(place.shard.rpartition("/")[2]) >= shards]
    return f"shard {beyond[0]} of {shards} does not exist" if beyond else ""


class Inbox:
    """The contributions that wait for their rounds, as one sum for each fragment.

    Args:
        transport: The connection to the run.
        rules: How rounds are merged.
        is_expelled: Whether the operator has expelled an island.
    """

    def __init__(self, transport: MergerTransport, rules: RoundMerge, is_expelled: Callable[[str], bool]) -> None:
        self.transport, self.rules = transport, rules
        #: How many contributions this process has refused.
        self.refused = 0
        self._is_expelled = is_expelled
        self._sums: dict[int, RoundSum] = {}

    def clear(self) -> None:
        """Drop all waiting contributions."""
        self._sums.clear()

    def addends(self) -> Iterator[Addend]:
        """Yield all waiting contributions."""
        return chain.from_iterable(round_sum.addends for round_sum in self._sums.values())

    def entries(self) -> list[str]:
        """Return the stream entries of all waiting contributions."""
        return [addend.entry for addend in self.addends()]

    def waiting_fragments(self) -> set[int]:
        """Return the fragments that contributions wait for."""
        return {p for p, round_sum in self._sums.items() if round_sum.addends}

    def drop_expelled(self) -> bool:
        """Drop the sums with contributions of expelled islands. A single addend cannot be removed from a sum.

        Returns:
            Whether any was dropped; its contributions must be received again.
        """
        mixed = [p for p, s in self._sums.items() if any(self._is_expelled(a.contribution.island) for a in s.addends)]
        for p in mixed:
            del self._sums[p]
        return bool(mixed)

    def take(self, p: int, fragments: Sequence[FragmentState], closed: int) -> RoundSum:
        """Remove and return the sum of the fragment's next round."""
        found = self._sum(p, fragments, closed)
        del self._sums[p]
        return found

    def receive(
        self, delivery: Delivery, state: RunState, fragments: Sequence[FragmentState], epoch: int
    ) -> Contribution | None:
        """Add a contribution to its sum, or refuse it.

        Returns:
            The contribution when it was added.
        """
        contribution = delivery.contribution
        if contribution is None or delivery.fault:
            self._refuse(delivery, Reason("unreadable", delivery.fault), state, epoch)
            return None
        if delivery.entry in self.entries():
            return None  # a recreated consumer group delivered it again; it waits already
        if state.has_seen(contribution.identity) or self._is_waiting(contribution.identity):
            self._refuse(delivery, Reason("repeat", "a repeat of a contribution that was taken already"), state, epoch)
            return None
        reason = self._reason(contribution, state.closed)
        if reason is None:
            delivery = delivery.with_payload()
            if delivery.fault:
                self._refuse(delivery, Reason("unreadable", delivery.fault), state, epoch)
                return None
            reason = self._add(delivery, contribution, state.closed, fragments)
        if reason is None:
            return contribution
        self._refuse(delivery, reason, state, epoch)
        state.see(contribution.identity)
        return None

    def _reason(self, contribution: Contribution, closed: int) -> Reason | None:
        if self._is_expelled(contribution.island):
            return Reason("expelled", EXPELLED)
        return reason_to_refuse(contribution, self.rules.manifest, closed)

    def _add(
        self, delivery: Delivery, contribution: Contribution, closed: int, fragments: Sequence[FragmentState]
    ) -> Reason | None:
        try:
            self.rules.add(self._sum(contribution.fragment, fragments, closed), delivery)
        except WireError as error:
            return Reason(error.code, error.reason)
        return None

    def _sum(self, p: int, fragments: Sequence[FragmentState], closed: int) -> RoundSum:
        if p not in self._sums:
            self._sums[p] = self.rules.begin(p, fragments[p], version_after(closed, p, len(fragments)))
        return self._sums[p]

    def _is_waiting(self, identity: tuple[str, str, int]) -> bool:
        return any(addend.contribution.identity == identity for addend in self.addends())

    def _refuse(self, delivery: Delivery, reason: Reason, state: RunState, epoch: int) -> None:
        c, text, repeat = delivery.contribution, reason.text[:REASON_CHARACTERS_MAX], reason.code == "repeat"
        if c is None:
            refusal = Refusal(delivery.sender, "?", 0, 0, 0, 0, text, repeat)
        else:
            decided = repeat and state.has_seen(c.identity)
            refusal = Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, text, repeat, decided)
        log.warning(
            "refused a contribution of %s to round %s: %s",
            refusal.island,
            refusal.round,
            reason.text,
            extra={"round": refusal.round, "code": f"refused.{reason.code}"},
        )
        self.transport.merger.refuse(epoch, [(delivery.entry, refusal)])
        self.refused += 1
