"""What the page says of a run: its state, its events, its merger, and rates that it measures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from archipelago.broker.control import Control
from archipelago.broker.messages import Books, Note, Pending, Refusal
from archipelago.broker.presence import Presence
from archipelago.broker.transport import MergerStatus
from archipelago.ops.dashboard import page_data
from archipelago.ops.dashboard.app import _sentences, _stamped
from archipelago.ops.dashboard.page_data import events, to_json
from archipelago.ops.watch.events import events_of
from archipelago.ops.watch.history import Rate, measured
from archipelago.ops.watch.reading import summarise
from archipelago.ops.watch.run_view import RunView
from tests import samples

MANIFEST = samples.manifest()


def view(**changes: Any) -> RunView:
    return replace(summarise(MANIFEST, [], [], Books(), Pending(0, 0)), **changes)


def test_the_state_of_a_run() -> None:
    live = {"known": 2, "live": 2, "rounds": 3}
    waiting = live | {"pending": 1}
    ended = {"known": 2, "rounds": 3, "step": 2000}
    paused = {"control": Control(is_paused=True)}
    for changes, seconds, word in (
        ({}, 0.0, "new"),
        ({"known": 2}, 0.0, "no islands"),
        ({"rounds": 3}, 0.0, "no islands"),
        ({"known": 2, "live": 2}, 0.0, "starting"),
        (live, 1e6, "training"),  # No contribution waits.
        (waiting, 59.0, "training"),  # `status` has the same limit.
        (waiting, 61.0, "stalled"),
        (waiting | paused, 61.0, "paused"),
        (ended, 0.0, "finished"),
        (ended | paused, 0.0, "finished"),
        (live | {"merger": MergerStatus("", 1, 0.0, 0.5)}, 0.0, "no merger"),
        (live | {"merger": MergerStatus()}, 0.0, "training"),  # This broker does not know its merger.
        # The islands of a run that has ended are about to leave.
        (live | {"step": 2000, "merger": MergerStatus("", 1, 0.0, 0.5)}, 0.0, "training"),
    ):
        merger = changes.get("merger", MergerStatus("m", 1, 4.0, seconds))
        assert view(**changes | {"merger": merger}).state == word, (changes, seconds)
        assert word in page_data.STATES
    assert view(unreachable={1: "gone"}, **live).state == "shard away"


def test_events_are_newest_first_and_repeated_refusals_are_counted() -> None:
    late = [(10.0 + n, Refusal("b", "x", n, n, 0, 100, "too old")) for n in range(3)]
    other = (13.0, Refusal("a", "x", 0, 9, 0, 100, "too old"))
    notes = [Note(1.0, "b", "joined", "new"), Note(11.5, "merger", "served", "in epoch 2")]
    found = events(events_of(notes, [*late, other]))
    assert [(e["unix_seconds"], e["who"], e["kind"], e["times"]) for e in found] == [
        (13.0, "a", "refused", 1), (12.0, "b", "refused", 1), (11.5, "merger", "served", 1), (11.0, "b", "refused", 2),
        (1.0, "b", "joined", 1),
    ]  # fmt: skip


def islands(**changes: Any) -> Any:
    beats = [Presence(samples.heartbeat("a", **changes), 0.0)]
    return summarise(MANIFEST, [], beats, Books(), Pending(0, 0)).islands


def test_rates_converge_and_survive_a_restart() -> None:
    rates = measured({}, islands(bytes_up=1000), 0.0)
    assert (rates["a"].up, rates["a"].down) == (0.0, 0.0)
    for second in range(1, 120):
        rates = measured(rates, islands(bytes_up=1000 + 50 * second, bytes_down=7 * second), float(second))
    assert rates["a"].up == pytest.approx(50.0, rel=1e-3)
    assert rates["a"].down == pytest.approx(7.0, rel=1e-3)
    again = measured(rates, islands(bytes_up=0), 120.0)["a"]
    assert 0.0 < again.up < 50.0
    assert measured({"a": again}, islands(bytes_up=10), 120.0)["a"] == again  # No time has passed.
    assert isinstance(again, Rate)


def test_the_use_of_a_link_is_relative_to_its_speed() -> None:
    (island,) = islands(uplink_bytes_per_second=200.0, downlink_bytes_per_second=math.nan)
    lane = page_data._lane(island, [], Rate(0.0, 0, 0, 50.0, 7.0), {})
    assert lane["up_share"] == 0.25
    assert math.isnan(lane["down_share"]), "nothing was measured of its way down"
    for nonsense in (0.0, -1.0, math.nan):
        (island,) = islands(uplink_bytes_per_second=nonsense)
        assert math.isnan(page_data._lane(island, [], Rate(0.0, 0, 0, 50.0, 7.0), {})["up_share"])


def test_every_value_becomes_valid_json_and_every_action_a_sentence() -> None:
    text = to_json({"a": [float("nan"), float("inf"), 1.0, 0.123456789, 1.7e9 + 0.25], "b": (True, None, "x", 7)})
    assert json.loads(text) == {"a": [None, None, 1, 0.12346, 1_700_000_000], "b": [True, None, "x", 7]}
    said = _sentences({"merging": "", "island.b": "expel", "checkpoint": "1"})
    assert len(said.split(", ")) == 3, "words for each change"
    assert _sentences({})
    assert _stamped({"checkpoint": "now", "merging": "paused"}, 12.5) == {"checkpoint": "12.500", "merging": "paused"}
