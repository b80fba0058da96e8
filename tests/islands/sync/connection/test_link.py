"""The link of an island without threads: joining, events and snapshots in order, outages, and the broker's memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import WireError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Event
from archipelago.broker.transport import MEMORY_SHARE_MAX, Memory
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.inbox import EVENTS_AT_ONCE, EVENTS_KEPT
from archipelago.islands.sync.connection.link import Link
from tests import samples
from tests.failing import failing
from tests.islands.sync.connection.link_run import SIZE, FaultyTransport, Harness, arrived, ranges_of, received, send
from tests.sharded import create_sharded


def test_join_returns_all_fragments_and_a_position_in_the_stream(harness: Harness) -> None:
    harness.call(1)
    closed = harness.close(1, 7.0)
    link = harness.new_link()
    first, second = link.join()
    assert (first.snapshot, first.params_N.tolist()) == (closed, [7.0] * SIZE)
    assert (second.snapshot.version, second.params_N.tolist()) == (0, [0.0] * SIZE)
    later = harness.call(2)
    link.pump()
    assert received(link) == ([later], [])
    link.beat(samples.heartbeat(bytes_down=link.uplink.bytes_down))
    link.pump()
    assert link.uplink.bytes_down == sum(p.heartbeat.bytes_down for p in harness.transport.reader.presences())


def test_an_island_tells_the_mergers_what_it_cannot_read_while_it_joins(harness: Harness) -> None:
    link, lost = harness.new_link(), harness.stored.fragments.pop(0)
    harness.transport.island.heartbeat(samples.heartbeat("a", incarnation="before", steps=70, bytes_down=9))
    for _ in range(2):
        with failing(WireError, "wire.fragment"):
            link.join()
    (presence,) = harness.transport.reader.presences()
    assert presence.is_live and presence.unreadable == {0} and presence.heartbeat.incarnation == "x"
    beat = presence.heartbeat
    assert (beat.steps, beat.bytes_down) == (70, 9), "the totals of earlier incarnations stay"
    harness.stored.fragments[0] = lost
    assert [arrival.snapshot.fragment for arrival in link.join()] == [0, 1]
    assert harness.faulty.calls["fragment"] == 4, "what was read is not read again"


def test_no_shard_is_read_twice_while_an_island_joins() -> None:
    run = create_sharded(MemoryBroker().connect("sample"))
    run.shards = first, second = [FaultyTransport(shard) for shard in run.shards]
    manifest = run.reader.manifest()
    link = Link(run, manifest, "a/x", ranges_of(manifest))
    first.damaged_fragments, second.damaged_fragments = 2, 1
    for told in ({0, 1}, {0}):
        with pytest.raises(WireError, match="fragment 0"):
            link.join()
        assert [shard.reader.presences()[0].unreadable for shard in run.shards] == [told, told]
    assert [arrival.snapshot.fragment for arrival in link.join()] == [0, 1]
    assert (first.calls["fragment"], second.calls["fragment"]) == (3, 2)


def test_no_event_during_a_join_is_missed(harness: Harness) -> None:
    link = harness.new_link()
    harness.faulty.after["fragment"] = lambda: harness.close(1, 5.0)
    link.join()
    link.pump()
    events, (arrival,) = received(link)
    assert [event.round for event in events] == [1]
    assert arrival.params_N.tolist() == [5.0] * SIZE


def test_events_arrive_in_order_with_only_the_newest_snapshot_of_each_fragment(harness: Harness) -> None:
    link = harness.link()
    happened: list[Event] = [harness.call(1), harness.close(1, 1.0)]
    link.pump()  # The training thread takes nothing.
    happened += [harness.close(2, 2.0), harness.close(3, 3.0)]
    link.pump()
    events, arrivals = received(link)
    assert events == happened
    assert {a.snapshot.round: a.params_N[0] for a in arrivals} == {3: 3.0, 2: 2.0}
    assert received(link) == ([], [])


def test_a_loop_that_does_not_sync_keeps_a_bounded_number_of_events(harness: Harness) -> None:
    link = harness.link()
    for _ in range(EVENTS_KEPT + 2 * EVENTS_AT_ONCE):
        harness.resume(0)
    harness.close(1, 1.0)
    for _ in range(EVENTS_KEPT // EVENTS_AT_ONCE + 4):
        link.pump_receive()
    events, arrivals = received(link)
    assert (len(events), arrivals) == (EVENTS_KEPT, [])
    while not (found := arrived(link)):
        link.pump_receive()
    assert found == {1: 1.0}


def test_few_arrivals_wait_on_the_device(harness: Harness) -> None:
    """The training thread may not sync for long, and the device may have no room."""
    link, prepared = harness.link(), list[int]()

    def prepare(p: int, params_N: Vector) -> Any:
        prepared.append(p)
        if p:
            raise RuntimeError("out of memory")
        return jnp.asarray(params_N)

    link.channels[0].inbox.prepare = prepare
    harness.close(1, 1.0)
    harness.close(2, 2.0)
    link.pump_receive()
    assert prepared == [0, 1]
    harness.close(3, 3.0)
    link.pump_receive()
    assert prepared == [0, 1]
    kinds = {a.snapshot.round: (type(a.params_N) is np.ndarray, float(a.params_N[0])) for a in received(link)[1]}
    assert kinds == {2: (True, 2.0), 3: (True, 3.0)}
    harness.close(5, 5.0)
    link.pump_receive()
    assert prepared == [0, 1, 0]
    (arrival,) = received(link)[1]
    assert type(arrival.params_N) is not np.ndarray and arrival.params_N[0] == 5.0


def test_events_are_read_between_the_differences_of_several_fragments(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thin link, even a difference may take longer than a round."""
    link, read = harness.link(), list[int]()
    inbox = link.channels[0].inbox

    def by_differences(p: int) -> Arrival:
        read.append(harness.faulty.calls["events"])
        return inbox._fetched_whole(p)

    monkeypatch.setattr(inbox, "_by_differences", by_differences)
    harness.close(1, 1.0)
    harness.close(2, 2.0)
    link.pump_receive()
    first, second = read
    assert second == first + 1
    assert harness.faulty.calls["events"] == second, "the next pump reads them"


