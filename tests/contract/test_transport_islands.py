"""What every transport promises to islands: leases, names, and answers to each other."""

from __future__ import annotations

from functools import partial

from archipelago.broker.ranges import ReadPosition
from archipelago.broker.transport import Transport
from tests import samples
from tests.conftest import Until
from tests.contract.transports import BOTH_SIZES, Connect, everywhere, live, publish, together
from tests.samples import LARGE, REFUSAL

# -- leases on data and on evaluating -----------------------------------------------------------------------------


@everywhere
def test_no_two_islands_lease_the_same_range(transport: Transport, connections: Connect) -> None:
    other, ranges = connections(), ["0", "1", "2"]
    live(transport, "a", "b")
    assert transport.island.lease_range(ranges, "a/x") == ReadPosition("0", 0, 0)
    assert other.island.lease_range(ranges, "b/x") == ReadPosition("1", 0, 0)
    assert other.island.lease_range(["0"], "b/x") is None
    assert transport.island.lease_range(ranges, "a/x") == ReadPosition("0", 0, 0), (
        "a repeated request got another range"
    )
    assert transport.island.lease_range(ranges[1:], "a/x") == ReadPosition("2", 0, 0)
    assert other.island.lease_range(["0", "2"], "b/x") is None
    assert other.island.leased([*ranges, "3"], "a/x") == {"0", "2"}
    assert transport.island.leased(ranges, "b/x") == {"1"}
    assert transport.island.leased(ranges, "a/another") == frozenset()
    assert transport.island.leased([], "a/x") == frozenset()
    assert transport.reader.cursors() == {}


def test_concurrent_leases_do_not_overlap(transport: Transport, connections: Connect) -> None:
    ranges = [str(n) for n in range(8)]
    found: list[str] = []

    def lease(island: Transport, worker: str) -> None:
        leased: list[str] = []
        for _ in range(2):
            place = island.island.lease_range([name for name in ranges if name not in leased], worker)
            leased.append(place.range if place else "none")
        found.extend(leased)

    live(transport, *(f"i{n}" for n in range(4)))
    together(*(partial(lease, connections(), f"i{n}/x") for n in range(4)))
    assert sorted(found) == ranges


@everywhere
def test_a_merged_contribution_moves_the_cursor_and_may_end_the_lease(
    transport: Transport, connections: Connect, epoch: int
) -> None:
    live(transport, "a", "b")
    transport.island.lease_range(["3", "4"], "a/x")
    transport.merger.commit(epoch, samples.commit([], cursors={"3": (0, 96), "4": (0, 8)}))
    assert connections().reader.cursors() == {"3": (0, 96), "4": (0, 8)}
    assert transport.island.leased(["3", "4"], "a/x") == {"3"}
    assert connections().island.lease_range(["3", "4"], "b/y") == ReadPosition("4", 0, 8)
    transport.merger.commit(epoch, samples.commit([], round_number=3, cursors={"3": (1, 0)}))
    assert transport.island.leased(["3"], "a/x") == frozenset(), "its pass over the range has ended"
    assert connections().island.lease_range(["3"], "b/y") == ReadPosition("3", 1, 0)
    transport.merger.commit(epoch, samples.commit([], round_number=5, cursors={"3": (1, 5)}))
    assert transport.island.leased(["3"], "b/y") == {"3"}


def test_a_range_is_released_when_its_holder_has_left_and_is_merged(
    transport: Transport, connections: Connect, epoch: int
) -> None:
    island = connections()
    live(island, "a")
    island.island.lease_range(["0"], "a/x")
    assert transport.island.lease_range(["0"], "b/y") is None
    publish(island, 1)
    island.island.heartbeat(samples.heartbeat(state="left"))
    assert transport.island.lease_range(["0"], "b/y") is None  # Its pending contribution may still move the cursor.
    (delivery,) = transport.merger.updates(0.0)
    assert transport.island.lease_range(["0"], "b/y") is None
    transport.merger.commit(epoch, samples.commit([delivery.entry], cursors={"0": (0, 40)}))
    assert transport.island.lease_range(["0"], "b/y") == ReadPosition("0", 0, 40)
    assert transport.island.leased(["0"], "b/y") == {"0"}
    assert island.island.leased(["0"], "a/x") == frozenset()


