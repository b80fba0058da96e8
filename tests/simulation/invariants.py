"""The invariants of each shard, checked after every event: counters, tape, fences, snapshots, kept entries, data."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archipelago.broker.commits import Delivery, Image
from archipelago.broker.control import is_expelled
from archipelago.broker.full_state import joined
from archipelago.broker.messages import (
    Call,
    Contribution,
    Counters,
    Refusal,
    Resume,
    RoundMember,
    Snapshot,
    TapeEntry,
    to_fields,
)
from archipelago.broker.presence import Presence
from archipelago.broker.ranges import ReadPosition, parse_positions
from archipelago.broker.wire import digest_of, unpack
from archipelago.islands.data.batches import PRIVATE_PASSES
from archipelago.islands.worker import Island
from archipelago.merger.replay import replay_round
from archipelago.merger.round_merge import RoundMerge, new_state
from archipelago.merger.service import Merger
from archipelago.merger.state import FragmentState, RunState
from tests import samples
from tests.simulation.faults import FAILOVER
from tests.simulation.processes import RUN

if TYPE_CHECKING:
    from tests.simulation.simulated_run import Simulation


@dataclass(eq=False)
class Reader:
    """One incarnation's reading of a pass over a range.

    Attributes:
        who: The island and its incarnation.
        start: Where it began to read.
        size: Number of sequences of the pass.
        merged: All sequences from `start` up to here are merged.
        is_excused: Whether another island took the lease while the reader was only unreachable, or the broker lost
            data. Then sequences may be merged twice.
    """

    who: str
    start: int
    size: int
    merged: int
    is_excused: bool = False


#: The codes of reasons for which only hostile contributions are refused.
HOSTILE_CODES = frozenset({"tokens", "steps", "full"})
#: A range, and the number of a pass over it.
Key = tuple[str, int]


class Invariants:
    """Observes what the broker does with one shard and asserts what must hold.

    A shard closes the rounds of its own fragments. Its epochs, counters and sequence numbers are its own.
    All shards merge the same text, and islands lease it by the cursors of shard 0. If an island dies after it has sent
    to another shard and not to that one, its text is read again. So only shard 0 merges no text twice.
    """

    def __init__(self, simulation: Simulation, shard: int = 0) -> None:
        self.simulation, self.shard = simulation, shard
        self.manifest = simulation.manifest.of_shard(shard)
        self.first = {p: simulation.first[p][1] for p in self.manifest.own_fragments}
        self.entries: dict[str, tuple[Contribution, bytes]] = {}
        self.acknowledged: dict[str, None] = {}
        #: What primaries had acknowledged before they were replaced. Islands that live on send again what was lost.
        self.promised: set[str] = set()
        #: What was ever refused. An island has no more to do with it.
        self.refused: set[str] = set()
        #: How often the broker has lost data of the shard.
        self.losses = -1
        self.readers: dict[Key, list[Reader]] = defaultdict(list)
        self.said: dict[str, list[tuple[Key, Reader, int]]] = {}
        #: Whether a lease was ever taken from a living incarnation that was only unreachable.
        self.has_taken = False
        #: By incarnation and range: how often the broker had lost data before the lease.
        self.leases: dict[tuple[str, str], int] = {}
        self.forget()

    @property
    def run(self) -> Any:
        """What the broker holds of the shard; None after it has lost the run."""
        return self.simulation.broker.shown(RUN, self.shard)

    def forget(self) -> None:
        """The broker has lost data of this shard. From now on, the invariants apply to what it holds now."""
        run = self.run
        for reader in (reader for readers in self.readers.values() for reader in readers):
            reader.is_excused = True
        self.epoch = 0
        self.losses += 1
        self.acknowledged.clear()
        self.merged: set[str] = set()
        accounts = run.accounts() if run else Counters()
        self.accepted, self.accepted_tokens = accounts.published, accounts.published_tokens
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.uncovered: deque[tuple[int, list[str]]] = deque()
        self.cursors: dict[str, tuple[int, int]] = dict(run.cursors) if run else {}
        self.versions = [0] * len(self.manifest.fragments)
        self.round = 0
        self.tape_epoch = 0
        self._resumes = run.next_event if run else 0
        if run is not None:
            self._read_tape(run, again=True)

    # -- observations -----------------------------------------------------------------------------------------------

    def published(self, entry: str, contribution: Contribution, payload: bytes) -> None:
        """The broker has accepted a contribution."""
        self.entries[entry] = (contribution, payload)
        self.acknowledged[contribution.identity_text] = None
        self.accepted += 1
        self.accepted_tokens += contribution.tokens

    def wrote(self, epoch: int) -> None:
        """The broker has accepted a write of a merger with that epoch."""
        assert epoch >= self.epoch, f"a merger of epoch {epoch} wrote after one of epoch {self.epoch}"
        self.epoch = epoch

    def began(self, who: str, at: ReadPosition, size: int) -> None:
        """An island begins a pass over a range."""
        if at.pass_number < PRIVATE_PASSES:
            start = min(at.position, size)
            is_excused = self.leases.get((who, at.range)) != self.simulation.losses
            self.readers[at.range, at.pass_number].append(Reader(who, start, size, start, is_excused))

    def sent(self, who: str, contribution: Contribution) -> None:
        """An island sends a contribution, which says how far it has read."""
        said = []
        for place in parse_positions(contribution.data):
            key, ended = (place.range, place.pass_number), (place.range, place.pass_number - 1)
            if mine := [reader for reader in self.readers[key] if reader.who == who]:
                said.append((key, mine[-1], place.position))
            elif mine := [reader for reader in self.readers[ended] if reader.who == who]:
                said.append((ended, mine[-1], mine[-1].size))
        self.said[contribution.identity_text] = said

    def leased(self, before: str, name: str, by: str) -> None:
        """Shard 0 has leased a range of the text `by` an incarnation; `before` is its previous holder."""
        self.leases[by, name] = self.simulation.losses
        if before in ("", by):
            return
        run, (island, _, incarnation) = self.simulation.run, before.partition("/")
        busy = {f"{entry.sender}/{entry.contribution.incarnation}" for entry in run.updates.values()}
        assert before not in busy, f"{by} leases range {name}, while contributions of {before} wait"
        beat, seen = run.islands.get(island, (None, 0.0))
        if beat is not None and beat.incarnation == incarnation and not is_expelled(run.control, before):
            presence = Presence(beat, self.simulation.clock.now - seen)
            assert not presence.is_live, f"{by} leases range {name} from {before}"
        self.leases.pop((before, name), None)
        on_their_way = {connection.process.who for connection, call, *_ in self.simulation.late if call == "publish"}
        if before in self.simulation.alive | on_their_way:
            self.has_taken = True
            for (of, _), readers in self.readers.items():
                for reader in readers:
                    reader.is_excused |= of == name and reader.who == before

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything that is new since the last check."""
        run = self.run
        if run is None:
            return
        waiting = [entry.contribution for entry in run.updates.values()]
        self._read_tape(run)
        self._check_counters(run.counters, waiting)
        self._check_kept(run)
        self._check_log(run)
        self._check_resumes(run)
        self._check_refusals()
        assert run.cursors == self.cursors, f"cursors {run.cursors} where what was merged gives {self.cursors}"
        if self.shard == 0:  # islands choose by the cursors of this shard what they read
            ranges = range(self.manifest.config.data.shards)
            self._check_passes({s: run.cursors.get(s, (0, 0))[0] for s in map(str, ranges)})

    def _check_passes(self, passes: Mapping[str, int]) -> None:
        """Check that the ranges are read evenly. `passes` says how often each one was read to its end."""
        # One more is possible while an island does not know yet that another one has taken its range.
        is_even = max(passes.values()) - min(passes.values()) <= 2 + self.has_taken
        assert self.simulation.losses or is_even, f"passes {passes}"

    def _check_counters(self, counters: Mapping[str, int], waiting: Sequence[Contribution]) -> None:
        """Check that every accepted contribution and token is counted once."""
        assert self.accepted == counters["merged"] + counters["refused"] + len(waiting), (counters, len(waiting))
        pending = sum(contribution.tokens for contribution in waiting)
        assert self.accepted_tokens == counters["merged_tokens"] + counters["refused_tokens"] + pending, counters

    def _read_tape(self, run: Any, again: bool = False) -> None:
        for entry in run.tape[self._known(run) :]:
            assert entry.round == self.manifest.own_rounds.next(self.round), f"round {entry.round} after {self.round}"
            assert entry.epoch >= self.tape_epoch or again, f"epoch {entry.epoch} after {self.tape_epoch}"
            assert entry.version == self.manifest.version_after(entry.round)
            self.round = entry.round
            self.tape_epoch = 0 if again else entry.epoch
            for member in entry.members:
                self._merge(entry, member, again)
            self.uncovered.append((entry.round, [member.entry for member in entry.members]))
            self._check_snapshot(run, entry)

    def _known(self, run: Any) -> int:
        return self.manifest.own_rounds.between(run.tape[0].round - 1, self.round) if run.tape and self.round else 0

    def _merge(self, entry: TapeEntry, member: RoundMember, again: bool) -> None:
        identity = member.identity_text
        assert identity not in self.merged, f"{identity} is merged twice"
        self.merged.add(identity)
        who = f"{member.island}/{member.incarnation}"
        self.tokens[who, entry.fragment] += member.tokens
        trained, merged = self.simulation.trained[who], self.tokens[who, entry.fragment]
        assert merged <= trained, f"{who} trained {trained} tokens, {merged} are merged in fragment {entry.fragment}"
        if again:
            return
        self._check_believed(member)
        self.accepted_tokens -= self.entries[member.entry][0].tokens - member.tokens
        for place in parse_positions(member.data):
            if place.cursor > self.cursors.get(place.range, (0, 0)):
                self.cursors[place.range] = place.cursor
        for key, reader, position in self.said.get(identity, ()):
            self._cover(key, reader, position)

    def _check_believed(self, member: RoundMember) -> None:
        """Check that the merger believed the claims of an honest contribution, as long as the broker loses nothing."""
        sent = self.entries[member.entry][0]
        if not self.simulation.losses:
            assert member.data == sent.data or self.shard, f"lowered {sent}"
        assert (member.steps, member.tokens) == (sent.steps, sent.tokens), f"lowered {sent}"

    def _check_refusals(self) -> None:
        """Check that no merger has refused an honest contribution for what it claims."""
        for process in self.simulation.mergers_of(self.shard):
            found = HOSTILE_CODES & process.merger.state.refused.keys()
            assert not found, f"{process.name} refused honest contributions: {sorted(found)}"

    def _cover(self, key: Key, reader: Reader, position: int) -> None:
        reader.merged = max(reader.merged, position)
        for other in self.readers[key]:
            if other is not reader and not (other.is_excused or reader.is_excused):
                apart = other.merged <= reader.start or reader.merged <= other.start
                assert apart or other.merged == other.start or reader.merged == reader.start, (
                    f"sequences of pass {key[1]} over range {key[0]} are merged twice: {reader} and {other}"
                )

    def _check_snapshot(self, run: Any, entry: TapeEntry) -> None:
        if entry.fragment not in run.fragments or entry.fragment not in run.heads:
            return  # it was deleted, and no merger has written it again yet
        (snapshot, payload), head = run.fragments[entry.fragment], run.heads[entry.fragment]
        assert head.version >= self.versions[entry.fragment]
        self.versions[entry.fragment] = head.version
        assert snapshot.version <= head.version
        size = self.manifest.sizes[entry.fragment]
        if snapshot.version:
            assert digest_of(unpack(payload, size)) == snapshot.held, f"round {snapshot.round}: a torn snapshot"
        if head.round == entry.round:
            assert (head.version, head.held) == (entry.version, entry.digest)
        else:
            assert head.round > entry.round

    def _check_kept(self, run: Any) -> None:
        if not self.simulation.rates.checkpoints or self.simulation.rates.loses == FAILOVER:
            return
        images = self.simulation.disks[self.shard]
        covered = images[max(images)].round if images else 0
        while self.uncovered and self.uncovered[0][0] <= covered:
            self.uncovered.popleft()
        for number, entries in self.uncovered:
            gone = set(entries) - set(run.kept)
            assert not gone, f"round {number} is in no checkpoint, and its entries {gone} were deleted"

    def _not_compacted(self, run: Any) -> list[TapeEntry]:
        """Return the rounds on the tape that a merger which starts merges again."""
        full = {p: snapshot.version for p, (snapshot, _) in run.fragments.items()}
        return [entry for entry in run.tape if entry.version > full.get(entry.fragment, 1 << 30)]

    def _check_log(self, run: Any) -> None:
        """Check that the broker still has all that merges the rounds after the full states again."""
        if self.simulation.rates.damage:
            return  # keys are deleted on purpose
        for entry in self._not_compacted(run):
            at = (entry.fragment, entry.version)
            assert at in run.differences, f"round {entry.round} has no difference, and no full snapshot includes it"
            gone = {m.entry for m in entry.members} - set(run.kept)
            assert not gone, f"no compaction includes round {entry.round}, and its entries {gone} were deleted"

    def _check_resumes(self, run: Any) -> None:
        for number, event in reversed(run.events):
            if number < self._resumes:
                break
            assert not isinstance(event, Resume) or event.epoch <= self.epoch, f"{event} after epoch {self.epoch}"
        self._resumes = run.next_event

    def check_loaded(self, merger: Merger, damaged: dict[int, tuple[int, bytes]]) -> None:
        """Check that a merger has loaded all merged contributions and the same bits as the broker."""
        run = self.run
        for identity in self.merged if not self.simulation.losses else ():
            island, incarnation, sequence = identity.split("/")
            assert merger.state.has_seen((island, incarnation, int(sequence))), f"{identity} is unknown to the merger"
        assert merger.state.cursors == run.cursors
        for p, (version, data) in damaged.items():
            if merger.snapshots[p].version == version:
                now = samples.outer_bits(merger.fragments[p])
                assert now == data, f"fragment {p} was rebuilt to other bits"
        for p, entry in {entry.fragment: entry for entry in run.tape[-2:]}.items():
            assert digest_of(np.asarray(merger.fragments[p].published_N)) == entry.digest, f"fragment {p} differs"

    def check_heard(self, island: Island) -> None:
        """Check that an island knows of a round only after it has received all events before the round closed."""
        known, heard = island.ledger.shards[self.shard].closed, island.link.channels[self.shard].inbox.heard_round
        assert known <= heard, f"{island.name} knows round {known}, and has received the events up to round {heard}"

    # -- at the end -------------------------------------------------------------------------------------------------

    def check_nothing_lost(self) -> None:
        """Check that every accepted contribution was merged, refused, or still waits."""
        run = self.run
        if run is None:
            return
        told = {entry.contribution.identity_text for entry in run.updates.values()} | self.merged
        for _, event in run.events:
            told |= event.identities if isinstance(event, Snapshot) else set()
            told |= {event.identity_text} if isinstance(event, Refusal) else set()
        lost = [identity for identity in self.acknowledged if identity not in told]
        assert not lost, f"lost: {lost[:3]}"

    def check_announcements(self) -> None:
        """Check that each round is announced once, that epochs grow, and that calls are for open rounds."""
        closed = epoch = 0
        for _, event in self.run.events if not self.simulation.losses else ():
            match event:
                case Snapshot(round=number):
                    assert number == self.manifest.own_rounds.next(closed)
                    closed = number
                case Resume(round=number, epoch=new):
                    assert (number, new) == (closed, max(new, epoch + 1))
                    epoch = new
                case Call(round=number):
                    assert number in self.manifest.window_after(closed)

    def check_promises(self) -> None:
        """Check that living islands have sent again what a failover had lost. The run must have settled."""
        waiting = {entry.contribution.identity_text for entry in self.run.updates.values()}
        owed = self.promised - self.merged - self.refused - waiting
        lost = sorted(each for each in owed if each.rpartition("/")[0] in self.simulation.alive)
        assert not lost, f"lost in a failover: {lost[:3]}"

    def check_replay(self) -> None:
        """Check that replaying the tape from version 0 and the contributions gives the published bits."""
        rules, state = RoundMerge.of(self.manifest), RunState()
        fragments = {
            p: new_state(unpack(payload, self.manifest.sizes[p]), rules.outer) for p, payload in self.first.items()
        }
        images = {image.round: image for image in self.simulation.disks[self.shard].values()}
        full = {(p, snapshot.version): self.run.outer.get(p) for p, (snapshot, _) in self.run.fragments.items()}
        for entry in self.run.tape:
            deliveries = [Delivery(m.entry, *self.entries[m.entry]) for m in entry.members]
            p = entry.fragment
            fragments[p] = replay_round(rules, state, fragments[p], entry, deliveries)
            if image := images.get(entry.round):
                self._check_image(image, state, fragments)
            if (compacted := full.get((p, entry.version))) is not None:
                assert compacted == samples.outer_bits(fragments[p]), f"{entry} was compacted"
        for merger in (process.merger for process in self.simulation.mergers_of(self.shard) if process.loaded):
            if merger.epoch and merger.rounds.closed == self.round:
                for p, ours in fragments.items():
                    assert samples.outer_bits(merger.fragments[p]) == samples.outer_bits(ours)

    def _check_image(self, image: Image, state: RunState, fragments: Mapping[int, FragmentState]) -> None:
        """Check that a checkpoint holds what the tape gives up to its round."""
        if image.tape[-1].digest != self.run.tape[self.manifest.own_rounds.until(image.round) - 1].digest:
            return  # a failover has lost these rounds
        assert image.cursors == state.cursors
        for full in image.fragments:
            fragment = fragments[full.snapshot.fragment]
            assert digest_of(full.published_N) == digest_of(np.asarray(fragment.published_N))
            assert not full.snapshot.version or joined(full.own) == samples.outer_bits(fragment)

    def check_record(self) -> None:
        """Check that the record is the tape up to its last round, with all contributions.

        It reaches as far as the newest checkpoint, after which contributions may be deleted.
        """
        if self.simulation.losses or not (self.manifest.config.record and self.simulation.rates.checkpoints):
            return
        segments = self.simulation.records[self.shard].segments.values()
        found = dict(sorted((entry.round, (entry, given)) for each in segments for entry, given in each))
        tape = self.run.tape[: len(found)]
        assert list(found) == [entry.round for entry in tape], "the record has gaps"
        covered = max((image.round for image in self.simulation.disks[self.shard].values()), default=0)
        assert max(found, default=0) >= covered, f"the record ends at {max(found)}, and a checkpoint at {covered}"
        for expected, (entry, deliveries) in zip(tape, found.values(), strict=True):
            assert to_fields(entry) == to_fields(expected)  # a loss that is NaN does not equal itself
            for member, delivery in zip(entry.members, deliveries, strict=True):
                contribution, payload = self.entries[member.entry]
                assert delivery.contribution is not None
                assert to_fields(delivery.contribution) == to_fields(contribution)
                assert delivery.payload == payload

    def not_deleted(self) -> list[str]:
        """Return the merged entries that the serving merger keeps without need."""
        serving = [process.merger for process in self.simulation.mergers_of(self.shard) if process.loaded]
        covered = max((merger.state.covered for merger in serving), default=0)
        tape = self.run.tape if self.simulation.rates.checkpoints else ()
        needed = {m.entry for entry in tape if entry.round > covered for m in entry.members}
        run = self.run
        needed |= {m.entry for entry in self._not_compacted(run) for m in entry.members}
        return sorted(set(run.kept) - needed)

    def unresolved(self) -> set[str]:
        """Return what islands have sent to the shard and not yet seen resolved."""
        return {
            sent.identity
            for process in self.simulation.islands
            for sent in process.island.link.channels[self.shard].outbox._undecided()
        }
