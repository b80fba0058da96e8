"""Admission: which contributions wait for their fragments' next rounds, and why others are refused.

`reason_to_refuse` is pure and judges a contribution by its header, so that the payload of a refused one is never
downloaded. `Inbox` applies it to what arrives.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from archipelago.broker.commits import Delivery, nothing
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import MERGED_MAX, Contribution, Refusal
from archipelago.broker.ranges import RANGES_MAX
from archipelago.broker.shards.reader import Spawn
from archipelago.broker.transport import MergerTransport
from archipelago.merger import claims
from archipelago.merger.executor import at_once, awaited
from archipelago.merger.round_merge import Addend, RoundMerge
from archipelago.merger.state import INCARNATIONS_MAX, REMEMBERED_MAX, RunState
from archipelago.merger.steering import EXPELLED

#: A contribution may be ahead of the last closed round by this many times the number of fragments.
ROUNDS_AHEAD_MAX = 2
REASON_CHARACTERS_MAX = 500
#: Contributions of one island that can wait for one round. An honest island sends one for each version that it holds.
WAITING_MAX = 32
#: Contributions that are downloaded at once. If the Redis is far away, most of a download is the round trip.
AHEAD = 4
#: Contributions that an island may delete from its stream before they are merged. Each makes the merger load the run
#: again, so this process refuses what an island sends after that many.
WITHDRAWN_MAX = 3
#: Refusals that one write holds. A server takes about a million words in a command, and does nothing else meanwhile.
REFUSED_MAX = 1000
#: How many refusals of one batch are logged one by one.
LOGGED_MAX = 20
#: How many refusals of one island are announced in one round. All islands read all announcements, and the stream of
#: them is bounded, so a flood of refusals would hide the announcements of rounds. Honest islands wait for a few.
ANNOUNCED_MAX = 256
#: The same for entries that name no contribution, whose refusal no island waits for.
NAMELESS_MAX = 4
NAMELESS = "?"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reason:
    """Why a contribution is refused: a stable `code` for programs, and `text` for the island and the operator."""

    code: str
    text: str


WITHDRAWN = Reason(
    "withdrawn", "others were deleted before they were merged; this merger refuses all until it starts again"
)


def reason_to_refuse(contribution: Contribution, manifest: Manifest, closed: int) -> Reason | None:
    """Return why a contribution may not be merged, judged by its header, or None when it may."""
    c, config = contribution, manifest.config
    if c.fragment not in manifest.own_fragments or manifest.fragment_of(c.round) != c.fragment:
        return Reason("fragment", f"round {c.round} does not sync fragment {c.fragment}")
    version = manifest.version_at(closed, c.fragment)
    if c.round > closed + ROUNDS_AHEAD_MAX * len(manifest.fragments) or c.base > version:
        sent = f"round {c.round}, measured from version {c.base} (now {version})"
        return Reason(
            "lost", f"{sent}, is not of the run after {manifest.described(closed)}, to which it may have gone back"
        )
    if c.tokens > c.steps * claims.tokens_per_step_max(config):
        return Reason("tokens", f"{c.tokens} tokens in {c.steps} steps are impossible")
    if c.codec not in (config.wire.up, config.wire.thin):
        return Reason("codec", f"this run does not use codec {c.codec[:32]!r}")
    if fault := _fault_of_positions(c, RANGES_MAX if config.has_user_loops else config.data.shards):
        return Reason("data", fault)
    staleness = version - c.base
    if staleness > config.sync.staleness_cap:
        return Reason("stale", f"staleness {staleness} is over the cap of {config.sync.staleness_cap}")
    return None


def _fault_of_positions(contribution: Contribution, ranges: int) -> str:
    """Return what is wrong with the island's reading positions in the corpus, or an empty text."""
    try:
        beyond = [position.range for position in contribution.positions if int(position.range) >= ranges]
    except WireError as error:
        return error.reason
    return f"range {beyond[0]} of {ranges} does not exist" if beyond else ""


@dataclass
class Waiting:
    """What waits for a fragment's next round, and how much of its room is taken, because messages have limits.

    Attributes:
        addends: The contributions, in the order of arrival.
        characters: The length of their identities in the snapshot's event, and of those that are being downloaded.
        islands: How many of them each island has.
    """

    addends: list[Addend] = field(default_factory=list)
    characters: int = 0
    islands: Counter[str] = field(default_factory=Counter)

    def fits(self, contribution: Contribution) -> bool:
        length = len(contribution.identity_text) + 1
        return self.characters + length <= MERGED_MAX and self.islands[contribution.island] < WAITING_MAX

    def reserve(self, contribution: Contribution, sign: int = 1) -> None:
        """Take room for a contribution, or give it back with the sign -1."""
        self.characters += sign * (len(contribution.identity_text) + 1)
        self.islands[contribution.island] += sign


