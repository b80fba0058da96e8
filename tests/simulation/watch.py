"""What must always hold, checked after every event: books, tape, fence, snapshots, kept entries, and the data."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archipelago.broker.control import is_expelled
from archipelago.broker.corpus_shards import parse_places
from archipelago.broker.messages import LIVE_SECONDS, Contribution, Member, Refusal, Resume, Snapshot, TapeEntry
from archipelago.broker.transport import Delivery
from archipelago.broker.wire import digest_of, unpack
from archipelago.islands.worker import Island
from archipelago.merger import outer
from archipelago.merger.closing import new_state
from archipelago.merger.replay import Rules, redo
from archipelago.merger.service import Merger
from archipelago.merger.state import RunState

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Reader:
    """One reading of a pass over a shard by one incarnation: from `start`, of which all before `merged` is merged."""

    who: str
    start: int
    size: int
    merged: int
    is_excused: bool = False
    """somebody else took the lease while the reader was only away, or the broker lost data"""


Key = tuple[str, int]
"""a shard and a pass over it"""


class Watch:
    """Sees what the broker does, and remembers what it must not forget."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: dict[str, tuple[Contribution, bytes]] = {}
        self.acknowledged: dict[str, None] = {}
        self.trained: Counter[str] = Counter()
        self.readers: dict[Key, list[Reader]] = defaultdict(list)
        self.said: dict[str, list[tuple[Key, Reader, int]]] = {}
        self.has_taken = False
        """whether a lease was ever taken from one that was only away"""
        self.leases: dict[tuple[str, str], int] = {}
        """by whom and of what: how often the broker had lost something before"""
        self.forget()

    def forget(self) -> None:
        """The broker lost something: from here on, what it holds now must hold."""
        run = self.world.run
        for reader in (reader for readers in self.readers.values() for reader in readers):
            reader.is_excused = True
        self.epoch = 0
        self.acknowledged.clear()
        self.merged: set[str] = set()
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.uncovered: deque[tuple[int, list[int]]] = deque()
        self.cursors: dict[str, tuple[int, int]] = dict(run.cursors) if run else {}
        self.versions = [0] * len(self.world.manifest.fragments)
        self.round = 0
        self.tape_epoch = 0
        self._resumes = run.next_event if run else 0
        if run is not None:
            self._read_tape(run, again=True)

    # -- what is told -----------------------------------------------------------------------------------------------

    def published(self, entry: str, contribution: Contribution, payload: bytes) -> None:
        """The broker has taken a contribution."""
        self.entries[entry] = (contribution, payload)
        self.acknowledged[contribution.identity_text] = None

    def wrote(self, epoch: int) -> None:
        """A merger of that epoch wrote, and the broker took it."""
        assert epoch >= self.epoch, f"a merger of epoch {epoch} wrote after one of epoch {self.epoch}"
        self.epoch = epoch

    def began(self, who: str, text: str, size: int) -> None:
        """An island begins a pass, as `Batches.on_begin` says it."""
        shard, pass_number, position, repeat = text.rstrip("!").rsplit(":", 3)
        if repeat == "0" and int(pass_number) < 1 << 41:
            start = min(int(position), size)
            is_excused = self.leases.get((who, shard)) != self.world.losses
            self.readers[shard, int(pass_number)].append(Reader(who, start, size, start, is_excused))

    def sent(self, who: str, contribution: Contribution) -> None:
        """An island says how far it has read."""
        said = []
        for place in parse_places(contribution.data):
            key = (place.shard, place.pass_number)
            if mine := [reader for reader in self.readers[key] if reader.who == who]:
                said.append((key, mine[-1], mine[-1].size if place.ended else place.position))
        self.said[contribution.identity_text] = said

    def leased(self, before: str, shard: str, by: str) -> None:
        """A lease went from one to another."""
        self.leases[by, shard] = self.world.losses
        if before in ("", by):
            return
        run, (island, _, incarnation) = self.world.run, before.partition("/")
        busy = {f"{c.island}/{c.incarnation}" for number, (c, _) in run.updates.items() if number not in run.kept}
        assert before not in busy, f"{by} leases shard {shard}, while contributions of {before} wait"
        beat, seen = run.islands.get(island, (None, 0.0))
        heard = beat is not None and beat.incarnation == incarnation and beat.state != "left"
        is_gone = self.world.clock.now - seen >= LIVE_SECONDS or is_expelled(run.control, before)
        assert not heard or is_gone, f"{by} leases shard {shard} from {before}"
        self.leases.pop((before, shard), None)
        on_their_way = {process.who for process, name, *_ in self.world.late if name == "publish"}
        if before in self.world.alive | on_their_way:
            self.has_taken = True
            for (of, _), readers in self.readers.items():
                for reader in readers:
                    reader.is_excused |= of == shard and reader.who == before

    # -- what must always hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """All of it, for what is new since the last time."""
        run = self.world.run
        if run is None:
            return
        waiting = [contribution for number, (contribution, _) in run.updates.items() if number not in run.kept]
        books = run.books
        assert books["published"] == books["merged"] + books["refused"] + len(waiting), (books, len(waiting))
        pending = sum(contribution.tokens for contribution in waiting)
        assert books["published_tokens"] == books["merged_tokens"] + books["refused_tokens"] + pending, books
        assert books["kept"] == len(run.kept)
        self._read_tape(run)
        self._check_kept(run)
        self._check_resumes(run)
        assert run.cursors == self.cursors, f"cursors {run.cursors} where what was merged gives {self.cursors}"
        passes = [run.cursors.get(str(shard), (0, 0))[0] for shard in range(self.world.manifest.config.data.shards)]
        # One more where an island did not know yet that another has the shard that it was away from.
        assert self.world.losses or max(passes) - min(passes) <= 2 + self.has_taken, f"passes {passes}"

    def _read_tape(self, run: Any, again: bool = False) -> None:
        for entry in run.tape[self._known(run) :]:
            assert entry.round == self.round + 1, f"round {entry.round} after {self.round}"
            assert entry.epoch >= self.tape_epoch or again, f"epoch {entry.epoch} after {self.tape_epoch}"
            assert entry.version == self.world.manifest.version_after(entry.round)
            self.round = entry.round
            self.tape_epoch = 0 if again else entry.epoch
            for member in entry.members:
                self._merge(entry, member, again)
            self.uncovered.append((entry.round, [int(m.entry.split("-")[0]) for m in entry.members]))
            self._check_snapshot(run, entry)

    def _known(self, run: Any) -> int:
        return self.round - run.tape[0].round + 1 if run.tape and self.round else 0

    def _merge(self, entry: TapeEntry, member: Member, again: bool) -> None:
        identity = member.identity_text
        assert identity not in self.merged, f"{identity} is merged twice"
        self.merged.add(identity)
        who = f"{member.island}/{member.incarnation}"
        self.tokens[who, entry.fragment] += member.tokens
        trained, merged = self.trained[who], self.tokens[who, entry.fragment]
        assert merged <= trained, f"{who} trained {trained} tokens, {merged} are merged in fragment {entry.fragment}"
        if again:
            return
        for place in parse_places(self.entries[member.entry][0].data):
            self.cursors[place.shard] = max(place.cursor, self.cursors.get(place.shard, (0, 0)))
        for key, reader, position in self.said.get(identity, ()):
            self._cover(key, reader, position)

    def _cover(self, key: Key, reader: Reader, position: int) -> None:
        reader.merged = max(reader.merged, position)
        for other in self.readers[key]:
            if other is not reader and not (other.is_excused or reader.is_excused):
                apart = other.merged <= reader.start or reader.merged <= other.start
                assert apart or other.merged == other.start or reader.merged == reader.start, (
                    f"sequences of pass {key[1]} over shard {key[0]} are merged twice: {reader} and {other}"
                )

    def _check_snapshot(self, run: Any, entry: TapeEntry) -> None:
        snapshot, payload = run.fragments[entry.fragment]
        assert snapshot.version >= self.versions[entry.fragment]
        self.versions[entry.fragment] = snapshot.version
        if snapshot.round == entry.round:
            assert snapshot.version == entry.version
            size = self.world.manifest.sizes[entry.fragment]
            assert digest_of(unpack(payload, size)) == entry.digest, f"round {entry.round}: a torn snapshot"
        else:
            assert snapshot.round > entry.round

    def _check_kept(self, run: Any) -> None:
        if not self.world.weather.checkpoints or self.world.weather.loses == "tail":
            return
        images = self.world.disk.images
        covered = max(s.round for s, _ in images[max(images)].snapshots) if images else 0
        while self.uncovered and self.uncovered[0][0] <= covered:
            self.uncovered.popleft()
        for number, entries in self.uncovered:
            gone = [entry for entry in entries if entry not in run.updates]
            assert not gone, f"round {number} is in no checkpoint, and its entries {gone} are gone"

    def _check_resumes(self, run: Any) -> None:
        for number, event in reversed(run.events):
            if number < self._resumes:
                break
            assert not isinstance(event, Resume) or event.epoch <= self.epoch, f"{event} after epoch {self.epoch}"
        self._resumes = run.next_event

    def check_loaded(self, merger: Merger, damaged: dict[int, tuple[int, bytes]]) -> None:
        """A merger that has loaded knows all that was merged, and has the bits that the broker had."""
        run = self.world.run
        for identity in self.merged if not self.world.losses else ():
            island, incarnation, sequence = identity.split("/")
            assert merger.state.has_seen((island, incarnation, int(sequence))), f"{identity} is forgotten"
        assert merger.state.cursors == run.cursors
        for p, (version, data) in damaged.items():
            if run.fragments[p][0].version == version:
                now = outer.dump(merger.fragments[p].params_N, merger.fragments[p].outer)
                assert now == data, f"fragment {p} was rebuilt to other bits"
        for p, entry in {entry.fragment: entry for entry in run.tape[-2:]}.items():
            assert digest_of(np.asarray(merger.fragments[p].published_N)) == entry.digest, f"fragment {p} is another"

    def check_heard(self, island: Island) -> None:
        """An island knows of no round before it has heard all that was said before that round closed."""
        known, heard = island.ledger.closed, island.link._closed
        assert known <= heard, f"{island.name} knows round {known}, and has heard up to round {heard}"

    def check_whole(self, island: Island, whole: Any) -> None:
        """An island that went back with the run knows nothing that the run has not seen."""
        image = self.world.disk.images.get(whole.number)
        if image is not None:
            assert whole.rest["ledger"]["closed"] <= image.round, f"{island.name} knows more than {whole.number}"

    # -- at the end -------------------------------------------------------------------------------------------------

    def check_nothing_lost(self) -> None:
        """Every contribution that the broker took was merged, refused, or still waits."""
        run = self.world.run
        if run is None:
            return
        told = {contribution.identity_text for contribution, _ in run.updates.values()} | self.merged
        for _, event in run.events:
            told |= event.identities if isinstance(event, Snapshot) else set()
            told |= {event.identity_text} if isinstance(event, Refusal) else set()
        lost = [identity for identity in self.acknowledged if identity not in told]
        assert not lost, f"lost: {lost[:3]}"

    def check_redo(self) -> None:
        """The whole tape, done again from version 0 and the contributions, gives the published bits."""
        world = self.world
        rules, state = Rules.of(world.manifest), RunState()
        sizes = world.manifest.sizes
        fragments = [new_state(unpack(payload, sizes[s.fragment]), rules.outer) for s, payload in world.first]
        for entry in world.run.tape:
            deliveries = [Delivery(m.entry, *self.entries[m.entry]) for m in entry.members]
            p = entry.fragment
            fragments[p] = redo(rules, state, fragments[p], entry, deliveries)

    def never_let_go(self) -> list[int]:
        """Merged entries that the serving merger need not keep, and does."""
        serving = [process.merger for process in self.world.mergers if process.loaded]
        covered = max((merger.state.covered for merger in serving), default=0)
        tape = self.world.run.tape if self.world.weather.checkpoints else ()
        needed = {m.entry for entry in tape if entry.round > covered for m in entry.members}
        return [number for number in self.world.run.kept if f"{number}-0" not in needed]

    def unresolved(self) -> set[str]:
        """What islands have sent and not heard about."""
        return {identity for process in self.world.islands for identity in process.island.link._unresolved}
