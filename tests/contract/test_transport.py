"""Contract tests of the transports. Each test runs in memory, on fakeredis, on a real server and on a real cluster."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.corpus_shards import Place
from archipelago.broker.errors import BrokerError, FencedError, RunExistsError, UnknownRunError
from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import Books, Call, Evaluation, Marker, Note, Pending, Refusal, Resume, Snapshot
from archipelago.broker.redis.chunks import CHUNK_BYTES
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import (
    DIFFERENCES_KEPT,
    NOTES_KEPT,
    REFUSALS_AMONG,
    STANDBY_SECONDS,
    START,
    Commit,
    Delivery,
    Memory,
    Transport,
)
from tests import samples
from tests.contract.members import Members, MembersTransport

Connect = Callable[[], Transport]
WIDTH = 100_000
#: A payload that the Redis transports split into chunks.
LARGE = bytes(range(256)) * 10_000
BOTH_SIZES = pytest.mark.parametrize("payload", [b"payload", LARGE], ids=["inline", "chunks"])
REFUSAL = Refusal("a", "x", 0, 1, 0, 100, "it was too old")


@pytest.fixture(
    params=[
        *("memory", "fakeredis", "redis", "roles"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("cluster", "roles in a cluster", "rules for Redis 6.2")
        ),
    ]
)
def connections(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """A function that opens connections to one run. The run does not exist yet."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    opened: list[Transport] = []
    memory = MemoryBroker()
    members: Members | None = None
    url = ""
    if request.param not in ("memory", "fakeredis"):
        url = request.getfixturevalue("cluster" if "cluster" in request.param else "server").url
    if request.param.startswith(("roles", "rules")):
        early = (6, 2) if request.param.startswith("rules") else None
        members = Members(url, run, early)

    def open_one() -> Transport:
        if members:
            made: Transport = MembersTransport(members)
        elif request.param == "memory":
            made = memory.connect(run)
        elif request.param == "fakeredis":
            made = connect(f"fakeredis://{run}", run)
        else:
            made = connect(url, run)
        opened.append(made)
        return made

    yield open_one
    for transport in opened:
        transport.close()
    if members:
        members.close()


@pytest.fixture
def transport(connections: Connect) -> Transport:
    """A connection to a run that was just created."""
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    made.create(manifest, samples.first_snapshots(manifest))
    return made


def acquire_lease(transport: Transport) -> int:
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    return epoch


def publish(transport: Transport, count: int, payload: bytes = b"payload") -> list[str]:
    """Publish `count` contributions of island `a`, numbered from 0, and return their entries."""
    return [transport.island.publish(samples.contribution(payload, sequence=n), payload) for n in range(count)]


def delete_manifest(transport: Transport, connections: Connect) -> Transport:
    """Delete only the manifest of the run, and return a new connection to it."""
    if isinstance(transport, MemoryTransport):
        del transport._broker.runs[transport.run]
    else:
        administrator = transport.administrator if isinstance(transport, MembersTransport) else transport
        assert isinstance(administrator, RedisTransport)
        administrator.connection.redis.delete(Keys(transport.run).manifest)
    return connections()


def gone(entry: str) -> Delivery:
    return Delivery(entry, None, b"", "the entry is gone")


def test_the_lease_of_a_merger_that_is_gone_is_free(transport: Transport) -> None:
    first = transport.merger.acquire("dead", 60.0)
    assert first is not None
    assert transport.merger.acquire("other", 60.0, {"living"}.__contains__) is None
    assert transport.merger.acquire("other", 60.0, {"dead"}.__contains__) == first + 1
    assert transport.merger.acquire("third", 60.0, {"dead"}.__contains__) is None


def test_a_run_that_was_not_created_is_unknown(connections: Connect) -> None:
    transport = connections()
    with pytest.raises(UnknownRunError):
        transport.reader.manifest()
    with pytest.raises(UnknownRunError):
        transport.merger.acquire("merger", 10.0)


def test_creating_a_run_writes_the_manifest_and_the_fragments(transport: Transport, connections: Connect) -> None:
    other = connections()
    assert other.reader.manifest() == samples.manifest(transport.run, width=WIDTH)
    for expected in samples.first_snapshots(other.reader.manifest()):
        assert other.reader.fragment(expected[0].fragment) == expected
    assert transport.run in other.reader.runs()


def test_a_run_cannot_be_created_twice(transport: Transport, connections: Connect) -> None:
    manifest = samples.manifest(transport.run, width=WIDTH)
    with pytest.raises(RunExistsError):
        connections().create(manifest, samples.first_snapshots(manifest, value=1.0))
    assert transport.reader.fragment(0) == samples.first_snapshots(manifest)[0]


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["inline", "chunks"])
def test_contributions_arrive_in_order_and_once(transport: Transport, connections: Connect, payload: bytes) -> None:
    island = connections()
    sent = [samples.contribution(payload, sequence=n) for n in range(3)]
    for contribution in sent:
        island.island.publish(contribution, payload)
    found = [delivery.with_payload() for delivery in transport.merger.updates(0.0)]
    assert [delivery.contribution for delivery in found] == sent
    assert [delivery.payload for delivery in found] == [payload] * 3
    assert transport.merger.updates(0.0) == []
    assert transport.reader.backlog() == 3
    assert transport.reader.books() == Books(published=3, published_tokens=300)


def test_an_entry_in_the_name_of_another_island_has_a_fault(transport: Transport) -> None:
    entry = samples.forge(transport, "mallory", samples.contribution(sequence=7), b"payload")
    (delivery,) = transport.merger.updates(0.0)
    assert (delivery.entry, delivery.sender, delivery.contribution) == (entry, "mallory", None)
    assert delivery.fault
    assert transport.reader.pending() == Pending(1, 0)
    transport.merger.refuse(acquire_lease(transport), [(entry, Refusal("mallory", "?", 0, 0, 0, 0, delivery.fault))])
    assert (transport.reader.books().refused, transport.reader.books().refused_tokens) == (1, 0)
    assert transport.reader.books().published == 1