class Inbox:
    """The contributions that wait for their rounds.

    Args:
        downloads: Downloads and checks the next contributions.
        between: Called between two contributions, and while a download is awaited: they may take longer than a lease.

    Attributes:
        config: The run's config with the operator's changes.
        barred: Why all contributions of an island are refused, by its name.
    """

    def __init__(
        self,
        transport: MergerTransport,
        rules: RoundMerge,
        downloads: Spawn = at_once,
        between: Callable[[], object] = nothing,
    ) -> None:
        self.transport, self.rules = transport, rules
        self.config = rules.manifest.config
        self.barred: dict[str, Reason] = {}
        #: How many commits failed because a contribution of an island had been deleted.
        self._withdrawn: Counter[str] = Counter()
        self._range_sequences = claims.range_sequences(rules.manifest)
        self._downloads, self._between = downloads, between
        self._waiting: dict[int, Waiting] = {}  # by fragment
        #: The entries of all that waits or is being downloaded, by identity, in the order of arrival.
        self._entries: dict[tuple[str, str, int], str] = {}
        #: Numbers of refused contributions, by incarnation, that no later contribution has followed.
        self._unused: dict[tuple[str, str], set[int]] = {}
        self._refusals: list[tuple[str, Refusal]] = []
        self._announced: Counter[tuple[str, bool]] = Counter()  # refusals in this round, by island

    def clear(self) -> None:
        """Drop all waiting contributions, and those whose downloads were interrupted."""
        for each in (self._refusals, self._waiting, self._entries):
            each.clear()

    def entries(self) -> list[str]:
        return list(self._entries.values())

    def waiting_fragments(self) -> set[int]:
        return {p for p, waiting in self._waiting.items() if waiting.addends}

    def note_withdrawn(self, island: str) -> None:
        """Note that an island has deleted a contribution. The load that follows bars one that does so repeatedly."""
        self._withdrawn[island] += 1

    def expel(self, islands: AbstractSet[str], state: RunState) -> None:
        """Refuse what these islands send, also what waits, and no other island that was expelled before.

        The refusals are sent with those of the next `receive`.
        """
        withdrawn = (name for name, count in self._withdrawn.items() if count >= WITHDRAWN_MAX)
        self.barred = dict.fromkeys(withdrawn, WITHDRAWN) | dict.fromkeys(islands, Reason("expelled", EXPELLED))
        for p, waiting in list(self._waiting.items()):
            if not islands & waiting.islands.keys():
                continue
            for addend in self._drop(p):
                c = addend.contribution
                if c.island in islands:
                    self._refuse(Delivery(addend.entry, c), self.barred[c.island], state)
                else:
                    self._reserve(addend.entry, c)
                    self._put(addend)

    def take(self, p: int) -> list[Addend]:
        """Remove and return what waits for the fragment's next round, in the order of arrival."""
        self._announced.clear()
        return self._drop(p)

    def receive(self, deliveries: Iterable[Delivery], state: RunState, epoch: int) -> Iterator[Contribution]:
        """Let contributions wait for their rounds, and refuse the others together.

        Yields:
            Each contribution that waits from now on, with the claims that the merger believes.
        """
        for delivery, job in self._ahead(deliveries, state):
            self._between()
            if isinstance(job, Reason) and job.code == "repeat":  # unless the copy before it was damaged
                job = self._begun(delivery, state)
            found = job if isinstance(job, Reason) else awaited(job, self._between)
            if isinstance(found, Addend):
                believed = self._believed(found.contribution, state)
                self._put(replace(found, contribution=believed))
                self._use_up(believed, state)
                yield believed
                continue
            if not isinstance(job, Reason) and delivery.contribution is not None:
                self._free(delivery.contribution)
            self._refuse(delivery, found, state)
            if len(self._refusals) >= REFUSED_MAX:
                self._flush(state, epoch)
        self._flush(state, epoch)

    def _ahead(
        self, deliveries: Iterable[Delivery], state: RunState
    ) -> Iterator[tuple[Delivery, Reason | Future[Addend | Reason]]]:
        """Yield the deliveries that do not wait already, each with the reason to refuse it or with its download.

        A delivery is judged by its header before its download begins, and takes its room from then on. The next AHEAD
        are downloaded meanwhile.
        """
        before: deque[tuple[Delivery, Reason | Future[Addend | Reason]]] = deque()
        for delivery in deliveries:
            if (c := delivery.contribution) and self._entries.get(c.identity) == delivery.entry:
                continue
            before.append((delivery, self._begun(delivery, state)))
            if len(before) > AHEAD:
                yield before.popleft()
        yield from before

    def _begun(self, delivery: Delivery, state: RunState) -> Reason | Future[Addend | Reason]:
        """Begin the download of a delivery, and return it, or why the delivery is refused."""
        if (c := delivery.contribution) is None:
            return Reason("unreadable", delivery.fault)
        if reason := self._reason(c, state):
            return reason
        self._reserve(delivery.entry, c)
        return self._downloads(partial(self._open, delivery))

    def _reason(self, c: Contribution, state: RunState) -> Reason | None:
        """Return why a contribution is refused, as far as its header tells."""
        if state.has_seen(c.identity) or c.identity in self._entries:
            return Reason("repeat", "a repeat of a contribution that was taken already")
        if reason := self.barred.get(c.island) or reason_to_refuse(c, self.rules.manifest, state.closed):
            return reason
        if not self._waiting.get(c.fragment, Waiting()).fits(c):
            return Reason("full", f"too many contributions wait for the next round of fragment {c.fragment}")
        return None

    def _open(self, delivery: Delivery) -> Addend | Reason:
        """Download and check the payload of a delivery, and return it, or why it is refused."""
        try:
            return self.rules.opened(delivery.with_payload())
        except WireError as error:
            return Reason(error.code, error.reason)

    def _believed(self, contribution: Contribution, state: RunState) -> Contribution:
        """Return the contribution with the claims that the merger believes."""
        fragments, account = len(self.rules.manifest.fragments), state.accounts.get(contribution.island)
        steps = claims.steps_read(contribution, account, state.closed, self.config.sync.interval, fragments)
        data = claims.believed_data(contribution, steps, state.cursors, self.config, self._range_sequences)
        tokens = claims.counted_tokens(contribution, self.config)
        return replace(contribution, data=data, tokens=tokens)

    def _reserve(self, entry: str, c: Contribution) -> None:
        """Take room for a contribution, and refuse its repeats from now on."""
        self._waiting.setdefault(c.fragment, Waiting()).reserve(c)
        self._entries[c.identity] = entry

    def _free(self, c: Contribution) -> None:
        """Give back the room of a contribution that cannot be merged."""
        self._waiting[c.fragment].reserve(c, -1)
        self._entries.pop(c.identity, None)

    def _put(self, addend: Addend) -> None:
        """Let a contribution, whose room is reserved, wait for its fragment's next round."""
        self._waiting[addend.contribution.fragment].addends.append(addend)

    def _drop(self, p: int) -> list[Addend]:
        """Forget what waits for a fragment's next round, and return it."""
        dropped = self._waiting.pop(p, Waiting()).addends
        for addend in dropped:
            self._entries.pop(addend.contribution.identity, None)
        return dropped

    # -- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, delivery: Delivery, reason: Reason, state: RunState) -> None:
        """Note a refusal, which `_flush` sends. It uses up no sequence number: the entry may be a forgery."""
        c, text, repeat = delivery.contribution, reason.text[:REASON_CHARACTERS_MAX], reason.code == "repeat"
        if c is None:
            refusal = Refusal(delivery.sender, NAMELESS, 0, 0, 0, 0, text, repeat)
        else:
            decided = repeat and state.has_seen(c.identity)
            tokens = claims.counted_tokens(c, self.config)
            refusal = Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, tokens, text, repeat, decided)
            unused = self._unused.setdefault((c.island, c.incarnation), set())
            unused |= {c.sequence} if not repeat and len(unused) < REMEMBERED_MAX else set()
            if len(self._unused) > INCARNATIONS_MAX:
                del self._unused[next(iter(self._unused))]
        state.refuse(reason.code, refusal.tokens, c.bytes if c else 0)
        if len(self._refusals) < LOGGED_MAX:
            log.warning(
                "refused a contribution of %s to round %s: %s",
                refusal.island,
                refusal.round,
                reason.text,
                extra={"round": refusal.round, "code": f"refused.{reason.code}"},
            )
        self._refusals.append((delivery.entry, refusal))

    def _use_up(self, accepted: Contribution, state: RunState) -> None:
        """Mark refused numbers as used once their island has gone on. Gaps would make the stored state grow."""
        unused = self._unused.get((accepted.island, accepted.incarnation), set())
        unused.discard(accepted.sequence)
        for sequence in sorted(number for number in unused if number < accepted.sequence):
            state.see((accepted.island, accepted.incarnation, sequence))
            unused.discard(sequence)

    def _flush(self, state: RunState, epoch: int) -> None:
        """Send the refusals in one call."""
        refusals, self._refusals = self._refusals, []
        if len(refusals) > LOGGED_MAX:
            log.warning("refused %s more contributions", len(refusals) - LOGGED_MAX, extra={"code": "refused.more"})
        if refusals:
            quiet = {entry for entry, each in refusals if self._is_quiet(each)}
            self.transport.merger.refuse(epoch, refusals, state.to_json(), state.counts(), quiet)

    def _is_quiet(self, refusal: Refusal) -> bool:
        """Return whether this refusal is one too many of its island in this round to be announced."""
        is_named = refusal.incarnation != NAMELESS
        self._announced[refusal.island, is_named] += 1
        return self._announced[refusal.island, is_named] > (ANNOUNCED_MAX if is_named else NAMELESS_MAX)
