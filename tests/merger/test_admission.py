"""Every reason to refuse a contribution by its header."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archipelago.broker.commits import START, Delivery
from archipelago.broker.config import RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Refusal
from archipelago.broker.ranges import POSITIONS_MAX
from archipelago.broker.transport import Transport
from archipelago.merger import admission
from archipelago.merger.admission import ANNOUNCED_MAX, NAMELESS, NAMELESS_MAX, WAITING_MAX, Inbox, reason_to_refuse
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.service import READ_COUNT_MAX
from archipelago.merger.state import RunState
from tests import samples
from tests.harness.merger_run import constant, served_run

CONFIG = RunConfig(sync=SyncConfig(staleness_cap=3), wire=WireConfig(up="float32", thin="top3"))
MANIFEST = samples.manifest(config=CONFIG)  # two fragments
SHARDS = CONFIG.data.shards
#: The most tokens in four steps: batches may be 64 times the run's.
MOST_TOKENS = 4 * CONFIG.tokens_per_step * 64


def code_of(changes: dict[str, Any], closed: int = 0, manifest: Manifest = MANIFEST) -> str:
    """Return the code of the reason to refuse a contribution with these changes; empty when it is admitted."""
    reason = reason_to_refuse(samples.contribution(**changes), manifest, closed)
    return reason.code if reason else ""


def test_headers_are_judged_by_every_rule() -> None:
    table: list[tuple[dict[str, Any], int, str]] = [
        ({}, 0, ""),
        ({"round": 2, "fragment": 1}, 0, ""),
        ({"fragment": 1}, 0, "fragment"),
        ({"round": 2}, 0, "fragment"),
        ({"round": 3, "fragment": 2}, 0, "fragment"),
        ({"round": 4, "fragment": 1}, 0, ""),  # the most rounds ahead
        ({"round": 5}, 0, "lost"),
        ({"round": 15}, 10, "lost"),
        ({"base": 1}, 0, "lost"),
        ({"base": 1}, 1, ""),
        ({"round": 2, "fragment": 1, "base": 1}, 1, "lost"),
        ({"round": 1, "base": 2}, 10, ""),  # late, at the staleness cap
        ({"base": 2}, 12, "stale"),
        ({"tokens": MOST_TOKENS}, 0, ""),
        ({"tokens": MOST_TOKENS + 1}, 0, "tokens"),
        ({"farewell": True, "steps": 1, "tokens": 1}, 0, ""),
        ({"codec": "float32"}, 0, ""),
        ({"codec": "top3"}, 0, ""),
        ({"codec": "int8"}, 0, "codec"),
        ({"data": ""}, 0, ""),
        ({"data": f"0:0:96 {SHARDS - 1}:4:0"}, 0, ""),
        ({"data": " ".join(f"{n}:0:1" for n in range(POSITIONS_MAX))}, 0, ""),
        ({"data": f"{SHARDS}:0:1"}, 0, "data"),
        ({"data": "0:0:1 nonsense"}, 0, "data"),
        ({"data": "0:0:" + "9" * 4000}, 0, "data"),
        ({"data": "0:0:1 " * 33}, 0, "data"),
    ]
    for changes, closed, code in table:
        assert code_of(changes, closed) == code, changes
    of_two = replace(MANIFEST, shards=2)
    codes = [code_of({}, manifest=of_two.of_shard(shard)) for shard in (0, 1)]
    assert sorted(codes) == ["", "fragment"], "one of the shards has the fragment"


def test_reasons_quote_only_a_part_of_a_hostile_header() -> None:
    hostile: list[dict[str, Any]] = [{"codec": "x" * 64}, {"data": "0:0:" + "9" * 4000}]
    for changes in hostile:
        reason = reason_to_refuse(samples.contribution(**changes), MANIFEST, 0)
        assert reason is not None
        assert len(reason.text) < 100


def begun() -> tuple[Transport, int, RoundMerge]:
    """Create the run. Return the connection, the epoch of its merger, and its rules."""
    transport = MemoryBroker().connect("sample")
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    epoch = transport.merger.acquire("merger", 60.0)
    assert epoch is not None
    return transport, epoch, RoundMerge.of(MANIFEST)


def test_the_next_contributions_are_downloaded_before_one_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AHEAD", 2)
    transport, epoch, rules = begun()
    state = RunState()
    done: list[str] = []

    def delivery(name: str) -> Delivery:
        contribution, payload = samples.packed(np.ones(MANIFEST.sizes[0], np.float32), island=name)
        if name == "y":
            contribution = replace(contribution, codec="int8")

        def download() -> bytes:
            assert name not in "xy", "it is refused by its header"
            done.append(f"download {name}")
            if name == "c":
                raise WireError("a chunk of it is gone", code="wire.payload")
            return payload

        return Delivery(f"{name}/1-0", contribution, download=download)

    inbox = Inbox(transport, rules)
    inbox.expel({"x"}, state)
    deliveries = [delivery(name) for name in "abxbcyd"]
    for contribution in inbox.receive(deliveries, state, epoch):
        done.append(f"add {contribution.island}")
    expected = "download a download b add a download c add b download d add d"
    assert " ".join(done) == expected, "b, which came twice, is added once"
    assert state.refused == {"expelled": 1, "unreadable": 1, "codec": 1}


def test_what_waits_of_an_expelled_island_is_refused_and_the_rest_waits_on() -> None:
    """Nothing is downloaded or judged a second time."""
    transport, epoch, rules = begun()
    state, downloads = RunState(), Counter[str]()

    def delivery(name: str, first: int) -> Delivery:
        contribution, payload = samples.packed(np.ones(MANIFEST.sizes[0], np.float32), island=name, data=f"0:0:{first}")

        def download() -> bytes:
            downloads[name] += 1
            return payload

        return Delivery(f"{name}/1-0", contribution, download=download)

    inbox = Inbox(transport, rules)
    assert len(list(inbox.receive(map(delivery, "abc", (3, 9, 5)), state, epoch))) == 3
    inbox.expel({"b"}, state)
    assert (inbox.entries(), state.refused) == (["a/1-0", "c/1-0"], {"expelled": 1})
    assert [addend.entry for addend in inbox.take(0)] == ["a/1-0", "c/1-0"]
    assert (inbox.take(0), inbox.waiting_fragments(), downloads) == ([], set(), Counter("abc"))


def test_a_flood_of_refusals_hides_no_announcements_and_delays_no_round() -> None:
    """Islands read all announcements, and the oldest are deleted when there are too many."""
    run, merger = served_run()
    for _ in range(ANNOUNCED_MAX + 100):
        run.send("mallory", 1, constant(1.0), digest="0" * 32)
    while run.transport.reader.backlog():
        merger.turn(0.0)
    assert len(run.events(Refusal)) == ANNOUNCED_MAX
    assert run.transport.reader.counters().refused == ANNOUNCED_MAX + 100
    for _ in range(2 * READ_COUNT_MAX):
        run.send("mallory", 2, constant(1.0), digest="0" * 32)
    run.live("a")
    run.send("a", 1, constant(1.0))
    assert merger.turn(0.0)
    assert run.transport.reader.backlog() > 0, "the round has waited until the flood was over"
    merger.turn(0.0)
    assert len(run.events(Refusal)) == ANNOUNCED_MAX + READ_COUNT_MAX, "after the round, refusals are announced again"


def test_entries_that_name_no_contribution_are_refused_and_few_are_announced() -> None:
    transport, epoch, rules = begun()
    state, inbox = RunState(), Inbox(transport, rules)
    deliveries = [Delivery(f"a/{n}-0", None, fault="it cannot be read") for n in range(NAMELESS_MAX + 2)]
    assert not list(inbox.receive(deliveries, state, epoch))
    assert state.refused == {"unreadable": NAMELESS_MAX + 2}
    told = [event for _, event in transport.reader.events(START, 0.0) if isinstance(event, Refusal)]
    assert [(each.island, each.incarnation) for each in told] == [("a", NAMELESS)] * NAMELESS_MAX


def test_one_island_cannot_fill_the_room_of_a_round() -> None:
    run, merger = served_run(quorum=2)
    run.live("a", "b")
    for _ in range(WAITING_MAX + 1):
        run.send("a", 1, constant(1.0))
    merger.turn(0.0)
    assert (len(merger.inbox.entries()), merger.state.refused["full"]) == (WAITING_MAX, 1)
