"""Contributions until the merger has decided: what is sent again, what a checkpoint needs, and what is kept merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Resume
from archipelago.islands.sync.connection.inbox import INSTANCE_SECONDS, LOST_SECONDS
from archipelago.islands.sync.connection.outbox import KEPT_BYTES_MAX, KEPT_MIN, KEPT_SECONDS, Merged
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
    assert link.channels.backlog == 2
    assert unresolved(link) == {1, 2}
    (sent,) = harness.published()
    if refused:
        harness.refuse(sent)
    else:
        harness.close(1, 1.0, sent)
    link.pump_receive()
    link.pump()
    assert (link.channels.backlog, link.channels[0].outbox.sent) == (0, 2)
    assert harness.rounds() == [2]
    assert unresolved(link) == {2}


def test_only_first_attempts_measure_the_link(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry goes on where the first attempt broke off, so it sends fewer bytes than the payload has."""
    link, measured = harness.link(), list[int]()
    monkeypatch.setattr(link.uplink, "sent", lambda size, began, ended: measured.append(size))
    harness.faulty.before["publish"] = raising(UnreachableError("the connection broke"))
    send(link, 1)
    link.pump()
    assert (harness.rounds(), measured) == ([1], [])
    send(link, 2)
    assert (harness.rounds(), len(measured)) == ([1, 2], 1)


# -- merged contributions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class One:
    number: int
    payload: bytes = b"12"

    @property
    def identity_text(self) -> str:
        return str(self.number)


def numbers_of(kept: Iterable[One]) -> list[int]:
    return [one.number for one in kept]


def test_all_rounds_of_the_last_seconds_are_kept() -> None:
    """A failover may forget many rounds of a fast run."""
    kept: Any = Merged()
    assert Merged().first_round is None
    for number in range(1000):
        kept.add(number, One(number), 0.01 * number)
    assert kept.first_round == 0
    on_tape = {number: {str(number)} for number in range(500)}
    assert numbers_of(kept.undone(499, on_tape)) == list(range(500, 1000))
    assert kept.undone(499, on_tape) == []
    kept.add(500, One(500), KEPT_SECONDS + 4.005)
    assert numbers_of(kept.undone(-1, {})) == list(range(401, 501))


def test_slow_rounds_and_large_payloads_are_kept_by_number() -> None:
    kept: Any = Merged()
    for number in range(20):
        kept.add(number, One(number), KEPT_SECONDS * 2 * number)
    assert numbers_of(kept.undone(-1, {})) == list(range(20 - KEPT_MIN, 20))
    large = bytes(KEPT_BYTES_MAX // 8)
    for number in range(20):
        kept.add(number, One(number, large), 0.0)
    assert numbers_of(kept.undone(-1, {})) == list(range(12, 20)), "more bytes are not kept"


def test_what_another_round_of_the_same_number_has_not_merged_is_undone() -> None:
    kept: Any = Merged()
    for number in (6, 7, 8, 9, 10):
        kept.add(number, One(number), 0.0)
    # Round 7 is not on the tape any more, round 8 has merged another one, and 9 was merged earlier than before.
    assert kept.undone(9, {6: {"6"}, 8: {"9"}, 9: {"x"}}) == [One(8), One(10)]
    assert [kept.first_round, len(kept)] == [6, 3]
