"""Contributions until the merger has decided: what is sent again, what a checkpoint needs, and what is kept merged."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from archipelago.broker.config import WireConfig
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Resume
from archipelago.islands.sync.connection.inbox import INSTANCE_SECONDS, LOST_SECONDS
from archipelago.islands.sync.connection.outbox import KEPT_BYTES_MAX, KEPT_MIN, KEPT_SECONDS, Outbox, Sent
from archipelago.islands.sync.measures import PACKED_SECONDS_A_BYTE, Uplink
from tests import samples
from tests.islands.sync.connection.link_run import Harness, draft, raising, received, send, unresolved


def test_a_contribution_is_unresolved_until_it_is_merged_or_refused(harness: Harness) -> None:
    link = harness.link()
    for number in (1, 2, 3):
        link.send(draft(number))
        assert unresolved(link) == set(range(1, number + 1))  # including queued ones
    link.pump()
    first, second, third = harness.published()
    harness.close(1, 1.0, first)
    harness.refuse(third)
    link.pump()
    assert unresolved(link) == {2}
    harness.close(2, 1.0)  # the contribution was not merged, so it waits for a later round
    link.pump()
    assert unresolved(link) == {2}
    harness.transport.island.publish(second, b"again")
    harness.refuse(second, repeat=True)  # the first one still waits
    link.pump()
    assert unresolved(link) == {2}
    harness.close(4, 1.0, second)
    link.pump()
    assert unresolved(link) == set()


def test_lost_contributions_are_sent_again_once_when_a_merger_resumes(harness: Harness) -> None:
    link = harness.link()
    send(link, 1, 2, 3)
    first, lost, _ = harness.deliveries()
    harness.close(1, 1.0, first.contribution)
    harness.forget(lost.entry)
    link.pump()
    assert harness.rounds() == [3]
    harness.resume(1)
    link.pump()
    assert harness.rounds() == [3, 2]
    assert harness.deliveries()[1].contribution == lost.contribution
    assert harness.deliveries()[1].payload == lost.payload
    harness.resume(1)
    link.pump()
    assert len(harness.deliveries()) == 2


def test_a_contribution_that_someone_deleted_from_the_stream_is_sent_again(harness: Harness) -> None:
    link = harness.link()
    send(link, 1, 2)
    harness.forget(harness.deliveries()[0].entry)
    link.pump()
    assert harness.rounds() == [2]
    harness.ahead += LOST_SECONDS
    link.pump()
    assert harness.rounds() == [2, 1]


def test_a_contribution_that_is_merged_just_now_is_not_sent_again(harness: Harness) -> None:
    """Its round closes after the island has read the announcements, and before it looks into the stream."""
    link = harness.link()
    send(link, 1, 2)
    first = harness.deliveries()[0]
    harness.faulty.before["holds"] = lambda: harness.close(1, 1.0, first.contribution)
    harness.ahead += LOST_SECONDS
    link.pump()
    assert harness.rounds() == [2]


@pytest.mark.parametrize("is_other", [False, True], ids=["lost", "another one closed"])
def test_contributions_of_a_round_that_the_broker_has_lost_are_sent_again(harness: Harness, is_other: bool) -> None:
    """A failover forgot the newest two commits, and one of the contributions that they had merged.

    Or two primaries were in use for a while, and the one that stayed has closed other rounds of the same numbers.
    """
    link = harness.link()
    send(link, 1, 2, 3)
    for number, delivery in enumerate(deliveries := harness.deliveries(), 1):
        harness.close(number, float(number), delivery.contribution)
    link.pump()
    assert unresolved(link) == set()
    harness.lose_rounds(1)
    harness.forget(deliveries[1].entry)
    if is_other:
        harness.close(2, 3.0)
        harness.close(3, 3.0)
    harness.resume(3 if is_other else 1)
    link.pump()
    assert harness.rounds() == [3, 2], "the third waits again, whose merge it has lost"
    assert unresolved(link) == {2, 3}
    harness.resume(3 if is_other else 1)
    link.pump()
    assert harness.rounds() == [3, 2]


@pytest.mark.parametrize("is_another", [True, False])
def test_an_island_notices_another_primary_by_itself(harness: Harness, is_another: bool) -> None:
    """It has read announcements of the old one that are newer than the return to a round that the new one announced."""
    harness.broker.instance = "old"
    link = harness.link()
    send(link, 1)
    (sent,) = harness.deliveries()
    harness.forget(sent.entry)
    harness.broker.instance = "new" if is_another else "old"
    harness.ahead += INSTANCE_SECONDS + 1.0
    link.pump()
    assert harness.published() == ([sent.contribution] if is_another else [])
    assert received(link)[0] == ([Resume(0, 0)] if is_another else [])


@pytest.mark.parametrize("refused", [False, True])
def test_a_decided_contribution_is_not_sent_again_after_an_error(harness: Harness, refused: bool) -> None:
    link = harness.link()
    harness.faulty.after["publish"] = raising(UnreachableError("the connection broke"))
    send(link, 1, 2)
    assert link.backlog == 2
    assert unresolved(link) == {1, 2}
    (sent,) = harness.published()
    if refused:
        harness.refuse(sent)
    else:
        harness.close(1, 1.0, sent)
    link.pump_receive()
    link.pump()
    assert (link.backlog, link.uplink.contributions) == (0, 2)
    assert harness.rounds() == [2]
    assert unresolved(link) == {2}


def test_only_first_attempts_measure_the_link(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry goes on where the first attempt broke off, so it sends fewer bytes than the payload has."""
    link, measured = harness.link(), list[int]()
    monkeypatch.setattr(link.uplink, "sent", lambda size, seconds: measured.append(size))
    harness.faulty.before["publish"] = raising(UnreachableError("the connection broke"))
    send(link, 1)
    link.pump()
    assert (harness.rounds(), measured) == ([1], [])
    send(link, 2)
    assert (harness.rounds(), len(measured)) == ([1, 2], 1)


