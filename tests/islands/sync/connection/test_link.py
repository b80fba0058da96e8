"""The link of an island: it never blocks training, and everything arrives once and in order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.corpus_shards import Place
from archipelago.broker.errors import UnreachableError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Call, Contribution, Event, Marker, Refusal, Resume, Snapshot
from archipelago.broker.transport import MEMORY_SHARE_MAX, Arrived, Commit, Memory, unwatched
from archipelago.broker.wire import digest, pack, unpack
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.inner import require_sound
from archipelago.islands.sync.connection import link as link_module
from archipelago.islands.sync.connection import pumps
from archipelago.islands.sync.connection.link import FRESH_SECONDS, Link
from archipelago.islands.sync.connection.outbox import ContributionHeader, Draft, Published
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.sync.recovery import StateForPeer
from archipelago.islands.sync.state_tree import decode
from archipelago.islands.worker import Island, train
from archipelago.merger.service import Merger
from tests import samples
from tests.conftest import Until
from tests.failing import failing
from tests.harness import tiny
from tests.intercept import Intercepted

#: Elements of each fragment of the sample run.
SIZE = 32


class FaultyTransport(Intercepted):
    """A transport whose calls the test can make hang, fail, or do more work.

    Attributes:
        room: The broker's answer to `memory`; None for the real answer.
        damaged_fragments: How many of the next downloads are damaged.
    """

    def __init__(self, broker: MemoryBroker, run: str) -> None:
        super().__init__(broker.connect(run))
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.outage: Exception | None = None
        self.hanging = 0
        self.lock = threading.Lock()
        self.before_publish_returns: Callable[[], None] = lambda: None
        self.room: Memory | None = None
        self.damaged_fragments = 0

    def _block_or_fail(self) -> None:
        if not self.unblocked.is_set():
            with self.lock:
                self.hanging += 1
            self.unblocked.wait()
        if self.outage is not None:
            raise self.outage

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in ("publish", "holds", "heartbeat", "lease_shard", "memory", "events", "fragment"):
            self._block_or_fail()
        answer = method(*args, **kwargs)
        if name == "publish":
            self.before_publish_returns()
        elif name == "memory":
            return self.room or answer
        elif name == "fragment" and self.damaged_fragments:
            self.damaged_fragments -= 1
            return answer[0], answer[1][:-1] + b"?"
        return answer


SHARDS = shard_order(samples.manifest().config.data.shards, samples.manifest().config.seed)


class Harness:
    """A broker with a run. The test acts as the merger."""

    def __init__(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.manifest = manifest
        self.broker = MemoryBroker()
        self.transport = self.broker.connect(manifest.run)
        self.transport.create(manifest, snapshots)
        self.epoch = self.transport.merger.acquire("merger", 1e6) or 0
        self.transports: list[FaultyTransport] = []
        self.links: list[Link] = []

    def link(self, who: str = "a/x") -> Link:
        """Return the link of an island that has joined."""
        faulty = FaultyTransport(self.broker, self.manifest.run)
        config = self.manifest.config
        link = Link(faulty, self.manifest, who, shard_order(config.data.shards, config.seed))
        link.join()
        self.transports.append(faulty)
        self.links.append(link)
        return link

    @property
    def faulty(self) -> FaultyTransport:
        return self.transports[-1]

    def call(self, number: int) -> Call:
        call = Call(number, (number - 1) % 2)
        self.transport.merger.announce(self.epoch, call)
        return call

    def resume(self, number: int) -> Resume:
        resume = Resume(number, self.epoch)
        self.transport.merger.announce(self.epoch, resume)
        return resume

    def close(self, number: int, value: float, *merged: Contribution) -> Snapshot:
        """Close a round that sets all elements of its fragment to `value`."""
        payload = pack(np.full(SIZE, value, np.float32), "float32", 1)
        plain = samples.commit([], payload, number)
        snapshot = replace(plain.snapshot, fragment=(number - 1) % 2, merged=" ".join(c.identity_text for c in merged))
        entries = [d.entry for d in self.deliveries() if d.contribution in merged]
        members = tuple(
            replace(plain.tape.members[0], island=c.island, incarnation=c.incarnation, sequence=c.sequence)
            for c in merged
        )
        tape = replace(plain.tape, fragment=snapshot.fragment, members=members)
        self.transport.merger.commit(self.epoch, Commit(snapshot, payload, b"", "{}", tape, entries, 0))
        return snapshot

    def lose_rounds(self, after: int) -> None:
        """Lose the newest rounds, as a failover may."""
        run = self.broker.runs[self.manifest.run]
        run.tape = [entry for entry in run.tape if entry.round <= after]

    def refuse(self, contribution: Contribution, *, repeat: bool = False) -> Refusal:
        c = contribution
        refusal = Refusal(c.island, c.incarnation, c.sequence, c.round, c.fragment, c.tokens, "no", repeat)
        entry = next(d.entry for d in self.deliveries() if d.contribution == contribution)
        self.transport.merger.refuse(self.epoch, [(entry, refusal)])
        return refusal

    def deliveries(self) -> list[Any]:
        """Return all undecided contributions."""
        self.transport.merger.updates(0.0)
        return self.transport.merger.unacknowledged()

    def published(self) -> list[Contribution]:
        return [delivery.contribution for delivery in self.deliveries()]

    def forget(self, entry: str) -> None:
        """Lose an acknowledged entry, as a crashed server may."""
        run = self.broker.runs[self.manifest.run]
        number = run.found(entry)
        assert number is not None
        del run.updates[number]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Return a harness of the sample run. Afterwards, end all hanging calls and threads."""
    monkeypatch.setattr(pumps, "RETRY_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(link_module, "BLOCK_SECONDS", 0.01)
    monkeypatch.setattr(link_module, "HEARTBEAT_SECONDS", 0.01)
    manifest = samples.manifest()
    made = Harness(manifest, samples.first_snapshots(manifest))
    yield made
    _stop_all(made)


def _stop_all(harness: Harness) -> None:
    for faulty in harness.transports:
        faulty.outage = None
        faulty.unblocked.set()
    for link in harness.links:
        link.stop(30.0)
        assert not any(thread.is_alive() for thread in link.pumps.threads)


def draft(number: int, sequence: int | None = None) -> Draft:
    """Return a contribution to a round. Each element is the number of the round."""
    sequence = number if sequence is None else sequence
    fields = vars(samples.contribution(round=number, fragment=(number - 1) % 2, sequence=sequence))
    header = ContributionHeader(**{name: value for name, value in fields.items() if name not in ("bytes", "digest")})
    return Draft(header, (jnp.full(SIZE, float(number), jnp.float32),), SIZE)


def received(link: Link) -> tuple[list[Event], list[Arrival]]:
    """Return the events and snapshots since the last call."""
    news = link.take()
    return [event for _, event in news.events], news.arrivals


def at_once(work: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Return the result of `work`, and fail if it hangs. Only a hang takes this long."""
    out: list[Any] = []

    def keep() -> None:
        try:
            out.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            out.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"the call still hangs after {seconds:.0f} s"
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


# -- without threads -----------------------------------------------------------------------------------------------


def test_join_returns_all_fragments_and_a_position_in_the_stream(harness: Harness) -> None:
    harness.call(1)
    closed = harness.close(1, 7.0)
    link = Link(FaultyTransport(harness.broker, "sample"), harness.manifest, "a/x", SHARDS)
    first, second = link.join()
    assert (first.snapshot, first.params_N.tolist()) == (closed, [7.0] * SIZE)
    assert (second.snapshot.version, second.params_N.tolist()) == (0, [0.0] * SIZE)
    later = harness.call(2)
    link.pump()
    assert received(link) == ([later], [])
    link.beat(samples.heartbeat(bytes_down=link.channels.bytes_down))
    link.pump()
    assert link.channels.bytes_down == harness.transport.reader.books().bytes_down


def test_no_event_during_a_join_is_missed(harness: Harness) -> None:
    faulty = FaultyTransport(harness.broker, "sample")
    link = Link(faulty, harness.manifest, "a/x", SHARDS)
    snapshot = faulty.reader.fragment

    def closes_meanwhile(fragment: int, arrived: Arrived = unwatched) -> tuple[Snapshot, bytes]:
        if fragment == 1:
            harness.close(1, 5.0)
        return snapshot(fragment, arrived)

    faulty.reader.fragment = closes_meanwhile  # type: ignore[method-assign]
    link.join()
    faulty.reader.fragment = snapshot  # type: ignore[method-assign]
    link.pump()
    events, (arrival,) = received(link)
    assert [event.round for event in events] == [1]
    assert arrival.params_N.tolist() == [5.0] * SIZE


def test_contributions_are_published_in_order_with_their_bytes_and_digest(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2, 3):
        link.send(draft(number))
    assert link.channels.backlog == 3
    link.pump()
    assert [d.contribution.round for d in harness.deliveries()] == [1, 2, 3]
    for delivery in harness.deliveries():
        assert delivery.contribution.bytes == len(delivery.payload)
        assert delivery.contribution.digest == digest(delivery.payload)
        assert unpack(delivery.payload, SIZE).tolist() == [float(delivery.contribution.round)] * SIZE
    assert (link.channels.backlog, link.channels[0].outbox.sent) == (0, 3)
    assert link.channels[0].outbox.bytes_up == sum(c.bytes for c in harness.published())


def test_events_arrive_in_order_with_only_the_newest_snapshot_of_each_fragment(harness: Harness) -> None:
    link = harness.link()
    happened: list[Event] = [harness.call(1), harness.close(1, 1.0), harness.close(2, 2.0), harness.close(3, 3.0)]
    link.pump()
    events, arrivals = received(link)
    assert events == happened
    assert {a.snapshot.round: a.params_N[0] for a in arrivals} == {3: 3.0, 2: 2.0}
    assert received(link) == ([], [])


def test_events_are_read_during_a_download(harness: Harness, monkeypatch: Any) -> None:
    """On a thin link a download takes longer than a round. A newer snapshot announced meanwhile is downloaded next."""
    link = harness.link()
    fragment = harness.faulty.reader.fragment
    meanwhile = [lambda: harness.close(3, 3.0)]

    def slow(p: int, arrived: Arrived) -> tuple[Snapshot, bytes]:
        found = fragment(p, arrived)
        while meanwhile:
            meanwhile.pop()()
        return found

    monkeypatch.setattr(harness.faulty.reader, "fragment", slow)
    harness.close(1, 1.0)
    harness.close(2, 2.0)
    link.pump_receive()
    events, arrivals = received(link)
    assert [event.round for event in events if isinstance(event, Snapshot)] == [1, 2, 3]
    assert {a.snapshot.fragment: float(a.params_N[0]) for a in arrivals} == {0: 1.0, 1: 2.0}
    link.pump_receive()
    assert [(a.snapshot.round, float(a.params_N[0])) for a in received(link)[1]] == [(3, 3.0)]
    link.pump_receive()
    assert received(link) == ([], [])


def test_a_newer_arrival_replaces_an_untaken_one(harness: Harness) -> None:
    link = harness.link()
    harness.close(1, 1.0)
    link.pump()
    harness.close(3, 3.0)
    link.pump()
    events, arrivals = received(link)
    assert [event.round for event in events] == [1, 3]
    assert [a.snapshot.round for a in arrivals] == [3]


def test_only_the_newest_heartbeat_is_sent(harness: Harness) -> None:
    link = harness.link()
    link.pump()
    assert harness.transport.reader.presences() == []
    for steps in (1, 2):
        link.beat(samples.heartbeat(steps=steps))
    link.pump()
    (presence,) = harness.transport.reader.presences()
    assert presence.heartbeat.steps == 2


def test_a_damaged_snapshot_is_fetched_again(harness: Harness) -> None:
    link = harness.link()
    harness.close(1, 1.0)
    harness.faulty.damaged_fragments = 1
    link.pump_heartbeat()
    with failing(WireError, "wire.snapshot"):
        link.pump_receive()
    events, arrivals = received(link)
    assert (len(events), arrivals) == (1, [])
    link.pump_receive()
    assert [a.params_N[0] for a in link.take().arrivals] == [1.0]
    had = link.channels.bytes_down
    link.pump_receive()
    assert (received(link), link.channels.bytes_down) == (([], []), had)  # and only once


def test_an_outage_is_noted_and_loses_nothing(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    link.pump()
    harness.faulty.outage = UnreachableError("connection refused")
    for number in (2, 3):
        link.send(draft(number))
        link.beat(samples.heartbeat(steps=number))
        link.pump()
    happened: list[Event] = [harness.call(2), harness.close(1, 1.0), harness.close(2, 2.0)]
    link.pump()
    assert link.trouble == "connection refused"
    assert received(link) == ([], [])
    assert link.channels.backlog == 2
    harness.faulty.outage = None
    link.pump()
    assert link.trouble == ""
    assert [c.round for c in harness.published()] == [1, 2, 3]
    events, arrivals = received(link)
    assert events == happened
    assert [a.snapshot.round for a in arrivals] == [1, 2]
    assert harness.transport.reader.presences()[0].heartbeat.steps == 3


# -- until the merger has decided ----------------------------------------------------------------------------------


def test_a_contribution_is_unresolved_until_it_is_merged_or_refused(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2, 3):
        link.send(draft(number))
        assert link.channels[0].outbox.unresolved_rounds() == set(range(1, number + 1))  # including queued ones
    link.pump()
    first, second, third = harness.published()
    harness.close(1, 1.0, first)
    harness.refuse(third)
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == {2}
    harness.close(2, 1.0)  # the contribution was not merged, so it waits for a later round
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == {2}
    harness.close(4, 1.0, second)
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == set()


def test_the_refusal_of_a_repeat_leaves_the_first_one_unresolved(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    link.pump()
    (sent,) = harness.published()
    harness.transport.island.publish(sent, b"again")
    harness.refuse(sent, repeat=True)
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == {1}


def test_lost_contributions_are_sent_again_once_when_a_merger_resumes(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2, 3):
        link.send(draft(number))
    link.pump()
    first, lost, _ = harness.deliveries()
    harness.close(1, 1.0, first.contribution)
    harness.forget(lost.entry)
    link.pump()
    assert [c.round for c in harness.published()] == [3]
    harness.resume(1)
    link.pump()
    assert [c.round for c in harness.published()] == [3, 2]
    assert harness.deliveries()[1].contribution == lost.contribution
    assert harness.deliveries()[1].payload == lost.payload
    harness.resume(1)
    link.pump()
    assert len(harness.deliveries()) == 2


def test_contributions_of_a_round_that_the_broker_has_lost_are_sent_again(harness: Harness) -> None:
    """A failover forgot the newest two commits, and one of the contributions that they had merged."""
    link = harness.link()
    for number in (1, 2, 3):
        link.send(draft(number))
    link.pump()
    first, second, third = harness.deliveries()
    for number, delivery in enumerate((first, second, third), 1):
        harness.close(number, float(number), delivery.contribution)
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == set()
    harness.forget(second.entry)
    harness.lose_rounds(1)
    harness.resume(1)
    link.pump()
    assert [c.round for c in harness.published()] == [2]  # it still holds the third, whose merge it has lost
    assert link.channels[0].outbox.unresolved_rounds() == {2, 3}
    harness.resume(1)
    link.pump()
    assert len(harness.published()) == 1


def test_contributions_are_sent_again_if_another_round_of_the_same_number_has_closed(harness: Harness) -> None:
    """Two primaries were in use for a while. The one that was replaced had merged this island's contribution."""
    link = harness.link()
    for number in (1, 2):
        link.send(draft(number))
    link.pump()
    first, second = harness.deliveries()
    harness.close(1, 1.0, first.contribution)
    harness.close(2, 2.0, second.contribution)
    link.pump()
    harness.forget(second.entry)
    harness.lose_rounds(1)
    harness.close(2, 3.0)
    harness.close(3, 3.0)
    harness.resume(3)
    link.pump()
    assert harness.published() == [second.contribution]
    assert link.channels[0].outbox.unresolved_rounds() == {2}


@pytest.mark.parametrize("is_another", [True, False])
def test_an_island_notices_another_primary_by_itself(harness: Harness, is_another: bool) -> None:
    """It has read announcements of the old one that are newer than the return to a round that the new one announced."""
    harness.broker.instance = "old"
    link = harness.link()
    link.send(draft(1))
    link.pump()
    (sent,) = harness.deliveries()
    harness.forget(sent.entry)
    harness.broker.instance = "new" if is_another else "old"
    link.channels[0].inbox._looked_at = -math.inf  # it looks from time to time
    link.pump()
    assert harness.published() == ([sent.contribution] if is_another else [])
    assert received(link)[0] == ([Resume(0, 0)] if is_another else [])


def test_resending_continues_after_an_outage(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2):
        link.send(draft(number))
    link.pump()
    for delivery in harness.deliveries():
        harness.forget(delivery.entry)
    resume = harness.resume(0)
    read_events, harness.faulty.outage = harness.faulty.reader.events, UnreachableError("connection refused")

    def only_events_come_through(*arguments: Any) -> Any:
        harness.faulty.outage = None
        found = read_events(*arguments)
        harness.faulty.outage = UnreachableError("connection refused")
        return found

    harness.faulty.reader.events = only_events_come_through  # type: ignore[method-assign, assignment]
    link.pump()
    assert harness.published() == []
    harness.faulty.reader.events, harness.faulty.outage = read_events, None  # type: ignore[method-assign]
    link.pump()
    assert received(link) == ([resume], [])
    assert [c.round for c in harness.published()] == [1, 2]


def test_contributions_decided_before_a_resume_are_not_sent_again(harness: Harness) -> None:
    """The merger has merged the contribution and trimmed its entry before the island reads any event."""
    link = harness.link()
    link.send(draft(1))
    link.pump()
    (delivery,) = harness.deliveries()
    harness.resume(0)
    harness.close(1, 1.0, delivery.contribution)
    harness.forget(delivery.entry)
    link.pump()
    assert harness.published() == []


def test_an_island_follows_a_broker_that_went_back(harness: Harness) -> None:
    link = harness.link()
    kept = [harness.transport.reader.fragment(p) for p in range(2)]
    for number in (1, 2, 3):
        harness.close(number, float(number))
    link.pump()  # the training thread takes nothing
    run = harness.broker.runs["sample"]
    run.fragments = dict(enumerate(kept))
    resume = harness.resume(0)
    link.pump_receive()
    events, arrivals = received(link)
    assert events[-1] == resume
    assert [(a.snapshot.version, a.params_N[0]) for a in arrivals] == [(0, 0.0), (0, 0.0)]


def test_a_resume_to_an_earlier_round_drops_later_snapshots(harness: Harness) -> None:
    """Otherwise they would be mistaken for snapshots of the new rounds with the same numbers."""
    link = harness.link()
    harness.close(1, 1.0)
    link.pump()
    resume = harness.resume(0)
    harness.faulty.damaged_fragments = 1
    with failing(WireError, "wire.snapshot"):
        link.pump_receive()
    events, arrivals = received(link)
    assert events[-1] == resume
    assert arrivals == []


def test_a_decision_before_the_acknowledgement_is_not_missed(harness: Harness) -> None:
    link = harness.link()

    def merge_at_once() -> None:
        harness.close(1, 1.0, *harness.published())
        link.pump_receive()

    harness.faulty.before_publish_returns = merge_at_once
    link.send(draft(1))
    link.channels[0].outbox.pump()
    assert link.channels[0].outbox.unresolved_rounds() == set()


@pytest.mark.parametrize("refused", [False, True])
def test_a_decided_contribution_is_not_sent_again_after_an_error(harness: Harness, refused: bool) -> None:
    link = harness.link()
    link.send(draft(1))
    link.send(draft(2))

    def break_off() -> None:
        raise UnreachableError("the connection broke")

    harness.faulty.before_publish_returns = break_off
    link.pump()
    assert link.channels.backlog == 2
    assert link.channels[0].outbox.unresolved_rounds() == {1, 2}
    (sent,) = harness.published()
    if refused:
        harness.refuse(sent)
    else:
        harness.close(1, 1.0, sent)
    link.pump_receive()
    harness.faulty.before_publish_returns = lambda: None
    link.pump()
    assert (link.channels.backlog, link.channels[0].outbox.sent) == (0, 2)
    assert [c.round for c in harness.published()] == [2]
    assert link.channels[0].outbox.unresolved_rounds() == {2}


def test_only_an_undecided_contribution_is_sent_again_after_an_error(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    answers = iter([UnreachableError("the connection broke"), None])

    def break_off_once() -> None:
        if error := next(answers):
            raise error

    harness.faulty.before_publish_returns = break_off_once
    link.pump()
    harness.resume(0)
    link.pump_receive()  # it is still queued, so it is not sent again
    assert len(harness.published()) == 1
    link.pump()
    first, second = harness.published()
    assert first == second  # the merger merges one of the two
    assert link.channels.backlog == 0


# -- shards --------------------------------------------------------------------------------------------------------


def heartbeat(link: Link, state: str = "training") -> None:
    """Send a heartbeat of the link's island, which also renews its leases."""
    island, _, incarnation = link.who.partition("/")
    link.beat(samples.heartbeat(island, state, incarnation=incarnation))
    link.pump_heartbeat()


def test_one_shard_is_leased_ahead_for_each_island(harness: Harness) -> None:
    one, other = harness.link("a/x"), harness.link("b/y")
    assert one.lease() is None
    found: list[Place] = []
    for _ in range(3):
        for link in (one, other):
            heartbeat(link)
            place = link.lease()
            assert place is not None
            assert link.lease() is None  # the next heartbeat leases another one
            found.append(place)
    assert [place.cursor for place in found] == [(0, 0)] * 6
    assert [place.shard for place in found[:2]] == SHARDS[:2]
    assert len({place.shard for place in found}) == 6


@pytest.mark.parametrize(("state", "leases"), [("joining", True), ("training", True), ("leaving", False)])
def test_only_an_island_that_joins_or_trains_leases_shards(harness: Harness, state: str, leases: bool) -> None:
    link = harness.link()
    heartbeat(link, state)
    assert (link.lease() is not None) is leases


def test_a_held_shard_is_not_leased_again(harness: Harness) -> None:
    link = Link(harness.broker.connect("sample"), harness.manifest, "a/x", ["3", "1"])
    for expected in ("3", "1", None, None):
        heartbeat(link)
        place = link.lease()
        assert (place.shard if place else None) == expected
    link.leases.hold(["3"])  # shard 1 is leased under our name, but we missed the answer
    heartbeat(link)
    place = link.lease()
    assert place is not None
    assert place.shard == "1"


def test_a_lost_lease_is_reported_once(harness: Harness) -> None:
    link = harness.link()
    heartbeat(link)
    place = link.lease()
    assert place is not None
    heartbeat(link)
    harness.broker.runs["sample"].holders[place.shard] = "b/y"
    heartbeat(link)
    assert link.take().lost_shards == {place.shard}
    heartbeat(link)  # the loss is detected again before the island stops holding the shard
    link.leases.hold([])
    heartbeat(link)
    assert link.take().lost_shards == frozenset()


def test_an_unused_lease_that_is_lost_is_replaced_without_a_report(harness: Harness) -> None:
    link = harness.link()
    heartbeat(link)
    first, second = link.leases.shards[:2]
    harness.broker.runs["sample"].holders[first] = "b/y"
    harness.transport.island.heartbeat(samples.heartbeat("b", incarnation="y"))
    heartbeat(link)
    place = link.lease()
    assert place is not None
    assert place.shard == second
    assert link.take().lost_shards == frozenset()


def test_a_completely_merged_pass_ends_its_lease(harness: Harness) -> None:
    link = Link(harness.broker.connect("sample"), harness.manifest, "a/x", ["3"])
    heartbeat(link)
    assert link.lease() == Place("3", 0, 0)
    payload = b"new"
    harness.transport.merger.commit(harness.epoch, samples.commit([], payload, cursors={"3": (1, 0)}))
    heartbeat(link)
    assert link.take().lost_shards == {"3"}
    assert link.lease() is None
    link.leases.hold([])
    heartbeat(link)
    assert link.lease() == Place("3", 1, 0)


def test_a_restored_shard_is_not_also_the_next_one(harness: Harness) -> None:
    """A restored island leases the shards that it was reading; its link may already have leased one as the next."""
    link = harness.link()
    heartbeat(link)
    link.leases.hold([link.leases.shards[0]])
    assert link.lease() is None
    heartbeat(link)
    place = link.lease()
    assert place is not None
    assert place.shard == link.leases.shards[1]


def test_a_shard_that_is_restored_during_its_lease_is_not_the_next_one(harness: Harness) -> None:
    link = harness.link()
    leases = harness.faulty.island.lease_shard

    def meanwhile(shards: Sequence[str], me: str) -> Place | None:
        place = leases(shards, me)
        link.leases.hold([place.shard] if place else [])
        return place

    harness.faulty.island.lease_shard = meanwhile  # type: ignore[method-assign]
    heartbeat(link)
    assert link.lease() is None


def test_an_island_that_finds_no_shard_asks_less_and_less_often(harness: Harness) -> None:
    link = Link(harness.broker.connect("sample"), harness.manifest, "a/x", ["3"])
    heartbeat(link)
    harness.broker.runs["sample"].holders["3"] = "b/y"
    asked: list[int] = []
    lease = link.transport.island.lease_shard

    def counted(shards: Sequence[str], me: str) -> Place | None:
        asked.append(looks)
        return lease(shards, me)

    link.transport.island.lease_shard = counted  # type: ignore[method-assign]
    harness.transport.island.heartbeat(samples.heartbeat("b", incarnation="y"))
    for looks in range(1, 28):  # noqa: B007 - `counted` notes it
        heartbeat(link)
    assert asked == [1, 3, 6, 11, 20]
    harness.broker.runs["sample"].holders.clear()
    for looks in range(28, 38):  # noqa: B007
        heartbeat(link)
    assert asked == [1, 3, 6, 11, 20, 29], "a shard was found, so that the next one is asked for at once"
    assert link.lease() == Place("3", 0, 0)


# -- newcomers ------------------------------------------------------------------------------------------------------

MOMENTS = {"mu": jnp.asarray([1.5, -2.25], jnp.float32), "count": jnp.asarray(3, jnp.int32)}


def ask(harness: Harness, who: str = "new/z") -> None:
    island, _, incarnation = who.partition("/")
    harness.transport.island.heartbeat(samples.heartbeat(island, "joining", incarnation=incarnation))
    harness.transport.island.request_state(who)


def test_one_peer_promises_an_answer_and_is_asked_once(harness: Harness) -> None:
    links = [harness.link("a/x"), harness.link("b/y")]
    ask(harness)
    for link in (*links, *links):
        heartbeat(link)
    assert [link.take().asked_by for link in links] == [["new/z"], []]
    assert links[0].take().asked_by == []


def test_a_flood_of_requests_costs_two_copies_at_a_time_and_one_for_each(harness: Harness) -> None:
    link = harness.link("giver/x")
    link.beat(samples.heartbeat("giver"))
    for number in range(6):
        harness.transport.island.heartbeat(samples.heartbeat(f"new-{number}", "joining", incarnation="z"))
        harness.transport.island.request_state(f"new-{number}/z")
    asked: list[str] = []
    for _ in range(10):
        link.pump()
        found = link.take().asked_by
        assert len(found) <= 2
        asked += found
        for who in found:  # its request is withdrawn and made again
            harness.transport.island.withdraw_request(who)
            harness.transport.island.request_state(who)
    assert sorted(asked) == [f"new-{number}/z" for number in range(6)]


def test_a_loop_of_short_steps_describes_itself_now_and_then(harness: Harness) -> None:
    link, now = harness.link(), [100.0]
    link.clock = lambda: now[0]
    assert link.wants_beat("training")
    link.beat(samples.heartbeat(state="training"))
    now[0] += FRESH_SECONDS / 2
    assert not link.wants_beat("training")
    assert link.wants_beat("leaving")
    now[0] += FRESH_SECONDS
    assert link.wants_beat("training")


def test_a_request_for_state_is_read_between_two_heartbeats(harness: Harness) -> None:
    link = harness.link("a/x")
    heartbeat(link)
    ask(harness)
    link.pump_receive()
    assert link.take().asked_by == ["new/z"]


def test_only_another_training_island_answers_a_request(harness: Harness) -> None:
    link = harness.link("a/x")
    ask(harness, "a/x")
    heartbeat(link)
    ask(harness)
    heartbeat(link, "joining")
    assert link.take().asked_by == []
    assert harness.transport.island.open_requests() == ["a/x", "new/z"]


def test_optimiser_state_is_handed_over_with_the_actions_before_it(harness: Harness) -> None:
    link = harness.link("a/x")
    ask(harness)
    actions = samples.actions()
    link.hand_over(StateForPeer("new/z", jax.tree.leaves(MOMENTS), 7, 40, actions))
    link.pump()
    found = harness.transport.island.handed_over("new/z")
    assert found is not None
    handover, payload = found
    assert (handover.giver, handover.incarnation, handover.index, handover.global_step) == ("a", "x", 7, 40)
    assert tiny.leaf_bytes(decode(handover, payload, MOMENTS, require_sound)) == tiny.leaf_bytes(MOMENTS)
    assert [told for _, told in harness.transport.merger.actions("0-0")] == [actions]
    link.pump()
    assert len(harness.transport.merger.actions("0-0")) == 1


def test_a_handover_is_retried_after_an_outage(harness: Harness) -> None:
    link = harness.link("a/x")
    ask(harness)
    link.hand_over(StateForPeer("new/z", jax.tree.leaves(MOMENTS), 7, 40))
    hands, calls = harness.faulty.island.hand_over, iter([UnreachableError("connection refused"), None])

    def fails_once(*arguments: Any) -> None:
        if error := next(calls):
            raise error
        hands(*arguments)

    harness.faulty.island.hand_over = fails_once  # type: ignore[method-assign, assignment]
    link.pump()
    assert (link.trouble, harness.transport.island.handed_over("new/z")) == ("connection refused", None)
    link.pump()
    assert link.trouble == ""
    assert harness.transport.island.handed_over("new/z") is not None


def test_handovers_are_sent_in_the_background(harness: Harness, until: Until) -> None:
    link = harness.link("a/x")
    link.start()
    ask(harness)
    link.hand_over(StateForPeer("new/z", jax.tree.leaves(MOMENTS), 7, 40))
    until(lambda: harness.transport.island.handed_over("new/z"), "the state to arrive")


# -- snapshots in the order of events -------------------------------------------------------------------------------


def test_a_snapshot_waits_for_all_earlier_events(harness: Harness) -> None:
    """A download gives the newest snapshot, which may be newer than all processed events."""
    link = harness.link()
    fetch = harness.faulty.reader.fragment
    fetched: list[int] = []

    def closes_meanwhile(fragment: int, arrived: Arrived = unwatched) -> tuple[Snapshot, bytes]:
        if not fetched:
            harness.close(2, 2.0)
            harness.close(3, 3.0)
        fetched.append(fragment)
        return fetch(fragment, arrived)

    harness.close(1, 1.0)
    harness.faulty.reader.fragment = closes_meanwhile  # type: ignore[method-assign]
    link.pump_receive()
    events, arrivals = received(link)
    assert ([event.round for event in events], arrivals) == ([1], [])
    link.pump_receive()
    events, arrivals = received(link)
    assert [event.round for event in events] == [2, 3]
    assert {a.snapshot.round: a.params_N[0] for a in arrivals} == {2: 2.0, 3: 3.0}
    assert fetched == [0, 1]  # the early snapshot was kept


def test_an_early_snapshot_is_replaced_by_a_newer_one(harness: Harness) -> None:
    link = harness.link()
    fetch, rounds = harness.faulty.reader.fragment, iter([3, None, None])

    def closes_meanwhile(fragment: int, arrived: Arrived = unwatched) -> tuple[Snapshot, bytes]:
        if number := next(rounds):
            harness.close(number, float(number))
        return fetch(fragment, arrived)

    harness.close(1, 1.0)
    harness.faulty.reader.fragment = closes_meanwhile  # type: ignore[method-assign]
    link.pump_receive()
    assert received(link)[1] == []
    harness.close(5, 5.0)
    link.pump_receive()
    assert [(a.snapshot.round, a.params_N[0]) for a in received(link)[1]] == [(5, 5.0)]


# -- checkpoints ----------------------------------------------------------------------------------------------------


def mark(harness: Harness, number: int, closed: int) -> Marker:
    marker = Marker(number, closed)
    harness.transport.merger.announce(harness.epoch, marker)
    return marker


def rounds_of(link: Link, marker: int = 0) -> tuple[list[int], list[int]]:
    sent, queued = link.channels[0].outbox.in_flight(marker)
    return [p.contribution.round for p in sent], [d.header.round for d in queued]


def test_contributions_undecided_at_the_marker_are_in_flight(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2):
        link.send(draft(number))
    link.pump()
    first, second = harness.published()
    harness.close(1, 1.0, first)
    mark(harness, 7, 1)
    harness.close(2, 2.0, second)  # merged after the marker, so a run that goes back needs it again
    link.pump()
    link.send(draft(3))
    assert link.channels[0].outbox.unresolved_rounds() == {3}
    assert rounds_of(link, 7) == ([2], [3])
    assert rounds_of(link, 7) == ([], [3])  # a second call finds nothing
    link.pump()
    assert rounds_of(link) == ([3], [])


def test_contributions_sent_after_the_marker_are_in_flight_until_it_is_passed(harness: Harness) -> None:
    link = harness.link()
    mark(harness, 7, 0)
    link.pump()
    link.send(draft(1))  # the training loop has not come to the marker
    link.pump()
    harness.close(1, 1.0, *harness.published())
    link.pump()
    assert link.channels[0].outbox.unresolved_rounds() == set()
    assert rounds_of(link, 7) == ([1], [])
    mark(harness, 8, 1)
    link.send(draft(2))
    link.pump()
    link.channels.passed_marker(0, 8)
    harness.close(2, 2.0, harness.published()[-1])
    link.pump()
    assert rounds_of(link, 8) == ([], [])


def test_several_markers_may_come_before_the_first_one_is_passed(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    link.pump()
    mark(harness, 7, 0)
    harness.close(1, 1.0, *harness.published())  # merged between the markers, so checkpoint 7 lacks it
    mark(harness, 8, 1)
    link.pump()
    assert rounds_of(link, 7) == ([1], [])
    link.channels.passed_marker(0, 7)
    assert rounds_of(link, 8) == ([], [])


def test_contributions_in_flight_have_their_sent_payload(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    link.pump()
    ((sent,), _) = link.channels[0].outbox.in_flight()
    assert unpack(sent.payload, SIZE).tolist() == [1.0] * SIZE
    assert digest(sent.payload) == sent.contribution.digest


def left_behind(harness: Harness, *numbers: int) -> list[Published]:
    """Return contributions of an earlier incarnation to those rounds, which the broker has lost."""
    before = harness.link("a/w")
    for number in numbers:
        before.send(draft(number))
    before.pump()
    in_flight, _ = before.channels.in_flight()
    for delivery in harness.deliveries():
        harness.forget(delivery.entry)
    return in_flight


def test_contributions_of_an_earlier_incarnation_are_published_again(harness: Harness) -> None:
    in_flight = left_behind(harness, 1, 2)
    link = harness.link("a/x")
    link.resume([replace(p, entry="") for p in in_flight])
    assert link.channels[0].outbox.unresolved_rounds() == {1, 2}
    link.pump()
    link.pump()
    assert [d.contribution for d in harness.deliveries()] == [p.contribution for p in in_flight]
    assert [d.payload for d in harness.deliveries()] == [p.payload for p in in_flight]
    harness.close(1, 1.0, in_flight[0].contribution)
    harness.resume(1)  # the broker has both
    link.pump()
    assert [c.round for c in harness.published()] == [2]
    assert link.channels[0].outbox.unresolved_rounds() == {2}


def test_resuming_is_retried_after_an_outage(harness: Harness) -> None:
    in_flight = left_behind(harness, 1)
    link = harness.link("a/x")
    link.resume(in_flight)
    harness.faulty.outage = UnreachableError("connection refused")
    link.pump()
    harness.faulty.outage = None
    link.pump()
    link.pump()
    assert [c.round for c in harness.published()] == [1]


def test_resuming_does_not_wait_for_a_new_contribution(harness: Harness, until: Until) -> None:
    """An island whose window is full of contributions in flight sends nothing else."""
    in_flight = left_behind(harness, 1)
    link = harness.link("a/x")
    link.start()
    link.beat(samples.heartbeat())
    assert link.drain(30.0)  # the threads run, and the sending thread is idle
    link.resume(in_flight)
    until(lambda: [c.round for c in harness.published()] == [1], "the contributions in flight to be sent again")


# -- the broker's memory --------------------------------------------------------------------------------------------


def test_an_island_sends_nothing_to_a_broker_that_is_nearly_full(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2):
        link.send(draft(number))
    link.beat(samples.heartbeat())
    share = MEMORY_SHARE_MAX
    harness.faulty.room = Memory(int(share * 1000) + 1, 1000)
    link.pump()
    assert (harness.published(), link.channels.backlog) == ([], 2)
    assert link.trouble
    assert harness.transport.reader.presences()  # everything else continues
    harness.faulty.room = Memory(int(share * 1000), 1000)
    link.pump()
    assert [c.round for c in harness.published()] == [1, 2]
    assert (link.channels.backlog, link.trouble) == (0, "")


def test_a_broker_without_a_limit_is_never_full(harness: Harness) -> None:
    link = harness.link()
    link.send(draft(1))
    harness.faulty.room = Memory(1 << 60, 0)
    link.pump()
    assert link.channels.backlog == 0


# -- with threads --------------------------------------------------------------------------------------------------


def hang(harness: Harness, link: Link, until: Until) -> None:
    """Start the pumps, and wait until each of them hangs."""
    harness.faulty.unblocked.clear()
    link.send(draft(1))
    link.beat(samples.heartbeat())
    link.start()
    until(lambda: harness.faulty.hanging >= 3, "all pumps to hang")


def test_the_training_thread_never_waits_for_hanging_calls(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)

    def use() -> list[Any]:
        out: list[Any] = [link.lease(), link.lease()]
        for number in range(2, 50):
            link.send(draft(number))
            link.beat(samples.heartbeat(steps=number))
            out.append(received(link))
        return [*out, link.channels[0].outbox.unresolved_rounds(), link.channels.backlog]

    found = at_once(use)
    assert found[:2] == [None, None]
    assert found[2:-2] == [([], [])] * 48
    assert found[-2:] == [set(range(1, 50)), 49]
    harness.faulty.unblocked.set()
    until(lambda: link.channels.backlog == 0, "the queue to be sent")
    assert [c.round for c in harness.published()] == list(range(1, 50))

    def steps() -> list[int]:
        return [presence.heartbeat.steps for presence in harness.transport.reader.presences()]

    until(lambda: steps() == [49], "the newest heartbeat")


def test_after_an_outage_everything_arrives_once_and_in_order(harness: Harness, until: Until) -> None:
    link = harness.link()
    link.start()
    harness.faulty.outage = UnreachableError("connection refused")
    until(lambda: link.trouble == "connection refused", "the trouble to be noted")
    for number in range(1, 6):
        link.send(draft(number))
    happened: list[Event] = [harness.call(1), *(harness.close(number, float(number)) for number in range(1, 6))]
    assert harness.published() == []
    harness.faulty.outage = None
    until(lambda: link.trouble == "" and link.channels.backlog == 0, "the trouble to be over")
    assert [c.round for c in harness.published()] == list(range(1, 6))
    events: list[Event] = []
    newest: dict[int, float] = {}

    def all_received() -> bool:
        more, arrivals = received(link)
        events.extend(more)
        newest.update({a.snapshot.fragment: float(a.params_N[0]) for a in arrivals})
        return len(events) == len(happened) and newest == {0: 5.0, 1: 4.0}

    until(all_received, "everything that was announced")
    assert events == happened


def test_an_unexpected_error_is_kept_as_the_failure(harness: Harness, until: Until) -> None:
    link = harness.link()
    harness.faulty.outage = ZeroDivisionError("a bug")
    link.send(draft(1))
    link.start()
    until(lambda: link.failure is not None, "the failure to surface")
    assert isinstance(link.failure, ZeroDivisionError)
    assert at_once(lambda: link.drain(3600.0)) is False


def test_a_drain_in_progress_ends_when_the_link_fails(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(link.drain(3600.0)), daemon=True)
    thread.start()
    harness.faulty.outage = ZeroDivisionError("a bug")
    harness.faulty.unblocked.set()
    until(lambda: drained, "the drain to give up")
    assert drained == [False]


def test_stopping_ends_in_time_although_every_pump_hangs(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)
    began = time.monotonic()
    at_once(lambda: link.stop(0.1))
    hanging = [thread for thread in link.pumps.threads if thread.is_alive()]
    assert len(hanging) >= 3  # the hanging threads remain as daemons
    assert time.monotonic() - began >= 0.1 * len(hanging) / len(link.pumps.threads)
    assert all(thread.daemon for thread in link.pumps.threads)


def test_stopping_ends_all_threads(harness: Harness) -> None:
    link = harness.link()
    link.start()
    link.stop(30.0)
    assert not any(thread.is_alive() for thread in link.pumps.threads)


def test_drain_returns_whether_everything_was_sent(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)
    assert link.drain(0.01) is False
    harness.faulty.unblocked.set()
    assert link.drain(30.0) is True
    assert [c.round for c in harness.published()] == [1]
    assert harness.transport.reader.presences()[0].heartbeat == samples.heartbeat()
    link.beat(samples.heartbeat(state="left"))
    assert link.drain(30.0) is True
    assert harness.transport.reader.presences()[0].heartbeat.state == "left"


# -- two processes under one name --------------------------------------------------------------------------------------


def test_the_older_of_two_links_finds_that_its_name_was_taken_over(harness: Harness) -> None:
    older = harness.link("a/old")
    older.beat(samples.heartbeat(incarnation="old"))
    older.pump()
    older.send(draft(1))
    newer = harness.link("a/new")
    newer.beat(samples.heartbeat(incarnation="new"))
    newer.pump()
    older.pump_heartbeat()
    older.pump()
    assert (older.is_replaced, older.replaced_by, newer.is_replaced) == (True, "new", False)
    (presence,) = harness.transport.reader.presences()
    assert presence.heartbeat.incarnation == "new"
    assert harness.published() == [], "it sends nothing more"
    newer.pump()
    assert not newer.is_replaced


def test_a_link_writes_a_lost_claim_again(harness: Harness) -> None:
    link = harness.link()
    link.beat(samples.heartbeat())
    harness.broker.runs["sample"].names.clear()
    link.pump()
    assert not link.is_replaced
    assert harness.broker.runs["sample"].names["a"].incarnation == "x"


# -- an island on such a link --------------------------------------------------------------------------------------


@pytest.fixture
def tiny_harness(harness: Harness) -> Iterator[Harness]:
    """Return a harness of a run with a tiny model, whose steps take no time."""
    manifest = tiny.manifest()
    made = Harness(manifest, samples.first_snapshots(manifest, 1.0))
    made.transport.merger.release(made.epoch)
    yield made
    _stop_all(made)


def island_on(tiny_harness: Harness, name: str = "a") -> Island:
    link = tiny_harness.link()
    arrivals = link.join()
    batches = Batches(tiny.TEXT, tiny.CONFIG, link.lease)
    island = Island(name, tiny_harness.manifest, tiny.STEPS, batches, link, arrivals, incarnation="x")
    island.warm_up()
    return island


def steps_of(island: Island, count: int) -> None:
    for _ in range(count):
        island.boundary()
        island.advance()


def test_an_island_never_blocks(tiny_harness: Harness, until: Until) -> None:
    island = island_on(tiny_harness)
    tiny_harness.faulty.unblocked.clear()
    island.link.start()
    at_once(lambda: steps_of(island, 200))
    assert island.totals.steps == 200
    assert island.ledger.global_step == 4  # the schedule waits for a merger, after two strides of two steps
    assert island.link.channels.backlog == tiny.CONFIG.sync.window  # it owes nothing more until a round closes
    assert tiny_harness.transport.reader.books().published == 0
    # The island has missed everything but still trains. It catches up when the link works again.
    tiny_harness.faulty.unblocked.set()
    merger = Merger(tiny_harness.broker.connect("tiny"), live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()

    def adopted() -> bool:
        merger.turn(0.0)
        steps_of(island, 1)
        return all(count.version >= 3 for count in island.ledger.counts)

    until(adopted, "three versions of every fragment")
    assert at_once(lambda: island.leave())
    merger.turn(0.0)
    books = tiny_harness.transport.reader.books()
    assert books.published == books.merged == island.link.channels[0].outbox.sent >= 6
    assert (books.refused, tiny_harness.transport.reader.backlog()) == (0, 0)
    members = [member for entry in tiny_harness.transport.reader.tape(1000) for member in entry.members]
    tokens = sum(m.tokens for m in members if m.sequence < 2)
    assert tokens == (2 + 4) * tiny.CONFIG.tokens_per_step  # the strides of 2 steps before the outage


def test_an_island_never_blocks_in_an_outage_either(tiny_harness: Harness, until: Until) -> None:
    island = island_on(tiny_harness)
    tiny_harness.faulty.outage = UnreachableError("connection refused")
    island.link.start()
    at_once(lambda: steps_of(island, 100))
    assert island.totals.steps == 100
    until(lambda: island.link.trouble, "the trouble to be noted")
    assert at_once(lambda: island.leave(flush_seconds=0.01)) is False


def test_the_interval_stretches_with_a_backlog(tiny_harness: Harness) -> None:
    """An island with a slow link skips rounds that others call, and loses no progress."""
    tiny_harness.broker.runs["tiny"].lease = ("merger", float("inf"))
    island = island_on(tiny_harness)
    link = island.link
    link.channels[0].inbox.window = 10  # so that the test can call ten rounds without closing one
    for number in range(1, 11):
        tiny_harness.call(number)
        link.pump_receive()
        steps_of(island, 1)
        assert link.channels.backlog <= tiny.CONFIG.sync.window
    sent = [draft.header for draft in link.channels[0].outbox._queue]
    assert len(sent) == 2
    link.channels[0].outbox.pump()
    assert link.channels.backlog == 0
    steps_of(island, 1)
    sent += [draft.header for draft in link.channels[0].outbox._queue]
    assert [contribution.round for contribution in sent] == [1, 2, 3, 4]
    assert sent[2].steps > 5, "it holds the progress of the skipped rounds"
    assert sent[0].steps + sent[2].steps == island.totals.steps - 1


def test_an_island_whose_name_was_taken_over_leaves(tiny_harness: Harness) -> None:
    island = island_on(tiny_harness)
    steps_of(island, 3)
    tiny_harness.link("a/new")
    island.link.pump()
    assert island.must_leave
    island.link.start()
    assert train(island, lambda: False) == "replaced"
    island.link.stop()
    assert tiny_harness.transport.reader.notes(1)[0].kind == "replaced"
    assert "a" not in {p.heartbeat.island for p in tiny_harness.transport.reader.presences() if not p.is_live}


def test_an_island_ends_when_its_link_fails(tiny_harness: Harness, until: Until) -> None:
    island = island_on(tiny_harness)
    tiny_harness.faulty.outage = ZeroDivisionError("a bug")
    island.link.start()
    until(lambda: island.link.failure is not None, "the failure to surface")
    with pytest.raises(ZeroDivisionError):
        train(island, lambda: False)
    assert island.totals.steps == 0