def test_each_island_is_read_equally_and_by_arrival(transport: Transport, connections: Connect) -> None:
    for island in ("b", "b", "b", "b", "a"):
        transport.island.publish(samples.contribution(island=island), b"payload")
    found = transport.merger.updates(0.0, count=2)
    assert sorted(delivery.sender for delivery in found) == ["a", "b", "b"]
    assert [delivery.sender for delivery in transport.merger.updates(0.0, count=2)] == ["b", "b"]
    other = connections()
    senders, after = "", START
    while page := other.merger.unacknowledged(after, 2):
        senders, after = senders + "".join(delivery.sender for delivery in page), page[-1].entry
    assert sorted(senders) == list("abbbb")


def test_unacknowledged_contributions_survive_a_restart(transport: Transport, connections: Connect) -> None:
    for n in range(3):
        transport.island.publish(samples.contribution(sequence=n), b"payload")
    epoch = acquire_lease(transport)
    first, second, third = transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([second.entry]))
    assert connections().merger.unacknowledged() == [first, third]


def test_reading_waits_for_a_contribution(transport: Transport, connections: Connect) -> None:
    sender = threading.Timer(0.05, lambda: connections().island.publish(samples.contribution(), b"payload"))
    sender.start()
    found = transport.merger.updates(10.0)
    sender.join()
    assert len(found) == 1


@pytest.mark.parametrize("payload", [b"new", LARGE], ids=["inline", "chunks"])
def test_a_commit_changes_everything_at_once(transport: Transport, connections: Connect, payload: bytes) -> None:
    entry = transport.island.publish(samples.contribution(payload), payload)
    assert transport.island.holds(entry)
    epoch = acquire_lease(transport)
    (delivery,) = transport.merger.updates(0.0)
    assert delivery.entry == entry
    commit = samples.commit([delivery.entry], payload, outer=payload + b"!")
    transport.merger.commit(epoch, commit)
    other = connections()
    assert other.reader.fragment(0) == (commit.snapshot, payload)
    assert other.merger.outer(0) == payload + b"!"
    assert other.reader.merger_state() == commit.state
    assert other.reader.tape(10) == [commit.tape]
    assert [event for _, event in other.reader.events(START, 0.0)] == [commit.snapshot]
    assert other.reader.backlog() == 0
    assert other.island.holds(entry)  # Redis keeps it until a checkpoint covers it.
    assert other.merger.unacknowledged() == []
    assert other.reader.books() == Books(1, 100, 1, 100, 0, 0, len(payload), 0, kept=1)


def test_a_newer_snapshot_replaces_the_older_one(transport: Transport) -> None:
    epoch = acquire_lease(transport)
    transport.merger.commit(epoch, samples.commit([], LARGE, 1))
    transport.merger.commit(epoch, samples.commit([], LARGE[::-1], 3))
    snapshot, payload = transport.reader.fragment(0)
    assert (snapshot.version, payload) == (2, LARGE[::-1])


def test_the_newest_claim_to_a_name_counts(transport: Transport, connections: Connect) -> None:
    other = connections()
    older = transport.island.claim_name("a", "x")
    assert transport.island.confirm_name("a", older) == older
    newer = other.island.claim_name("a", "y")
    assert newer > older
    assert transport.island.confirm_name("a", older) == newer
    assert other.island.confirm_name("a", newer) == newer
    assert transport.island.claim_name("b", "x").incarnation == "x"
    lost = newer._replace(generation=newer.generation + 5)  # as after a restart that lost this claim
    assert other.island.confirm_name("a", lost) == lost
    assert transport.island.confirm_name("a", newer) == lost


def test_requests_among_thousands_of_others_are_found(transport: Transport, connections: Connect) -> None:
    other = connections()
    for number in range(400):
        other.island.request_state(f"nobody-{number}/x")
    for island in ("a", "b"):  # last, because they expire, and the requests may take long
        transport.island.heartbeat(samples.heartbeat(island, "joining"))
    other.island.request_state("b/x")
    assert transport.island.open_requests() == ["b/x"]
    assert transport.island.promise_answer("b/x", "a/x")
    assert transport.island.open_requests() == []


def test_headers_of_all_fragments_are_read_without_payloads(transport: Transport) -> None:
    first = samples.first_snapshots(transport.reader.manifest())
    assert transport.reader.heads() == [snapshot for snapshot, _ in first]
    commit = samples.commit([], LARGE, 1)
    transport.merger.commit(acquire_lease(transport), commit)
    assert transport.reader.heads() == [commit.snapshot, first[1][0]]


def test_a_refusal_is_an_event_and_ends_the_contribution(transport: Transport, connections: Connect) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    epoch = acquire_lease(transport)
    (delivery,) = transport.merger.updates(0.0)
    refusal = Refusal("a", "x", 0, 1, 0, 100, "it was too old")
    transport.merger.refuse(epoch, [(delivery.entry, refusal)])
    other = connections()
    assert [event for _, event in other.reader.events(START, 0.0)] == [refusal]
    assert (other.reader.backlog(), other.reader.books().refused, other.reader.books().refused_tokens) == (0, 1, 100)