def test_payloads_are_not_compressed_for_a_fast_link(harness: Harness) -> None:
    link = harness.link()
    for number, factor in ((1, 0.0), (2, 0.5), (3, 2.0)):
        link.uplink.seconds_a_byte = factor * PACKED_SECONDS_A_BYTE
        send(link, number)
    assert [b"zstd\xc3" in delivery.payload for delivery in harness.deliveries()] == [True, False, True]


# -- merged contributions ------------------------------------------------------------------------------------------


class Kept:
    """An outbox whose contributions the test lets be merged."""

    def __init__(self) -> None:
        self.now = 0.0
        self.outbox = Outbox(cast(Any, None), WireConfig(), Uplink(), lambda: self.now, threading.Condition(), [])

    def merge(self, number: int, now: float = 0.0, payload: bytes = b"12") -> None:
        """Let a contribution of that number be merged in the round of that number."""
        self.now = now
        self.outbox._sent[str(number)] = Sent(samples.contribution(round=number), str(number), payload)
        self.outbox.merged({str(number)}, number)

    def undone(self, closed: int, tape: Mapping[int, set[str]]) -> list[int]:
        """Take back what no round has merged, and return the numbers."""
        before = {sent.identity for sent in self.outbox._undecided()}
        self.outbox.undo(closed, tape)
        return [int(sent.identity) for sent in self.outbox._undecided() if sent.identity not in before]


def test_all_rounds_of_the_last_seconds_are_kept() -> None:
    """A failover may forget many rounds of a fast run."""
    kept = Kept()
    for number in range(1, 1001):
        kept.merge(number, 0.01 * number)
    assert kept.outbox.first_merged_round == 1
    on_tape = {number: {str(number)} for number in range(501)}
    assert kept.undone(500, on_tape) == list(range(501, 1001))
    assert kept.undone(500, on_tape) == []
    kept.merge(1001, KEPT_SECONDS + 4.005)
    assert kept.undone(-1, {}) == [*range(401, 501), 1001]


def test_slow_rounds_and_large_payloads_are_kept_by_number() -> None:
    kept = Kept()
    for number in range(1, 21):
        kept.merge(number, KEPT_SECONDS * 2 * number)
    assert kept.undone(-1, {}) == list(range(21 - KEPT_MIN, 21))
    for number in range(21, 41):
        kept.merge(number, KEPT_SECONDS * 50, bytes(KEPT_BYTES_MAX // 8))
    assert kept.undone(-1, {}) == list(range(33, 41)), "more bytes are not kept"


def test_what_another_round_of_the_same_number_has_not_merged_is_undone() -> None:
    kept = Kept()
    for number in (6, 7, 8, 9, 10):
        kept.merge(number)
    # Round 7 is not on the tape any more, round 8 has merged another one, and 9 was merged earlier than before.
    assert kept.undone(9, {6: {"6"}, 8: {"9"}, 9: {"x"}}) == [8, 10]
    assert kept.outbox.first_merged_round == 6
