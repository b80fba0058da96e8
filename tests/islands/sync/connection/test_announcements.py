"""Announcements that no merger can have sent are ignored, and islands recover from those that they believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from archipelago.broker.messages import Call, Event, Marker, Resume, Snapshot, TapeEntry
from archipelago.islands.sync.connection.downloads import believable_step, fault_in, judged
from tests import samples
from tests.islands.sync.connection.link_run import Harness, received

MANIFEST = samples.manifest()
FIRST = samples.first_snapshots(MANIFEST)[0][0]
HUGE = 1 << 62


def snapshot(number: int, **changes: Any) -> Snapshot:
    """Return the snapshot of a round of the sample run, which has two fragments."""
    good = replace(FIRST, round=number, fragment=(number - 1) % 2, version=(number + 1) // 2)
    return replace(good, **changes)


def test_what_contradicts_the_manifest_has_a_fault() -> None:
    contradictions: list[Event] = [
        snapshot(1, fragment=4000),
        snapshot(1, fragment=1),
        snapshot(1, version=2),
        snapshot(1, bytes=HUGE),
        snapshot(1, difference_bytes=1 << 30),
        snapshot(0, fragment=0, version=1),
        snapshot(HUGE, version=1),
        Call(1, 1),
        Call(2, 4000),
    ]
    for event in contradictions:
        assert fault_in(event, MANIFEST), event


def heads(*rounds: int) -> Sequence[Snapshot | None]:
    return [replace(FIRST, fragment=p, round=number) for p, number in enumerate(rounds)]


def test_an_island_at_round_ten_believes_what_the_headers_confirm() -> None:
    cases: list[tuple[Event, tuple[int, int], str]] = [
        (snapshot(11), (9, 10), "accepted"),  # the next round needs no confirmation
        (snapshot(13), (13, 12), "accepted"),  # announcements in between were lost
        (snapshot(13), (9, 10), "ignored"),
        (snapshot(10), (9, 10), "accepted"),
        (snapshot(6), (5, 6), "goes back"),
        (snapshot(8), (5, 6), "goes back without it"),
        (Call(12, 1), (9, 10), "accepted"),
        (Call(13, 0), (9, 10), "ignored"),
        (Resume(10, 1), (9, 10), "accepted"),
        (Resume(8, 1), (9, 10), "accepted"),
        (Resume(12, 1), (11, 12), "accepted"),
        (Resume(HUGE, 1), (9, 10), "ignored"),
        (Marker(1, 10), (9, 10), "accepted"),
        (Marker(1, HUGE), (9, 10), "ignored"),
    ]
    for event, stored, expected in cases:
        events, fault = judged(event, MANIFEST, 10, (11, 12), partial(heads, *stored))
        back = Resume(max(stored), 0)
        wanted = {"accepted": (event,), "ignored": (), "goes back": (back, event), "goes back without it": (back,)}
        assert events == wanted[expected], event
        assert bool(fault) == (expected == "ignored"), event


def tape_at(step: int | None) -> list[TapeEntry]:
    """Return a tape that has come to that step. Fail if there is none, because the step needs no confirmation."""
    assert step is not None
    return [replace(samples.commit([]).tape, step=step)]


def test_a_step_far_ahead_needs_the_tape() -> None:
    for step, known, on_tape, expected in (
        (120, 100, None, 120),
        (500, 100, 500, 500),
        (500, 100, 300, 300),
        (500, 100, 0, 100),
        (HUGE, 100, 0, 100),
        (HUGE, 100, HUGE, 1000),
        (1000, 990, 0, 990),  # one number alone does not end the run
        (1000, 990, 1000, 1000),
    ):
        found = believable_step(snapshot(1, step=step), known, 1000, 24, partial(tape_at, on_tape))
        assert found == expected, (step, known, on_tape)


# -- an island's inbox -------------------------------------------------------------------------------------------------


def forge(harness: Harness, *events: Event) -> None:
    for event in events:
        harness.stored.announce(event)


def test_forged_announcements_stop_no_merge(harness: Harness) -> None:
    link = harness.link()
    forge(harness, snapshot(1, fragment=4000), snapshot(HUGE - 1), Call(HUGE, 1), Resume(HUGE, 1), Marker(1, HUGE))
    harness.close(1, 7.0)
    link.pump()
    events, (arrival,) = received(link)
    assert [event.round for event in events] == [1]
    assert arrival.params_N[0] == 7.0
    assert (link.channels[0].inbox.heard_round, link.uplink.ignored) == (1, 5)
    before = harness.faulty.calls["heads"]
    forge(harness, *(snapshot(number) for number in range(1000, 1200)))
    link.pump()
    assert (link.uplink.ignored, harness.faulty.calls["heads"] - before) == (205, 1), "one read for a flood"
    assert (link.pumps.failure, link.pumps.trouble) == (None, "")


def test_the_step_of_an_announcement_is_believed_as_far_as_the_tape_confirms_it(harness: Harness) -> None:
    link = harness.link()
    forge(harness, snapshot(1, step=HUGE))
    link.pump()
    assert [event.step for event in received(link)[0] if isinstance(event, Snapshot)] == [0]


def test_an_island_follows_a_server_whose_clock_is_behind(harness: Harness) -> None:
    harness.broker.instance = "old"
    link = harness.link()
    link.pump()
    link.channels[0].inbox._after = f"{HUGE}-0"  # by the clock of the old server
    harness.broker.instance, harness.ahead = "new", 10.0
    link.pump()
    harness.epoch = harness.transport.merger.acquire("merger", 1e6) or 0
    harness.close(1, 7.0)
    link.pump()
    assert [event.round for event in received(link)[0] if isinstance(event, Snapshot)] == [1]


def test_an_honest_announcement_ends_the_belief_in_later_rounds(harness: Harness) -> None:
    link = harness.link()
    link.channels[0].inbox.hear_of(1000)
    harness.close(1, 1.0)
    link.pump()
    events, arrivals = received(link)
    assert [type(event) for event in events] == [Resume, Snapshot]
    assert [a.params_N[0] for a in arrivals] == [1.0]
    assert link.channels[0].inbox.heard_round == 1


def test_an_unreadable_header_of_a_fragment_stops_nothing(harness: Harness) -> None:
    link = harness.link()
    del harness.stored.fragments[1]
    forge(harness, snapshot(100))
    harness.close(1, 1.0)
    link.pump()
    assert [a.params_N[0] for a in received(link)[1]] == [1.0]
