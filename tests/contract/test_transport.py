"""One suite over every transport: in memory, on fakeredis, on a real server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from broker.errors import FencedError, RunExistsError, UnknownRunError
from broker.memory import MemoryBroker
from broker.messages import Books, Call, Evaluation, Refusal, Resume, Snapshot
from broker.redis_transport import connect
from broker.transport import START, Transport
from ops.server import Server
from tests import samples

Connect = Callable[[], Transport]
WIDTH = 100_000
LARGE = bytes(range(256)) * 10_000
"""Travels in chunks where there are any."""


@pytest.fixture(params=["memory", "fakeredis", "redis"])
def connections(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens connections to one run, which does not exist yet."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    opened: list[Transport] = []
    memory = MemoryBroker()

    def open_one() -> Transport:
        if request.param == "memory":
            made: Transport = memory.connect(run)
        elif request.param == "fakeredis":
            made = connect(f"fakeredis://{run}", run)
        else:
            server: Server = request.getfixturevalue("server")
            made = connect(server.url, run)
        opened.append(made)
        return made

    yield open_one
    for transport in opened:
        transport.close()


@pytest.fixture
def transport(connections: Connect) -> Transport:
    """A connection to a run that was just created."""
    made = connections()
    manifest = samples.manifest(made.run, width=WIDTH)
    made.create(manifest, samples.first_snapshots(manifest))
    return made


def served(transport: Transport) -> int:
    epoch = transport.acquire("merger", 10.0)
    assert epoch is not None
    return epoch


def test_a_run_that_nobody_created_is_unknown(connections: Connect) -> None:
    transport = connections()
    with pytest.raises(UnknownRunError):
        transport.manifest()
    with pytest.raises(UnknownRunError):
        transport.acquire("merger", 10.0)


def test_creating_makes_manifest_and_fragments(transport: Transport, connections: Connect) -> None:
    other = connections()
    assert other.manifest() == samples.manifest(transport.run, width=WIDTH)
    for expected in samples.first_snapshots(other.manifest()):
        assert other.fragment(expected[0].fragment) == expected
    assert transport.run in other.runs()


def test_a_run_is_created_once(transport: Transport, connections: Connect) -> None:
    manifest = samples.manifest(transport.run, width=WIDTH)
    with pytest.raises(RunExistsError):
        connections().create(manifest, samples.first_snapshots(manifest, value=1.0))
    assert transport.fragment(0) == samples.first_snapshots(manifest)[0]


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["inline", "chunks"])
def test_contributions_arrive_in_order_and_once(transport: Transport, connections: Connect, payload: bytes) -> None:
    island = connections()
    sent = [samples.contribution(payload, sequence=n) for n in range(3)]
    for contribution in sent:
        island.publish(contribution, payload)
    found = transport.updates(0.0)
    assert [delivery.contribution for delivery in found] == sent
    assert [delivery.payload for delivery in found] == [payload] * 3
    assert transport.updates(0.0) == []
    assert transport.backlog() == 3
    assert transport.books() == Books(published=3, published_tokens=300, bytes_up=3 * len(payload))


def test_what_was_read_and_not_ended_is_there_after_a_restart(transport: Transport, connections: Connect) -> None:
    for n in range(3):
        transport.publish(samples.contribution(sequence=n), b"payload")
    epoch = served(transport)
    first, second, third = transport.updates(0.0)
    transport.commit(epoch, samples.commit([second.entry]))
    assert connections().unacknowledged() == [first, third]


def test_reading_waits_for_a_contribution(transport: Transport, connections: Connect) -> None:
    sender = threading.Timer(0.05, lambda: connections().publish(samples.contribution(), b"payload"))
    sender.start()
    found = transport.updates(10.0)
    sender.join()
    assert len(found) == 1


@pytest.mark.parametrize("payload", [b"new", LARGE], ids=["inline", "chunks"])
def test_a_commit_changes_everything_at_once(transport: Transport, connections: Connect, payload: bytes) -> None:
    entry = transport.publish(samples.contribution(payload), payload)
    assert transport.holds(entry)
    epoch = served(transport)
    (delivery,) = transport.updates(0.0)
    assert delivery.entry == entry
    commit = samples.commit([delivery.entry], payload, outer=payload + b"!")
    transport.commit(epoch, commit)
    other = connections()
    assert other.fragment(0, account=True) == (commit.snapshot, payload)
    assert other.outer(0) == payload + b"!"
    assert other.merger_state() == commit.state
    assert other.tape(10) == [commit.tape]
    assert [event for _, event in other.events(START, 0.0)] == [commit.snapshot]
    assert other.backlog() == 0
    assert not other.holds(entry)
    assert other.unacknowledged() == []
    assert other.books() == Books(1, 100, 1, 100, 0, 0, len(payload), len(payload))


def test_a_newer_snapshot_replaces_the_older(transport: Transport) -> None:
    epoch = served(transport)
    transport.commit(epoch, samples.commit([], LARGE, 1))
    transport.commit(epoch, samples.commit([], LARGE[::-1], 3))
    snapshot, payload = transport.fragment(0)
    assert (snapshot.version, payload) == (2, LARGE[::-1])


def test_refusals_end_a_contribution_and_are_told(transport: Transport, connections: Connect) -> None:
    transport.publish(samples.contribution(), b"payload")
    epoch = served(transport)
    (delivery,) = transport.updates(0.0)
    refusal = Refusal("a", "x", 0, 1, 0, 100, "it was too old")
    transport.refuse(epoch, [(delivery.entry, refusal)])
    other = connections()
    assert [event for _, event in other.events(START, 0.0)] == [refusal]
    assert (other.backlog(), other.books().refused, other.books().refused_tokens) == (0, 1, 100)


def test_the_older_epoch_is_refused(transport: Transport, connections: Connect) -> None:
    transport.publish(samples.contribution(), b"payload")
    old = transport.acquire("first", 10.0)
    assert old is not None
    transport.release(old)
    newer = connections()
    new = newer.acquire("second", 10.0)
    assert new is not None
    assert new > old
    (delivery,) = transport.updates(0.0)
    writes: list[Callable[[], None]] = [
        lambda: transport.commit(old, samples.commit([delivery.entry])),
        lambda: transport.refuse(old, [(delivery.entry, Refusal("a", "x", 0, 1, 0, 100, "no"))]),
        lambda: transport.announce(old, Call(1, 0)),
        lambda: transport.renew(old, "first", 10.0),
        lambda: transport.release(old),
    ]
    for write in writes:
        with pytest.raises(FencedError):
            write()
    assert newer.events(START, 0.0) == []
    assert newer.tape(10) == []
    assert newer.backlog() == 1
    newer.commit(new, samples.commit([delivery.entry]))
    assert newer.backlog() == 0


def test_one_merger_holds_the_lease(transport: Transport, connections: Connect) -> None:
    epoch = transport.acquire("first", 10.0)
    assert epoch is not None
    assert connections().acquire("second", 10.0) is None
    transport.renew(epoch, "first", 10.0)
    transport.release(epoch)
    assert connections().acquire("second", 10.0) is not None


def test_a_lease_runs_out(transport: Transport, connections: Connect, until: Callable[..., None]) -> None:
    transport.acquire("first", 0.05)
    other = connections()
    until(lambda: other.acquire("second", 10.0), "the lease to run out")


def test_events_are_read_from_any_place(transport: Transport) -> None:
    epoch = served(transport)
    assert transport.last_event() == START
    transport.announce(epoch, Call(1, 0))
    after_first = transport.last_event()
    transport.announce(epoch, Resume(1, epoch))
    assert [event for _, event in transport.events(START, 0.0)] == [Call(1, 0), Resume(1, epoch)]
    assert [event for _, event in transport.events(after_first, 0.0)] == [Resume(1, epoch)]
    assert transport.events(transport.last_event(), 0.0) == []
    assert transport.events(transport.last_event(), 0.02) == []


def test_events_wait_for_the_first(transport: Transport, connections: Connect) -> None:
    epoch = served(transport)
    caller = threading.Timer(0.05, lambda: transport.announce(epoch, Call(1, 0)))
    caller.start()
    found = connections().events(START, 10.0)
    caller.join()
    assert [event for _, event in found] == [Call(1, 0)]


def test_heartbeats_replace_each_other(transport: Transport, connections: Connect) -> None:
    transport.heartbeat(samples.heartbeat("b"))
    transport.heartbeat(samples.heartbeat("a", steps=1))
    transport.heartbeat(samples.heartbeat("a", steps=2, state="left"))
    first, second = connections().presences()
    assert first.heartbeat == samples.heartbeat("a", steps=2, state="left")
    assert second.heartbeat.island == "b"
    assert 0.0 <= first.age_seconds < 5.0


def test_nobody_gets_the_same_shard(transport: Transport, connections: Connect) -> None:
    other = connections()
    assert [transport.claim_shard(), other.claim_shard(), transport.claim_shard()] == [0, 1, 2]


def test_evaluations_are_kept_in_order(transport: Transport) -> None:
    for n in range(3):
        transport.evaluated(Evaluation(n, n, 10 * n, 1.7e9, 5.0 - n))
    assert [e.bits_per_byte for e in transport.evaluations()] == [5.0, 4.0, 3.0]


def test_the_tape_gives_its_end(transport: Transport) -> None:
    epoch = served(transport)
    for round_number in (1, 3, 5):
        transport.commit(epoch, samples.commit([], round_number=round_number))
    assert [entry.round for entry in transport.tape(2)] == [3, 5]


def test_a_fresh_run_has_nothing(transport: Transport) -> None:
    assert transport.merger_state() == ""
    assert transport.outer(0) == b""
    assert transport.books() == Books()
    assert transport.tape(5) == []
    assert transport.presences() == []
    assert transport.updates(0.0) == []
    assert isinstance(transport.fragment(1)[0], Snapshot)
