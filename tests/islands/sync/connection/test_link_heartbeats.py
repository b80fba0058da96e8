"""What a link does with each heartbeat: leases ranges ahead, answers newcomers, and notices that its name is taken."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.ranges import ReadPosition
from archipelago.islands.sync.connection.heartbeats import FRESH_SECONDS, REMIND_SECONDS
from archipelago.islands.sync.connection.link import Link
from tests import samples
from tests.islands.sync.connection.link_run import Harness, heartbeat, raising, ranges_of

RANGES = ranges_of(samples.manifest())

# -- ranges --------------------------------------------------------------------------------------------------------


def test_a_lost_lease_is_reported_once(harness: Harness) -> None:
    link = harness.link()
    heartbeat(link)
    position = link.lease()
    assert position is not None
    heartbeat(link)
    harness.stored.holders[position.range] = "b/y"
    heartbeat(link)
    assert link.leases.take_lost() == {position.range}
    heartbeat(link)  # the loss is detected again before the island stops holding the range
    link.leases.hold([])
    heartbeat(link)
    assert link.leases.take_lost() == frozenset()


def test_an_island_that_finds_no_range_skips_looks(harness: Harness) -> None:
    link = harness.link(ranges=["3"])
    heartbeat(link)
    harness.stored.holders["3"] = "b/y"
    harness.transport.island.heartbeat(samples.heartbeat("b", incarnation="y"))
    asked: list[int] = []
    for look in range(1, 31):
        if look == 18:
            harness.stored.holders.clear()
        before = harness.faulty.calls["lease_range"]
        heartbeat(link)
        asked += [look] * (harness.faulty.calls["lease_range"] - before)
    assert asked == [1, 2, 4, 7, 11, 16, 22], "a range was found in the end"
    assert link.lease() == ReadPosition("3", 0, 0)


# -- newcomers ------------------------------------------------------------------------------------------------------

MOMENTS = {"mu": jnp.asarray([1.5, -2.25], jnp.float32), "count": jnp.asarray(3, jnp.int32)}


def ask(harness: Harness, who: str = "new/z") -> None:
    island, _, incarnation = who.partition("/")
    harness.transport.island.heartbeat(samples.heartbeat(island, "joining", incarnation=incarnation))
    harness.transport.island.request_state(who)


def test_one_other_peer_that_trains_promises_an_answer_and_is_asked_once(harness: Harness) -> None:
    links = [harness.link("a/x"), harness.link("b/y")]
    ask(harness, "a/x")
    heartbeat(links[0])  # It does not answer itself.
    ask(harness)
    heartbeat(links[1], "joining")
    stateless = harness.link("c/w")
    stateless.giver.is_willing = False
    heartbeat(stateless)
    assert stateless.giver.take() == []
    assert [link.giver.take() for link in links] == [[], []]
    assert harness.transport.island.open_requests() == ["a/x", "new/z"]
    harness.transport.island.withdraw_request("a/x")
    links[0].pump_handovers()  # A request is read between two heartbeats, too.
    assert links[0].giver.take() == ["new/z"]
    for link in (*links, *links):
        heartbeat(link)
    assert [link.giver.take() for link in links] == [[], []]


def test_a_promise_whose_reply_is_lost_is_kept(harness: Harness) -> None:
    link = harness.link()
    link.beat(samples.heartbeat())
    ask(harness)
    harness.faulty.after["promise_answer"] = raising(UnreachableError("connection reset"))
    link.pump()
    link.pump()
    assert link.giver.take() == ["new/z"]


def test_a_flood_of_requests_costs_two_copies_at_a_time_and_one_for_each(harness: Harness) -> None:
    link = harness.link("giver/x")
    link.beat(samples.heartbeat("giver"))
    for number in range(6):
        ask(harness, f"new-{number}/z")
    asked: list[str] = []
    for _ in range(10):
        link.pump()
        found = link.giver.take()
        assert len(found) <= 2
        asked += found
        for who in found:  # its request is withdrawn and made again
            harness.transport.island.withdraw_request(who)
            harness.transport.island.request_state(who)
    assert sorted(asked) == [f"new-{number}/z" for number in range(6)]


def test_a_loop_of_short_steps_describes_itself_now_and_then(harness: Harness) -> None:
    now = [100.0]
    link = Link(harness.transport, harness.manifest, "a/x", (), lambda: now[0])
    assert link.heartbeats.wants("training")
    link.beat(samples.heartbeat(state="training"))
    now[0] += FRESH_SECONDS / 2
    assert not link.heartbeats.wants("training")
    assert link.heartbeats.wants("leaving")
    now[0] += FRESH_SECONDS
    assert link.heartbeats.wants("training")


# -- the name, and the merger --------------------------------------------------------------------------------------


def test_a_link_writes_a_lost_claim_again(harness: Harness) -> None:
    link = harness.link()
    link.beat(samples.heartbeat())
    harness.stored.names.clear()
    link.pump()
    assert not link.heartbeats.is_replaced
    assert harness.stored.names["a"].incarnation == "x"


def test_a_missing_merger_is_said_now_and_then_until_the_run_is_over(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    link = harness.link()
    assert link.heartbeats.serving.is_served
    harness.transport.merger.release(harness.epoch)

    def said() -> int:
        return sum(getattr(record, "code", "") == "island.no-merger" for record in caplog.records)

    heartbeat(link)
    assert (link.heartbeats.serving.is_served, said()) == (False, 0), "its lease may have expired in an outage"
    for count in (1, 2):
        harness.ahead += 2 * REMIND_SECONDS
        for _ in range(2):
            heartbeat(link)
            assert (link.heartbeats.serving.is_served, said()) == (False, count)
    harness.ahead += 2 * REMIND_SECONDS
    heartbeat(link, "leaving")
    assert said() == 2, "it does not train on"
    link.channels[0].inbox.step = link.heartbeats.run_steps
    heartbeat(link)
    assert said() == 2
    assert not [record for record in caplog.records if record.message.startswith("a merger serves")]