def test_the_older_epoch_is_refused(transport: Transport, connections: Connect) -> None:
    kept, _ = publish(transport, 2)
    transport.island.record_actions(samples.actions())
    old = transport.merger.acquire("first", 10.0)
    assert old is not None
    _, delivery = transport.merger.updates(0.0)
    transport.merger.commit(old, samples.commit([kept]))
    events, tape = transport.reader.events(START, 0.0), transport.reader.tape(10)
    transport.merger.release(old)
    newer = connections()
    new = newer.merger.acquire("second", 10.0)
    assert new is not None
    assert new > old
    writes: list[Callable[[], None]] = [
        lambda: transport.merger.commit(old, samples.commit([delivery.entry])),
        lambda: transport.merger.refuse(old, [(delivery.entry, Refusal("a", "x", 0, 1, 0, 100, "no"))]),
        lambda: transport.merger.announce(old, Call(1, 0)),
        lambda: transport.merger.trim(old, [kept], "a/9999999999999-0"),
        lambda: transport.merger.renew(old, "first", 10.0),
        lambda: transport.merger.release(old),
    ]
    for write in writes:
        with pytest.raises(FencedError):
            write()
    assert newer.reader.events(START, 0.0) == events
    assert newer.reader.tape(10) == tape
    assert newer.reader.backlog() == 1
    assert newer.reader.books().kept == 1
    assert len(newer.merger.actions(START)) == 1
    newer.merger.commit(new, samples.commit([delivery.entry]))
    assert newer.reader.backlog() == 0


def test_every_member_sees_whether_a_merger_serves(transport: Transport, connections: Connect) -> None:
    other = connections()
    known = {False, None}  # before Redis 7, the rules of a member may hide it
    assert other.reader.is_served() in known
    epoch = acquire_lease(transport)
    assert other.reader.is_served() in (True, None)
    transport.merger.release(epoch)
    assert other.reader.is_served() in known


def test_only_one_merger_holds_the_lease(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("first", 10.0)
    assert epoch is not None
    assert connections().merger.acquire("second", 10.0) is None
    transport.merger.renew(epoch, "first", 10.0)
    transport.merger.release(epoch)
    assert connections().merger.acquire("second", 10.0) is not None


def test_a_lease_expires(transport: Transport, connections: Connect, until: Callable[..., None]) -> None:
    transport.merger.acquire("first", 0.05)
    other = connections()
    until(lambda: other.merger.acquire("second", 10.0), "the lease to run out")


def test_events_can_be_read_from_any_id(transport: Transport) -> None:
    epoch = acquire_lease(transport)
    assert transport.reader.last_event() == START
    transport.merger.announce(epoch, Call(1, 0))
    after_first = transport.reader.last_event()
    transport.merger.announce(epoch, Resume(1, epoch))
    assert [event for _, event in transport.reader.events(START, 0.0)] == [Call(1, 0), Resume(1, epoch)]
    assert [event for _, event in transport.reader.events(after_first, 0.0)] == [Resume(1, epoch)]
    assert transport.reader.events(transport.reader.last_event(), 0.0) == []
    assert transport.reader.events(transport.reader.last_event(), 0.02) == []


def test_events_wait_for_the_first(transport: Transport, connections: Connect) -> None:
    epoch = acquire_lease(transport)
    caller = threading.Timer(0.05, lambda: transport.merger.announce(epoch, Call(1, 0)))
    caller.start()
    found = connections().reader.events(START, 10.0)
    caller.join()
    assert [event for _, event in found] == [Call(1, 0)]


def test_heartbeats_replace_each_other(transport: Transport, connections: Connect) -> None:
    began = time.monotonic()
    transport.island.heartbeat(samples.heartbeat("b"))
    transport.island.heartbeat(samples.heartbeat("a", steps=1))
    transport.island.heartbeat(samples.heartbeat("a", steps=2, state="left"))
    first, second = connections().reader.presences()
    assert first.heartbeat == samples.heartbeat("a", steps=2, state="left")
    assert second.heartbeat.island == "b"
    assert 0.0 <= first.age_seconds < time.monotonic() - began + 1.0


def test_evaluations_are_kept_in_order(transport: Transport) -> None:
    for n in range(3):
        transport.reader.record_evaluation(Evaluation(n, n, 10 * n, 1.7e9, 5.0 - n))
    assert [e.bits_per_byte for e in transport.reader.evaluations()] == [5.0, 4.0, 3.0]


def test_one_island_at_a_time_holds_the_lease_on_evaluating(transport: Transport, until: Callable[..., None]) -> None:
    lease = transport.island.lease_evaluation
    assert lease("a/1", 30.0)
    assert lease("a/1", 30.0)
    assert not lease("b/1", 30.0)
    assert not lease("a/1", 0.0)
    until(lambda: lease("b/1", 0.05), "the lease that a has ended")
    until(lambda: lease("a/2", 30.0), "the lease of b to expire")
    assert not lease("b/1", 30.0)


def test_the_tape_returns_its_newest_entries(transport: Transport) -> None:
    epoch = acquire_lease(transport)
    for round_number in (1, 3, 5):
        transport.merger.commit(epoch, samples.commit([], round_number=round_number))
    assert [entry.round for entry in transport.reader.tape(2)] == [3, 5]


def test_a_new_run_is_empty(transport: Transport) -> None:
    assert transport.reader.merger_state() == ""
    assert transport.merger.outer(0) == b""
    assert transport.reader.books() == Books()
    assert transport.reader.tape(5) == []
    assert transport.reader.presences() == []
    assert transport.merger.updates(0.0) == []
    assert isinstance(transport.reader.fragment(1)[0], Snapshot)
    assert (transport.reader.backlog(), transport.reader.pending()) == (0, Pending(0, 0))
    assert transport.reader.cursors() == {}
    assert transport.merger.actions(START) == []
    assert transport.island.open_requests() == []
    assert transport.island.handed_over("a/x") is None
    assert transport.island.claim_checkpoint("a") is None
    assert transport.merger.read([]) == []


def test_a_marker_is_an_event(transport: Transport) -> None:
    transport.merger.announce(acquire_lease(transport), Marker(1, 0))
    assert [event for _, event in transport.reader.events(START, 0.0)] == [Marker(1, 0)]


# -- merged entries, until a checkpoint covers them ---------------------------------------------------------------


@BOTH_SIZES
def test_merged_entries_can_be_read_until_they_are_trimmed(
    transport: Transport, connections: Connect, payload: bytes
) -> None:
    entries = publish(transport, 3, payload)
    epoch = acquire_lease(transport)
    found = [delivery.with_payload() for delivery in transport.merger.updates(0.0)]
    transport.merger.commit(epoch, samples.commit(entries[:2], tokens=200))
    other = connections()
    assert other.merger.read(entries[::-1]) == found[::-1]  # The order is that of the argument.
    assert (other.reader.backlog(), other.reader.pending(), other.reader.books().kept) == (1, Pending(1, 100), 2)
    transport.merger.trim(epoch, entries)
    assert other.merger.read(entries) == [gone(entries[0]), gone(entries[1]), found[2]]  # Pending entries stay.
    assert [other.island.holds(entry) for entry in entries] == [False, False, True]
    assert (other.reader.backlog(), other.reader.pending(), other.reader.books().kept) == (1, Pending(1, 100), 0)
    assert [delivery.with_payload() for delivery in other.merger.unacknowledged()] == [found[2]]
    transport.merger.trim(epoch, entries)
    assert other.reader.books() == Books(3, 300, 2, 200, 0, 0, 2 * len(payload), 0, kept=0)


@BOTH_SIZES
def test_a_commit_trims_covered_entries(transport: Transport, payload: bytes) -> None:
    first, second, third, fourth = publish(transport, 4, payload)
    epoch = acquire_lease(transport)
    waiting = transport.merger.updates(0.0)[3]
    transport.merger.commit(epoch, samples.commit([first, second]))
    transport.merger.commit(epoch, samples.commit([third], round_number=3, trim=[first, third, fourth]))
    assert [transport.island.holds(entry) for entry in (first, second, third, fourth)] == [False, True, False, True]
    assert (transport.reader.backlog(), transport.reader.books().kept) == (1, 1)
    assert transport.merger.unacknowledged() == [waiting]


def test_deleted_entries_do_not_count_as_kept(transport: Transport) -> None:
    first, second = publish(transport, 2)
    epoch = acquire_lease(transport)
    transport.merger.updates(0.0)
    transport.merger.refuse(epoch, [(first, REFUSAL)])
    transport.merger.commit(epoch, samples.commit([first, second], trim=[first]))
    assert (transport.reader.backlog(), transport.reader.books().kept) == (0, 1)


def test_a_repeated_commit_counts_kept_entries_once(transport: Transport) -> None:
    entries = publish(transport, 2)
    epoch = acquire_lease(transport)
    transport.merger.updates(0.0)
    for _ in range(2):
        transport.merger.commit(epoch, samples.commit(entries[:1]))
    assert (transport.reader.backlog(), transport.reader.pending(), transport.reader.books().kept) == (
        1,
        Pending(1, 100),
        1,
    )


def test_a_refusal_keeps_merged_entries_and_counts_once(transport: Transport) -> None:
    kept, refused = publish(transport, 2)
    epoch = acquire_lease(transport)
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([kept]))
    last = transport.reader.last_event()
    for _ in range(2):
        transport.merger.refuse(epoch, [(kept, REFUSAL), (refused, REFUSAL)])
    assert [transport.island.holds(entry) for entry in (kept, refused)] == [True, False]
    assert transport.reader.books() == Books(2, 200, 1, 100, 1, 100, 14, 0, kept=1)
    assert [event for _, event in transport.reader.events(last, 0.0)] == [REFUSAL]


