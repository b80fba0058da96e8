"""What every transport promises about contributions, and about the rounds that merge or refuse them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archipelago.broker.commits import DIFFERENCES_KEPT, START
from archipelago.broker.errors import BrokerError
from archipelago.broker.messages import Counters, Refusal
from archipelago.broker.transport import Transport
from tests import samples
from tests.contract.transports import BOTH_SIZES, Connect, everywhere, gone, publish, small
from tests.samples import LARGE, REFUSAL, with_payloads


@everywhere
@BOTH_SIZES
def test_contributions_arrive_in_order_and_once(transport: Transport, connections: Connect, payload: bytes) -> None:
    island = connections()
    sent = [samples.contribution(payload, sequence=n) for n in range(3)]
    for contribution in sent:
        island.island.publish(contribution, payload)
    found = with_payloads(transport.merger.updates(0.0))
    assert [delivery.contribution for delivery in found] == sent
    assert [delivery.payload for delivery in found] == [payload] * 3
    assert transport.merger.updates(0.0) == []
    assert transport.reader.backlog() == 3
    assert transport.reader.counters() == Counters(published=3, published_tokens=300)


@everywhere
def test_an_entry_in_the_name_of_another_island_has_a_fault(transport: Transport, epoch: int) -> None:
    entry = samples.forge(transport, "mallory", samples.contribution(sequence=7), b"payload")
    (delivery,) = transport.merger.updates(0.0)
    assert (delivery.entry, delivery.sender, delivery.contribution) == (entry, "mallory", None)
    assert delivery.fault
    assert samples.pending(transport) == (1, 0)
    samples.refuse(transport, epoch, [(entry, Refusal("mallory", "?", 0, 0, 0, 0, delivery.fault))])
    assert (transport.reader.counters().refused, transport.reader.counters().refused_tokens) == (1, 0)
    assert transport.reader.counters().published == 1


def test_each_island_is_read_equally_and_by_arrival(transport: Transport, connections: Connect) -> None:
    for island in ("b", "b", "b", "b", "a"):
        transport.island.publish(samples.contribution(island=island), b"payload")
    found = transport.merger.updates(0.0, count=2)
    assert sorted(delivery.sender for delivery in found) == ["a", "b", "b"]
    assert [delivery.sender for delivery in transport.merger.updates(0.0, count=2)] == ["b", "b"]
    assert transport.merger.updates(0.0) == []
    transport.merger.rewind()
    for again in (transport, connections()):
        assert sorted(delivery.sender for delivery in again.merger.updates(0.0)) == list("abbbb")


@everywhere
@BOTH_SIZES
def test_a_commit_changes_everything_at_once(
    transport: Transport, connections: Connect, epoch: int, payload: bytes
) -> None:
    first, entry, third = publish(transport, 3, payload)
    assert transport.island.holds(entry)
    deliveries = transport.merger.updates(0.0)
    assert [delivery.entry for delivery in deliveries] == [first, entry, third]
    commit = samples.commit([entry], payload, own=payload + b"!")
    transport.merger.commit(epoch, commit)
    other = connections()
    assert other.reader.fragment(0) == (commit.snapshot, payload)
    assert other.merger.outer(0, 1) == payload + b"!"
    assert other.reader.merger_state() == commit.state
    assert other.reader.tape(10) == [commit.tape]
    assert [event for _, event in other.reader.events(START, 0.0)] == [commit.snapshot]
    assert other.reader.backlog() == 2
    assert not other.island.holds(entry)
    other.merger.rewind()
    assert other.merger.updates(0.0) == [deliveries[0], deliveries[2]], "the others survive a restart"
    assert other.reader.counters() == Counters(3, 300, 1, 100, 0, 0, 7)


def test_a_newer_snapshot_replaces_the_older_one(transport: Transport, epoch: int) -> None:
    first = samples.first_snapshots(transport.reader.manifest())
    assert transport.reader.heads() == [snapshot for snapshot, _ in first]
    transport.merger.commit(epoch, samples.commit([], LARGE, 1))
    newer = samples.commit([], LARGE[::-1], 3)
    transport.merger.commit(epoch, newer)
    assert transport.reader.fragment(0) == (newer.snapshot, LARGE[::-1])
    assert transport.reader.heads() == [newer.snapshot, first[1][0]]
    transport.merger.commit(epoch, samples.commit([], round_number=5))
    assert [entry.round for entry in transport.reader.tape(2)] == [3, 5]


@everywhere
def test_a_refusal_is_an_event_and_ends_the_contribution(
    transport: Transport, connections: Connect, epoch: int
) -> None:
    kept, refused = publish(transport, 2)
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([kept]))
    last = transport.reader.last_event()
    samples.refuse(transport, epoch, [(refused, REFUSAL)])
    other = connections()
    assert [other.island.holds(entry) for entry in (kept, refused)] == [False, False]
    assert other.reader.counters() == Counters(2, 200, 1, 100, 1, 100, 14)
    assert [event for _, event in other.reader.events(last, 0.0)] == [REFUSAL]
    assert (other.reader.backlog(), other.merger.updates(0.0)) == (0, [])


@BOTH_SIZES
def test_a_repeat_that_is_refused_leaves_the_first_one(
    transport: Transport, connections: Connect, epoch: int, payload: bytes
) -> None:
    for _ in range(2):
        transport.island.publish(samples.contribution(payload), payload)
    first, second = transport.merger.updates(0.0)
    samples.refuse(transport, epoch, [(second.entry, REFUSAL)])
    (waiting,) = connections().merger.updates(0.0)
    assert (waiting.entry, waiting.with_payload().payload) == (first.entry, payload)


def test_a_commit_that_does_not_follow_the_last_round_is_refused(transport: Transport, epoch: int) -> None:
    """Redis may have restarted without its newest writes. The merger notices this at its next commit."""
    transport.merger.commit(epoch, samples.commit([], after_round=0))
    with pytest.raises(BrokerError):
        transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=2))
    assert [entry.round for entry in transport.reader.tape(9)] == [1]
    transport.merger.commit(epoch, samples.commit([], round_number=3, after_round=1))


def test_a_commit_of_a_lost_contribution_changes_nothing(transport: Transport, epoch: int) -> None:
    """Someone may have deleted it by hand. The merger loads the run again."""
    entry, waiting = publish(transport, 2)
    samples.refuse(transport, epoch, [(entry, REFUSAL)])
    before = transport.reader.counters()
    with pytest.raises(BrokerError):
        transport.merger.commit(epoch, samples.commit([entry, waiting]))
    assert (transport.reader.tape(9), transport.reader.counters()) == ([], before)
    assert transport.island.holds(waiting)


# -- merged entries, until a checkpoint covers them ---------------------------------------------------------------


@BOTH_SIZES
def test_merged_entries_can_be_read_until_they_are_trimmed(
    transport: Transport, connections: Connect, epoch: int, payload: bytes
) -> None:
    entries = publish(transport, 3, payload)
    found = with_payloads(transport.merger.updates(0.0))
    transport.merger.commit(epoch, samples.commit(entries[:2]))
    other = connections()
    assert other.merger.read(entries[::-1]) == found[::-1]  # The order is that of the argument.
    assert (other.reader.backlog(), samples.pending(other)) == (1, (1, 100))
    transport.merger.trim(epoch, entries)
    assert other.merger.read(entries) == [gone(entries[0]), gone(entries[1]), found[2]]  # Pending entries stay.
    assert [other.island.holds(entry) for entry in entries] == [False, False, True]
    assert (other.reader.backlog(), samples.pending(other)) == (1, (1, 100))
    assert with_payloads(other.merger.updates(0.0)) == [found[2]]
    transport.merger.trim(epoch, entries)
    assert other.reader.counters() == Counters(3, 300, 2, 200, 0, 0, 14)


@everywhere
def test_a_commit_trims_covered_entries(transport: Transport, epoch: int) -> None:
    first, second, third, fourth = publish(transport, 4, LARGE)
    waiting = transport.merger.updates(0.0)[3]
    transport.merger.commit(epoch, samples.commit([first, second]))
    transport.merger.commit(epoch, samples.commit([third], round_number=3, trim=[first, third, fourth]))
    assert [not found.fault for found in transport.merger.read([first, second, third, fourth])] == [0, 1, 0, 1]
    transport.merger.rewind()
    assert transport.merger.updates(0.0) == [waiting]


def test_pending_counts_contributions_and_tokens(transport: Transport, connections: Connect, epoch: int) -> None:
    for n in range(5):
        transport.island.publish(samples.contribution(sequence=n, tokens=10**n), b"payload")
    merged, refused, *_ = transport.merger.updates(0.0, count=3)  # Two more entries were never read.
    transport.merger.commit(epoch, samples.commit([merged.entry]))
    samples.refuse(transport, epoch, [(refused.entry, REFUSAL)])
    assert samples.pending(connections()) == (3, 11100)
    assert connections().reader.backlog() == 3


# -- differences and compactions -----------------------------------------------------------------------------------


def test_each_version_has_its_difference_to_the_previous_one(
    transport: Transport, connections: Connect, epoch: int
) -> None:
    assert transport.reader.difference(0, 1) is None
    for number, difference in ((1, b"one"), (3, LARGE), (5, b"")):
        transport.merger.commit(epoch, samples.commit([], round_number=number, difference=difference))
    other = connections()
    assert [other.reader.difference(0, version) for version in (1, 2, 3)] == [b"one", LARGE, None]
    assert other.reader.difference(1, 1) is None
    for version in range(4, DIFFERENCES_KEPT + 5):
        transport.merger.commit(epoch, samples.commit([], round_number=2 * version - 1, difference=b"%d" % version))
    kept = [version for version in range(1, DIFFERENCES_KEPT + 6) if other.reader.difference(0, version) is not None]
    assert kept == list(range(5, DIFFERENCES_KEPT + 5)), "only the newest ones are kept"


@everywhere
def test_a_compaction_covers_the_versions_up_to_its_own(transport: Transport, connections: Connect, epoch: int) -> None:
    (entry,) = publish(transport, 1)
    transport.merger.updates(0.0)
    first, other = transport.reader.fragment(0), connections()
    commit = replace(small(1, difference=b"one", after_round=0), entries=[entry])
    transport.merger.commit(epoch, commit)
    assert (other.reader.heads()[0], other.reader.fragment(0)) == (commit.snapshot, first), "it has no full state"
    transport.merger.commit(epoch, small(3, difference=LARGE))
    transport.merger.commit(epoch, small(5, difference=b"three"))
    full = samples.commit([], LARGE, 3).compaction
    assert full is not None
    placed = transport.merger.place(epoch, full)
    assert other.reader.fragment(0)[0].version == 0
    with pytest.raises(BrokerError):
        transport.merger.compact(epoch, placed, after_round=3)
    transport.merger.compact(epoch, placed, after_round=5, trim=[entry])
    assert other.reader.fragment(0) == (full.snapshot, LARGE)
    assert other.merger.outer(0, 2) == full.outer
    assert [other.reader.difference(0, version) for version in (1, 2, 3)] == [b"one", LARGE, b"three"]
    assert other.merger.read([entry])[0].contribution is None
    assert other.reader.heads()[0] == small(5).snapshot