def test_a_new_incarnation_takes_over_from_the_old_one(transport: Transport) -> None:
    live(transport, "a", "b")
    transport.island.lease_range(["0", "1", "2"], "b/x")
    transport.island.lease_range(["0", "1", "2"], "a/x")
    transport.island.heartbeat(samples.heartbeat(incarnation="z"))
    assert transport.island.lease_range(["0", "2", "1"], "a/z") == ReadPosition("1", 0, 0)


def test_an_expelled_island_loses_its_ranges_and_gets_no_others(transport: Transport, epoch: int) -> None:
    live(transport, "a", "b")
    assert transport.island.lease_range(["0"], "a/x") == ReadPosition("0", 0, 0)
    transport.reader.steer({"island.a": "drain"})
    assert transport.island.lease_range(["0"], "b/x") is None, "a draining island lost its range"
    publish(transport, 1)
    transport.reader.steer({"island.a": "expel"})
    assert transport.island.lease_range(["1"], "a/x") is None
    assert transport.island.lease_range(["0"], "b/x") is None, "a contribution is still pending"
    samples.refuse(transport, epoch, [(delivery.entry, REFUSAL) for delivery in transport.merger.updates(0.0)])
    assert transport.island.lease_range(["0"], "b/x") == ReadPosition("0", 0, 0)
    assert transport.island.leased(["0"], "a/x") == frozenset()
    transport.reader.steer({"island.a": ""})
    assert transport.island.lease_range(["1"], "a/x") == ReadPosition("1", 0, 0)


def test_the_first_registration_fixes_the_digest_of_a_corpus(transport: Transport, connections: Connect) -> None:
    assert transport.island.register_corpus("site", "1" * 32) == "1" * 32
    assert connections().island.register_corpus("site", "2" * 32) == "1" * 32
    assert connections().island.register_corpus("other", "2" * 32) == "2" * 32
    assert transport.reader.cursors() == {}


@everywhere
def test_one_island_at_a_time_holds_the_lease_on_evaluating(transport: Transport, until: Until) -> None:
    lease = transport.island.lease_evaluation
    assert lease("a/1", 30.0)
    assert lease("a/1", 30.0)
    assert not lease("b/1", 30.0)
    assert not lease("a/1", 0.0)
    until(lambda: lease("b/1", 0.05), "the lease that a has ended")
    until(lambda: lease("a/2", 30.0), "the lease of b to expire")
    assert not lease("b/1", 30.0)


# -- names and answers between islands ----------------------------------------------------------------------------


@everywhere
def test_the_newest_claim_to_a_name_counts(transport: Transport, connections: Connect) -> None:
    other = connections()
    older = transport.island.claim_name("a", "x")
    around = transport.island.look_around("a", older)
    assert (around.claim, around.uid) == (older, transport.reader.uid())
    newer = other.island.claim_name("a", "y")
    assert newer > older
    assert transport.island.look_around("a", older).claim == newer
    assert other.island.look_around("a", newer).claim == newer
    assert transport.island.claim_name("b", "x").incarnation == "x"
    lost = newer._replace(generation=newer.generation + 5)  # as after a restart that lost this claim
    assert other.island.look_around("a", lost).claim == lost
    assert transport.island.look_around("a", newer).claim == lost


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
    assert other.island.open_requests("b/y") == ["a/x"]
    assert other.island.promise_answer("a/x", "b/y"), "it may have missed the reply"
    transport.island.request_state("a/x")  # A repeated request does not open the request again.
    assert other.island.open_requests() == []
    assert not other.island.promise_answer("nobody/x", "b/y")


def test_only_one_island_promises_each_answer(transport: Transport, connections: Connect) -> None:
    requests = [f"a/{n}" for n in range(4)]
    for request in requests:
        transport.island.request_state(request)
    answered: list[str] = []

    def offer(island: Transport, giver: str) -> None:
        answered.extend(request for request in requests if island.island.promise_answer(request, giver))

    together(*(partial(offer, connections(), f"b/{n}") for n in range(4)))
    assert sorted(answered) == requests


@everywhere
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


def test_an_answer_without_a_request_is_dropped(transport: Transport) -> None:
    transport.island.hand_over("a/x", samples.handover(LARGE), LARGE)
    transport.island.request_state("a/x")
    assert transport.island.handed_over("a/x") is None