def test_pending_counts_contributions_and_tokens(transport: Transport, connections: Connect) -> None:
    for n in range(5):
        transport.island.publish(samples.contribution(sequence=n, tokens=10**n), b"payload")
    epoch = acquire_lease(transport)
    merged, refused, *_ = transport.merger.updates(0.0, count=3)  # Two more entries were never read.
    transport.merger.commit(epoch, samples.commit([merged.entry]))
    transport.merger.refuse(epoch, [(refused.entry, REFUSAL)])
    assert connections().reader.pending() == Pending(3, 11100)
    assert connections().reader.backlog() == 3


def test_many_entries_are_counted_correctly(transport: Transport) -> None:
    entries = publish(transport, 600)
    epoch = acquire_lease(transport)
    while transport.merger.updates(0.0, count=500):
        pass
    transport.merger.commit(epoch, samples.commit(entries[::2]))
    assert transport.reader.pending() == Pending(300, 30_000)
    transport.merger.trim(epoch, entries)
    assert (transport.reader.pending(), transport.reader.backlog()) == (Pending(300, 30_000), 300)
    assert len(transport.merger.unacknowledged()) == 300


# -- actions -------------------------------------------------------------------------------------------------------


def test_actions_are_read_in_order_from_any_id(transport: Transport, connections: Connect) -> None:
    transport.island.record_actions(samples.actions(0))
    transport.island.publish(samples.contribution(), b"payload", samples.actions(1))
    transport.island.publish(samples.contribution(sequence=1), b"payload")
    transport.island.record_actions(samples.actions(2, island="b", text="step ✓"))
    other = connections()
    found = other.merger.actions(START)
    wanted = [samples.actions(0), samples.actions(1), samples.actions(2, island="b", text="step ✓")]
    assert [actions for _, actions in found] == wanted
    assert other.merger.actions(found[0][0]) == found[1:]
    assert other.merger.actions(START, count=2) == found[:2]
    assert other.merger.actions(found[-1][0]) == []
    assert transport.reader.backlog() == 2


def test_actions_are_trimmed_up_to_an_id(transport: Transport) -> None:
    for n in range(3):
        transport.island.record_actions(samples.actions(n))
    found = transport.merger.actions(START)
    epoch = acquire_lease(transport)
    transport.merger.trim(epoch, [])
    assert transport.merger.actions(START) == found
    transport.merger.trim(epoch, [], found[1][0])
    assert transport.merger.actions(START) == found[2:]
    transport.merger.trim(epoch, [], found[2][0])
    assert transport.merger.actions(START) == []