def test_a_snapshot_waits_for_all_earlier_events(harness: Harness) -> None:
    """A download gives the newest snapshot, which may be newer than all processed events."""
    link = harness.link()

    def close_two() -> None:
        harness.close(2, 2.0)
        harness.close(3, 3.0)

    harness.close(1, 1.0)
    harness.faulty.before["fragment"] = close_two
    before = harness.faulty.calls["fragment"]
    link.pump_receive()
    events, arrivals = received(link)
    assert ([event.round for event in events], arrivals) == ([1], [])
    link.pump_receive()
    events, arrivals = received(link)
    assert [event.round for event in events] == [2, 3]
    assert {a.snapshot.round: a.params_N[0] for a in arrivals} == {2: 2.0, 3: 3.0}
    assert harness.faulty.calls["fragment"] - before == 2, "the early snapshot was kept"


def test_a_damaged_snapshot_is_fetched_again(harness: Harness) -> None:
    link = harness.link()
    harness.close(1, 1.0)
    harness.faulty.damaged_fragments = 1
    with failing(WireError, "wire.snapshot"):
        link.pump_receive()
    events, arrivals = received(link)
    assert (len(events), arrivals) == (1, [])
    link.pump_receive()
    assert arrived(link) == {1: 1.0}
    had = link.uplink.bytes_down
    link.pump_receive()
    assert (received(link), link.uplink.bytes_down) == (([], []), had)  # and only once


def test_a_snapshot_that_cannot_be_read_holds_up_no_other_one(harness: Harness) -> None:
    link = harness.link()
    harness.close(1, 1.0)
    harness.close(2, 2.0)
    harness.faulty.damaged_fragments = 1
    with failing(WireError, "wire.snapshot"):
        link.pump_receive()
    assert arrived(link) == {2: 2.0}


def test_an_island_follows_a_broker_that_went_back(harness: Harness) -> None:
    """Later snapshots would be mistaken for those of the new rounds with the same numbers."""
    link = harness.link()
    kept = [harness.transport.reader.fragment(p) for p in range(2)]
    for number in (1, 2, 3):
        harness.close(number, float(number))
    link.pump()  # The training thread takes nothing.
    harness.stored.fragments = dict(enumerate(kept))
    resume = harness.resume(0)
    harness.faulty.damaged_fragments = 2
    with failing(WireError, "wire.snapshot"):
        link.pump_receive()
    events, arrivals = received(link)
    assert (events[-1], arrivals) == (resume, [])
    link.pump_receive()
    assert [(a.snapshot.version, a.params_N[0]) for a in received(link)[1]] == [(0, 0.0), (0, 0.0)]


def test_an_island_sends_nothing_to_a_broker_that_is_nearly_full(harness: Harness) -> None:
    link = harness.link()
    link.beat(samples.heartbeat())
    harness.faulty.room = Memory(int(MEMORY_SHARE_MAX * 1000) + 1, 1000)
    send(link, 1, 2)
    assert (harness.published(), link.backlog) == ([], 2)
    assert link.pumps.trouble
    assert harness.transport.reader.presences()  # everything else continues
    harness.faulty.room = Memory(int(MEMORY_SHARE_MAX * 1000), 1000)
    link.pump()
    assert harness.rounds() == [1, 2]
    assert (link.backlog, link.pumps.trouble) == (0, "")
    harness.faulty.room = Memory(1 << 60, 0)  # no limit
    send(link, 3)
    assert link.backlog == 0
