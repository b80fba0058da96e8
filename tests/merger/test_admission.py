"""Every reason to refuse a contribution, and the memory of what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig, SyncConfig, WireConfig
from archipelago.broker.corpus_shards import PLACES_MAX, parse_places
from archipelago.merger.admission import REMEMBERED_MAX, Accepted, Rejected, Sequences, admit
from tests import samples

CONFIG = RunConfig(sync=SyncConfig(staleness_cap=3), wire=WireConfig(up="float32", thin="top3"))
MANIFEST = samples.manifest(config=CONFIG)  # two fragments
SHARDS = CONFIG.data.shards
MOST_TOKENS = 4 * CONFIG.tokens_per_step * 64
"""for four steps: batches of 64 times the run's"""


@pytest.mark.parametrize(
    ("changes", "closed", "version", "staleness"),
    [
        ({}, 0, 0, 0),
        ({"round": 2, "fragment": 1}, 0, 0, 0),
        ({"round": 4, "fragment": 1}, 0, 0, 0),  # two round trips ahead
        ({"round": 1, "base": 2}, 10, 5, 3),  # late, and at the cap
        ({"tokens": MOST_TOKENS}, 0, 0, 0),
        ({"farewell": True, "steps": 1, "tokens": 1}, 0, 0, 0),
        ({"data": ""}, 0, 0, 0),
        ({"codec": "float32"}, 0, 0, 0),
        ({"codec": "top3"}, 0, 0, 0),
        ({"data": f"0:0:96 {SHARDS - 1}:3:end site/0:0:1"}, 0, 0, 0),
        ({"data": " ".join(f"{n}:0:1" for n in range(PLACES_MAX))}, 0, 0, 0),
    ],
)
def test_accepted(changes: dict[str, Any], closed: int, version: int, staleness: int) -> None:
    assert admit(samples.contribution(**changes), MANIFEST, closed, version) == Accepted(staleness)


@pytest.mark.parametrize(
    ("changes", "closed", "version", "reason"),
    [
        ({"fragment": 1}, 0, 0, "round 1 does not sync fragment 1"),
        ({"round": 2}, 0, 0, "round 2 does not sync fragment 0"),
        ({"round": 3, "fragment": 2}, 0, 0, "round 3 does not sync fragment 2"),
        ({"round": 5}, 0, 0, "round 5 is far ahead of round 0, the last one closed"),
        ({"round": 15}, 10, 5, "round 15 is far ahead of round 10, the last one closed"),
        ({"base": 1}, 0, 0, "measured from version 1, which does not exist yet (now 0)"),
        ({"tokens": MOST_TOKENS + 1}, 0, 0, f"{MOST_TOKENS + 1} tokens in 4 steps cannot be"),
        ({"base": 2}, 10, 6, "staleness 4 is over the cap of 3"),
        ({"codec": "int8"}, 0, 0, "codec 'int8', which this run does not send"),
        ({"codec": "x" * 64}, 0, 0, f"codec '{'x' * 32}', which this run does not send"),
        ({"data": f"{SHARDS}:0:1"}, 0, 0, f"shard {SHARDS} of {SHARDS} does not exist"),
        ({"data": f"0:0:1 site/{SHARDS}:0:end"}, 0, 0, f"shard site/{SHARDS} of {SHARDS} does not exist"),
        ({"data": "0:0:1 nonsense"}, 0, 0, "'nonsense' is no place in the data"),
        ({"data": "0:-1:0"}, 0, 0, "'0:-1:0' is no place in the data"),
        ({"data": "007:0:0"}, 0, 0, "'007:0:0' is no place in the data"),
        ({"data": "٣:0:0"}, 0, 0, "'٣:0:0' is no place in the data"),
        ({"data": "../etc/1:0:0"}, 0, 0, "'../etc/1:0:0' is no place in the data"),
        ({"data": "0:0:" + "9" * 4000}, 0, 0, f"'0:0:{'9' * 36}' is no place in the data"),
        ({"data": "0:0:1 " * 33}, 0, 0, "33 places in the data, 32 at most"),
    ],
)
def test_rejected(changes: dict[str, Any], closed: int, version: int, reason: str) -> None:
    assert admit(samples.contribution(**changes), MANIFEST, closed, version) == Rejected(reason)


def test_without_a_codec_for_thin_links_only_the_runs_own_is_taken() -> None:
    manifest = replace(MANIFEST, config=replace(MANIFEST.config, wire=WireConfig(up="int4", thin="")))
    assert admit(samples.contribution(codec="int4"), manifest, 0, 0) == Accepted(0)
    for codec in ("top3", "float32"):
        assert isinstance(admit(samples.contribution(codec=codec), manifest, 0, 0), Rejected)


WORDS = st.from_regex(r"\A(site/|/)?[0-9]{0,4}:[0-9]{0,3}:([0-9]{0,3}|end|x)\Z") | st.text(max_size=12)


@given(st.lists(WORDS, max_size=4).map(" ".join))
def test_whatever_an_island_says_it_has_read_is_judged(data: str) -> None:
    """What passes names shards that exist, so that cursors take no more room than there are shards."""
    verdict = admit(samples.contribution(data=data), MANIFEST, 0, 0)
    if isinstance(verdict, Accepted):
        assert all(int(place.shard.rpartition("/")[2]) < SHARDS for place in parse_places(data))
    else:
        assert "data" in verdict.reason or "does not exist" in verdict.reason


# -- sequences -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=80))
def test_sequences_are_a_set_that_packs_its_beginning(numbers: list[int]) -> None:
    kept, plain = Sequences(), set[int]()
    for number in numbers:
        kept.add(number)
        plain.add(number)
        assert kept.floor == next(n for n in range(42) if n not in plain)
        assert kept.above == {n for n in plain if n > kept.floor}
    assert [n in kept for n in range(42)] == [n in plain for n in range(42)]


def test_numbers_in_order_take_no_room() -> None:
    kept = Sequences()
    for number in range(5000):
        kept.add(number)
    assert (kept.floor, kept.above) == (5000, set())


def test_a_gap_does_not_take_room_for_ever() -> None:
    kept = Sequences()
    for number in range(1, 3 * REMEMBERED_MAX):  # number 0 never came
        kept.add(number)
        assert len(kept.above) <= REMEMBERED_MAX
        assert number in kept
        assert number + 1 not in kept
    assert all(number in kept for number in range(1, 3 * REMEMBERED_MAX))