# -- leases on data -----------------------------------------------------------------------------------------------


def test_no_two_islands_lease_the_same_shard(transport: Transport, connections: Connect) -> None:
    other, shards = connections(), ["0", "1", "site/2"]
    for island in ("a", "b"):
        transport.island.heartbeat(samples.heartbeat(island))
    assert transport.island.lease_shard(shards, "a/x") == Place("0", 0, 0)
    assert other.island.lease_shard(shards, "b/x") == Place("1", 0, 0)
    assert other.island.lease_shard(["0"], "b/x") is None
    assert transport.island.lease_shard(shards, "a/x") == Place("0", 0, 0), "a repeated request got another shard"
    assert transport.island.lease_shard(shards[1:], "a/x") == Place("site/2", 0, 0)
    assert other.island.lease_shard(["0", "site/2"], "b/x") is None
    assert other.island.leased([*shards, "3"], "a/x") == {"0", "site/2"}
    assert transport.island.leased(shards, "b/x") == {"1"}
    assert transport.island.leased(shards, "a/another") == frozenset()
    assert transport.island.leased([], "a/x") == frozenset()
    assert transport.reader.cursors() == {}


def test_concurrent_leases_do_not_overlap(transport: Transport, connections: Connect) -> None:
    shards = [str(n) for n in range(8)]
    found: list[str] = []
    for n in range(4):
        transport.island.heartbeat(samples.heartbeat(f"i{n}"))

    def lease(island: Transport, worker: str) -> None:
        leased: list[str] = []
        for _ in range(2):
            place = island.island.lease_shard([shard for shard in shards if shard not in leased], worker)
            leased.append(place.shard if place else "none")
        found.extend(leased)

    threads = [threading.Thread(target=lease, args=(connections(), f"i{n}/x")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == shards


def test_a_merged_contribution_moves_the_cursor(transport: Transport, connections: Connect) -> None:
    transport.island.heartbeat(samples.heartbeat())
    transport.island.lease_shard(["3", "4"], "a/x")
    epoch = acquire_lease(transport)
    transport.merger.commit(epoch, samples.commit([], cursors={"3": (0, 96), "4": (0, 8)}))
    assert connections().reader.cursors() == {"3": (0, 96), "4": (0, 8)}
    assert transport.island.leased(["3", "4"], "a/x") == {"3"}
    assert connections().island.lease_shard(["3", "4"], "b/y") == Place("4", 0, 8)


def test_a_lease_ends_with_its_pass_over_the_shard(transport: Transport, connections: Connect) -> None:
    for island in ("a", "b"):
        transport.island.heartbeat(samples.heartbeat(island))
    transport.island.lease_shard(["0"], "a/x")
    epoch = acquire_lease(transport)
    transport.merger.commit(epoch, samples.commit([], cursors={"0": (1, 0)}))
    assert transport.island.leased(["0"], "a/x") == frozenset()
    assert connections().island.lease_shard(["0"], "b/x") == Place("0", 1, 0)
    transport.merger.commit(epoch, samples.commit([], round_number=3, cursors={"0": (1, 5)}))
    assert transport.island.leased(["0"], "b/x") == {"0"}


def test_a_shard_is_released_when_its_holder_has_left_and_is_merged(transport: Transport, connections: Connect) -> None:
    island = connections()
    island.island.heartbeat(samples.heartbeat())
    island.island.lease_shard(["0"], "a/x")
    assert transport.island.lease_shard(["0"], "b/y") is None
    island.island.publish(samples.contribution(), b"payload")
    island.island.heartbeat(samples.heartbeat(state="left"))
    assert transport.island.lease_shard(["0"], "b/y") is None  # Its pending contribution may still move the cursor.
    epoch = acquire_lease(transport)
    (delivery,) = transport.merger.updates(0.0)
    assert transport.island.lease_shard(["0"], "b/y") is None
    transport.merger.commit(epoch, samples.commit([delivery.entry], cursors={"0": (0, 40)}))
    assert transport.island.lease_shard(["0"], "b/y") == Place("0", 0, 40)
    assert transport.island.leased(["0"], "b/y") == {"0"}
    assert island.island.leased(["0"], "a/x") == frozenset()


def test_a_new_incarnation_takes_over_from_the_old_one(transport: Transport) -> None:
    transport.island.heartbeat(samples.heartbeat())
    transport.island.heartbeat(samples.heartbeat("b"))
    transport.island.lease_shard(["0", "1", "2"], "b/x")
    transport.island.lease_shard(["0", "1", "2"], "a/x")
    transport.island.heartbeat(samples.heartbeat(incarnation="z"))
    assert transport.island.lease_shard(["0", "2", "1"], "a/z") == Place("1", 0, 0)


def test_the_first_registration_fixes_the_digest_of_a_corpus(transport: Transport, connections: Connect) -> None:
    assert transport.island.register_corpus("site", "1" * 32) == "1" * 32
    assert connections().island.register_corpus("site", "2" * 32) == "1" * 32
    assert connections().island.register_corpus("other", "2" * 32) == "2" * 32
    assert transport.reader.cursors() == {}


def test_memory_is_reported_in_bytes(transport: Transport) -> None:
    publish(transport, 3)
    found = transport.reader.memory()
    assert isinstance(found, Memory)
    assert found.used >= 0
    assert found.limit >= 0
    assert transport.reader.memory().limit == found.limit
    assert transport.reader.backlog() == 3


# -- between islands ----------------------------------------------------------------------------------------------


def test_a_live_island_that_asks_is_promised_one_answer(transport: Transport, connections: Connect) -> None:
    other = connections()
    transport.island.request_state("a/x")
    assert other.island.open_requests() == []  # Without a heartbeat the island does not count as alive.
    transport.island.heartbeat(samples.heartbeat(state="joining"))
    transport.island.heartbeat(samples.heartbeat("c", state="left"))
    transport.island.request_state("c/x")
    transport.island.request_state("a/older")
    assert other.island.open_requests() == ["a/x"]
    assert other.island.promise_answer("a/x", "b/y")
    assert not transport.island.promise_answer("a/x", "c/z")
    transport.island.request_state("a/x")  # A repeated request does not open the request again.
    assert other.island.open_requests() == []
    assert not other.island.promise_answer("nobody/x", "b/y")


def test_only_one_island_promises_each_answer(transport: Transport, connections: Connect) -> None:
    for n in range(4):
        transport.island.request_state(f"a/{n}")
    answered: list[str] = []

    def offer(island: Transport, giver: str) -> None:
        requests = ("a/0", "a/1", "a/2", "a/3")
        answered.extend(request for request in requests if island.island.promise_answer(request, giver))

    threads = [threading.Thread(target=offer, args=(connections(), f"b/{n}")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answered) == ["a/0", "a/1", "a/2", "a/3"]


@BOTH_SIZES
def test_an_answer_is_kept_until_its_request_is_withdrawn(
    transport: Transport, connections: Connect, payload: bytes
) -> None:
    giver, given = connections(), (samples.handover(payload), payload)
    transport.island.request_state("a/x")
    transport.island.request_state("a/z")
    assert transport.island.handed_over("a/x") is None
    giver.island.promise_answer("a/x", "b/y")
    giver.island.hand_over("a/x", *given)
    assert transport.island.handed_over("a/x") == transport.island.handed_over("a/x") == given
    assert transport.island.handed_over("a/z") is None
    transport.island.withdraw_request("a/x")
    assert transport.island.handed_over("a/x") is None
    assert not giver.island.promise_answer("a/x", "b/y")
    assert giver.island.promise_answer("a/z", "b/y")
    transport.island.withdraw_request("a/x")


@BOTH_SIZES
def test_an_answer_without_a_request_is_dropped(transport: Transport, payload: bytes) -> None:
    transport.island.hand_over("a/x", samples.handover(payload), payload)
    transport.island.request_state("a/x")
    assert transport.island.handed_over("a/x") is None


# -- restoring ----------------------------------------------------------------------------------------------------


@BOTH_SIZES
def test_a_checkpoint_restores_everything(connections: Connect, payload: bytes) -> None:
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    pending = [(samples.contribution(payload, sequence=n, tokens=10 + n), payload) for n in range(2)]
    image = samples.image(manifest, pending, outer=payload)
    made.restore(image)
    other = connections()
    assert other.reader.manifest() == manifest
    assert [other.reader.fragment(p) for p in range(2)] == image.snapshots
    assert [other.merger.outer(p) for p in range(2)] == [payload, b""]
    assert (other.reader.merger_state(), other.reader.cursors()) == (image.state, image.cursors)
    assert (other.reader.tape(9), other.reader.evaluations()) == (image.tape, image.evaluations)
    assert other.reader.events(START, 0.0) == []
    assert (other.reader.backlog(), other.reader.pending()) == (2, Pending(2, 21))
    assert other.reader.books() == Books(3 + 2, 300 + 21, 2, 200, 1, 100, 5000, 6000, kept=0)
    assert made.run in other.reader.runs()
    assert acquire_lease(other) > 0
    found = [delivery.with_payload() for delivery in other.merger.updates(0.0)]
    assert [(d.contribution, d.payload) for d in found] == pending


def test_a_restored_run_continues(connections: Connect) -> None:
    made = connections()
    manifest = samples.manifest(made.run)
    made.restore(samples.image(manifest, [(samples.contribution(), b"payload")]))
    epoch = acquire_lease(made)
    (delivery,) = made.merger.updates(0.0)
    made.merger.commit(epoch, samples.commit([delivery.entry], round_number=3, cursors={"0": (1, 0)}))
    assert made.reader.fragment(0)[0].version == 2
    assert [entry.round for entry in made.reader.tape(9)] == [1, 3]
    assert made.reader.cursors() == {"0": (1, 0), "site/7": (2, 0)}
    assert (made.reader.books().merged, made.reader.books().kept, made.reader.backlog()) == (3, 1, 0)


def test_an_existing_run_is_not_overwritten_by_a_restore(transport: Transport, connections: Connect) -> None:
    transport.island.publish(samples.contribution(), b"payload")
    with pytest.raises(RunExistsError):
        connections().restore(samples.image(transport.reader.manifest(), []))
    assert transport.reader.fragment(0) == samples.first_snapshots(transport.reader.manifest())[0]
    assert (transport.reader.backlog(), transport.reader.books().merged) == (1, 0)
    assert transport.island.claim_checkpoint("a") is None


def test_an_island_claims_the_checkpoint_of_a_restored_run_once(connections: Connect) -> None:
    made = connections()
    made.restore(samples.image(samples.manifest(made.run), []))
    assert made.island.claim_checkpoint("a") == (3, 1)
    assert connections().island.claim_checkpoint("a") is None
    assert connections().island.claim_checkpoint("b") == (3, 1)


def test_each_version_has_its_difference_to_the_previous_one(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    assert transport.reader.difference(0, 1) is None
    for number, difference in ((1, b"one"), (3, LARGE), (5, b"")):
        transport.merger.commit(epoch, samples.commit([], round_number=number, difference=difference))
    other = connections()
    assert [other.reader.difference(0, version) for version in (1, 2, 3)] == [b"one", LARGE, None]
    assert other.reader.difference(1, 1) is None


def test_a_payload_can_be_watched_while_it_arrives(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    transport.merger.commit(epoch, samples.commit([], round_number=1, difference=LARGE))
    other = connections()
    seen: list[bytes] = []
    assert other.reader.difference(0, 1, lambda payload: seen.append(bytes(payload))) == LARGE
    assert all(LARGE.startswith(payload) for payload in seen)
    assert [len(payload) for payload in seen] == sorted({len(payload) for payload in seen})
    if isinstance(other, RedisTransport):  # others hand over whole payloads
        assert len(seen) == -(-len(LARGE) // CHUNK_BYTES) > 1
        assert seen[-1] == LARGE


def small(number: int, **changes: Any) -> Commit:
    """Return a commit without a full state."""
    return samples.commit([], round_number=number, **({"payload": b"", "outer": b"", "log": f"log {number}"} | changes))


def test_a_small_commit_leaves_the_full_state_as_it_is(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    first = transport.reader.fragment(0)
    commit = small(1, difference=b"one", after_round=0)
    transport.merger.commit(epoch, commit)
    other = connections()
    assert other.reader.heads()[0] == commit.snapshot
    assert other.reader.fragment(0) == first
    assert (other.merger.outer(0), other.merger.log(0, 1), other.merger.log(0, 2)) == (b"", "log 1", "")
    assert other.merger.lost(1) == []


def test_a_compaction_covers_the_versions_up_to_its_own(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    entry = transport.island.publish(samples.contribution(b"sent"), b"sent")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, replace(small(1, difference=b"one"), entries=[entry]))
    transport.merger.commit(epoch, small(3, difference=LARGE))
    transport.merger.commit(epoch, small(5, difference=b"three"))
    full = samples.commit([], LARGE, 3).compaction
    assert full is not None
    placed = transport.merger.place(epoch, full)
    other = connections()
    assert other.reader.fragment(0)[0].version == 0
    with pytest.raises(BrokerError):
        transport.merger.compact(epoch, placed, after_round=3)
    transport.merger.compact(epoch, placed, after_round=5, trim=[entry])
    assert other.reader.fragment(0) == (full.snapshot, LARGE)
    assert other.merger.outer(0, 2) == full.outer
    assert [other.merger.log(0, version) for version in (1, 2, 3)] == ["", "", "log 5"]
    assert [other.reader.difference(0, version) for version in (1, 2, 3)] == [b"one", LARGE, b"three"]
    assert other.reader.books().kept == 0
    assert other.merger.read([entry])[0].contribution is None
    assert other.reader.heads()[0] == small(5).snapshot
    assert other.merger.lost(5) == []


def test_a_compaction_of_an_older_epoch_is_refused(transport: Transport, connections: Connect) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    transport.merger.commit(epoch, small(1, difference=b"one"))
    full = samples.commit([], round_number=1).compaction
    assert full is not None
    placed = transport.merger.place(epoch, full)
    transport.merger.release(epoch)
    assert connections().merger.acquire("other", 60) is not None
    with pytest.raises(FencedError):
        transport.merger.compact(epoch, placed, after_round=1)
    assert transport.reader.fragment(0)[0].version == 0


def test_merged_entries_that_are_acknowledged_again_stay(transport: Transport) -> None:
    """A consumer group that was lost delivers them again, and a merger that starts needs them."""
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    entry = transport.island.publish(samples.contribution(b"sent"), b"sent")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, replace(small(1, difference=b"one"), entries=[entry]))
    transport.merger.acknowledge(epoch, [entry])
    assert transport.reader.books().kept == 1
    assert transport.merger.unacknowledged() == []
    assert transport.merger.read([entry])[0].payload == b"sent"


def test_downloaded_bytes_are_those_that_all_incarnations_report(transport: Transport, connections: Connect) -> None:
    transport.island.heartbeat(samples.heartbeat("a", bytes_down=5))
    transport.island.heartbeat(samples.heartbeat("b", bytes_down=100))
    transport.island.heartbeat(samples.heartbeat("a", bytes_down=7))
    other = connections()
    other.island.heartbeat(samples.heartbeat("a", incarnation="y", bytes_down=0))
    other.island.heartbeat(samples.heartbeat("a", incarnation="y", bytes_down=2))
    assert transport.reader.books().bytes_down == 7 + 2 + 100
    assert other.reader.presences()[0].heartbeat.bytes_down == 9


def test_only_the_newest_differences_are_kept(transport: Transport) -> None:
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    for version in range(1, DIFFERENCES_KEPT + 3):
        transport.merger.commit(epoch, samples.commit([], round_number=2 * version - 1, difference=b"%d" % version))
    found = [transport.reader.difference(0, version) for version in range(1, DIFFERENCES_KEPT + 3)]
    assert found[:2] == [None, None]
    assert found[2:] == [b"%d" % version for version in range(3, DIFFERENCES_KEPT + 3)]


def test_a_commit_that_does_not_follow_the_last_round_is_refused(transport: Transport) -> None:
    """Redis may have restarted without its newest writes. The merger notices this at its next commit."""
    epoch = transport.merger.acquire("m", 60)
    assert epoch is not None
    transport.merger.commit(epoch, samples.commit([], after_round=0))
    with pytest.raises(BrokerError):
        transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=2))
    assert [entry.round for entry in transport.reader.tape(9)] == [1]
    transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=1))


def test_all_connections_see_the_same_instance(transport: Transport, connections: Connect) -> None:
    assert transport.reader.instance() == connections().reader.instance()


def test_operator_controls_are_changed_together(transport: Transport, connections: Connect) -> None:
    other = connections()
    assert other.reader.control() == {}
    transport.reader.steer({"outer.learning_rate": "0.5", "merging": "paused", "sync.quorum": ""})
    assert other.reader.control() == {"outer.learning_rate": "0.5", "merging": "paused"}
    transport.reader.steer({"outer.learning_rate": "0.25", "merging": "", "island.a": "drain"})
    assert other.reader.control() == {"outer.learning_rate": "0.25", "island.a": "drain"}
    transport.reader.steer({"outer.learning_rate": "", "island.a": ""})
    assert other.reader.control() == {}
    transport.reader.steer({})


def test_a_run_that_was_not_created_cannot_be_steered(connections: Connect) -> None:
    with pytest.raises(UnknownRunError):
        connections().reader.steer({"merging": "paused"})


def test_a_new_run_has_no_controls_or_notes_of_an_earlier_run(transport: Transport, connections: Connect) -> None:
    transport.reader.steer({"merging": "paused", "island.a": "expel"})
    transport.reader.note(Note(1.0, "a", "left", "it was stopped"))
    again = delete_manifest(transport, connections)
    manifest = samples.manifest(again.run, width=WIDTH)
    again.create(manifest, samples.first_snapshots(manifest))
    assert (again.reader.control(), again.reader.notes(9)) == ({}, [])


def test_valid_operator_controls_are_restored_from_a_checkpoint(connections: Connect) -> None:
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    controls = {"sync.quorum": "3", "island.a": "expel"}
    state = json.dumps({"closed": 1, "control": controls | {"merging": "perhaps", "nonsense": "1"}})
    made.restore(samples.image(manifest, [], state=state))
    assert connections().reader.control() == controls


def test_a_heartbeat_returns_the_operators_control_of_that_island(transport: Transport, connections: Connect) -> None:
    assert transport.island.heartbeat(samples.heartbeat("a")) == {}
    connections().reader.steer({"island.a": "drain", "island.b": "expel", "merging": "paused", "inner.steps": "9"})
    assert transport.island.heartbeat(samples.heartbeat("a")) == {"island.a": "drain", "inner.steps": "9"}
    assert transport.island.heartbeat(samples.heartbeat("b")) == {"island.b": "expel", "inner.steps": "9"}
    assert transport.island.heartbeat(samples.heartbeat("c")) == {"inner.steps": "9"}


def test_an_expelled_island_loses_its_shards_and_gets_no_others(transport: Transport) -> None:
    transport.island.heartbeat(samples.heartbeat("a"))
    transport.island.heartbeat(samples.heartbeat("b"))
    assert transport.island.lease_shard(["0"], "a/x") == Place("0", 0, 0)
    transport.reader.steer({"island.a": "drain"})
    assert transport.island.lease_shard(["0"], "b/x") is None, "a draining island lost its shard"
    transport.reader.steer({"island.a": "expel"})
    assert transport.island.lease_shard(["1"], "a/x") is None
    assert transport.island.lease_shard(["0"], "b/x") == Place("0", 0, 0)
    assert transport.island.leased(["0"], "a/x") == frozenset()
    transport.reader.steer({"island.a": ""})
    assert transport.island.lease_shard(["1"], "a/x") == Place("1", 0, 0)


def test_a_shard_is_released_after_the_expelled_islands_contributions_end(transport: Transport) -> None:
    transport.island.heartbeat(samples.heartbeat("a"))
    transport.island.lease_shard(["0"], "a/x")
    publish(transport, 1)
    transport.reader.steer({"island.a": "expel"})
    assert transport.island.lease_shard(["0"], "b/x") is None
    epoch = acquire_lease(transport)
    transport.merger.refuse(epoch, [(delivery.entry, REFUSAL) for delivery in transport.merger.updates(0.0)])
    assert transport.island.lease_shard(["0"], "b/x") == Place("0", 0, 0)


def test_standbys_are_listed_until_they_leave(transport: Transport, connections: Connect) -> None:
    assert transport.reader.standbys() == []
    for name in ("b", "a", "b"):
        transport.merger.stand_by(name)
    found = connections().reader.standbys()
    assert [standby.name for standby in found] == ["a", "b"]
    assert all(0.0 <= standby.age_seconds < STANDBY_SECONDS for standby in found)
    transport.merger.stand_down("a")
    transport.merger.stand_down("never")
    assert [standby.name for standby in connections().reader.standbys()] == ["b"]


def test_notes_are_kept_in_order_and_only_the_newest(transport: Transport, connections: Connect) -> None:
    assert transport.reader.notes(9) == []
    notes = [Note(1.7e9 + n / 3, "a", "joined", f"note {n}") for n in range(NOTES_KEPT + 5)]
    for note in notes:
        transport.reader.note(note)
    other = connections()
    assert other.reader.notes(3) == notes[-3:]
    assert other.reader.notes(0) == []
    assert other.reader.notes(1 << 20) == notes[-NOTES_KEPT:]


def test_the_newest_refusals_are_found_among_the_events(transport: Transport, connections: Connect) -> None:
    other = connections()
    assert other.reader.refusals(9) == []
    epoch = acquire_lease(transport)
    for number, entry in enumerate(publish(transport, 4)):
        transport.merger.announce(epoch, Call(number + 1, 0))
        transport.merger.updates(0.0)
        transport.merger.refuse(epoch, [(entry, replace(REFUSAL, sequence=number, reason=f"reason {number}"))])
        transport.merger.announce(epoch, Marker(number + 1, number))
    found = other.reader.refusals(2)
    assert [refusal for _, refusal in found] == [
        replace(REFUSAL, sequence=2, reason="reason 2"),
        replace(REFUSAL, sequence=3, reason="reason 3"),
    ]
    assert 0.0 < found[0][0] <= found[1][0] < found[0][0] + 600.0
    assert len(other.reader.refusals(99)) == 4
    assert other.reader.refusals(0) == []
    for _ in range(REFUSALS_AMONG - 2):  # One marker follows the last refusal already.
        transport.merger.announce(epoch, Call(9, 0))
    assert [refusal.sequence for _, refusal in other.reader.refusals(99)] == [3]
