"""Leases and cursors: text round trips, cursors that only advance, and the choice of a range."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import WireError
from archipelago.broker.messages import Contribution, from_fields, to_fields
from archipelago.broker.ranges import (
    LEASES_MAX,
    PASSES_MAX,
    POSITIONS_MAX,
    ReadPosition,
    advanced,
    choose,
    holder_in,
    parse_positions,
)
from tests import samples

NAMES = st.from_regex(r"[1-9][0-9]{0,6}", fullmatch=True)
PASSES, POSITIONS = st.integers(0, PASSES_MAX - 1), st.integers(0, 10**15 - 1)
PLACES = st.builds(ReadPosition, NAMES, PASSES, POSITIONS)


# -- as text ----------------------------------------------------------------------------------------------------------


def test_all_places_of_a_contribution_fit_into_it() -> None:
    longest = ReadPosition("9999999", PASSES_MAX - 1, 10**15 - 1)
    text = " ".join([str(longest)] * POSITIONS_MAX)
    assert parse_positions(text) == (longest,) * POSITIONS_MAX
    contribution = replace(samples.contribution(), data=text)
    assert from_fields(Contribution, to_fields(contribution)).data == text


def test_places_have_the_documented_text() -> None:
    assert str(ReadPosition("17", 0, 96)) == "17:0:96"
    assert parse_positions("17:0:96 17:0:end") == (ReadPosition("17", 0, 96), ReadPosition("17", 1, 0))
    assert parse_positions("") == ()


#: `017` would be a second name of range 17.
INVALID = [
    "17", "17:0", "17:0:", "17:0:1:2", "17:0:-1", "17:0:END", "17:0:1e3", "017:0:1", "١٧:0:1", "17:٠:1", "17:0:١",
    "12345678:0:1", "17:1234567890123:1", "17:0:1234567890123456", "site/17:0:1",
    "17:0:1,18:0:1", "17:0:1\x00", "9" * 100_000, " ".join(["17:0:1"] * (POSITIONS_MAX + 1)),
]  # fmt: skip


def test_an_invalid_place_is_refused_with_a_short_message() -> None:
    for text in INVALID:
        with pytest.raises(WireError) as refused:
            pytest.fail(f"{text[:99]} was read as {parse_positions(text)}")
        assert len(str(refused.value)) < 300


@given(st.text(max_size=60) | st.from_regex(r"[0-9a/]{1,9}:\d{1,14}:(\d{1,17}|end)", fullmatch=True))
def test_any_text_is_parsed_within_bounds_or_refused(text: str) -> None:
    try:
        places = parse_positions(text)
    except WireError:
        return
    assert parse_positions(" ".join(map(str, places))) == places
    for place in places:
        assert 0 <= place.pass_number < PASSES_MAX
        assert 0 <= place.position < 10**15
        assert place.range.isascii()


# -- cursors ----------------------------------------------------------------------------------------------------------

FEW = st.sampled_from(["0", "1", "2"])
SMALL = st.integers(0, 3)


@given(
    st.dictionaries(FEW, st.tuples(SMALL, SMALL)),
    st.lists(st.builds(ReadPosition, FEW, SMALL | st.just(PASSES_MAX - 1), SMALL), max_size=8),
)
def test_cursors_go_forwards_only(cursors: dict[str, tuple[int, int]], places: list[ReadPosition]) -> None:
    moved = advanced(cursors, places)
    for name, cursor in moved.items():
        assert cursor > cursors.get(name, (0, 0))
        assert cursor[0] < PASSES_MAX
        assert cursor in [place.cursor for place in places if place.range == name]
    after = {**cursors, **moved}
    for place in places:
        assert place.cursor <= after.get(place.range, (0, 0)) or place.cursor[0] >= PASSES_MAX
    assert advanced(after, places) == {}


# -- choice of a range ------------------------------------------------------------------------------------------------


def test_the_choice_of_a_range_by_hand() -> None:
    def nobody(holder: str) -> bool:
        return False

    assert choose([], {}, {}, "a/1", nobody) is None
    assert choose(["0"], {}, {"0": "a/2"}, "a/1", nobody) is None
    assert choose(["0"], {}, {"0": "a/1"}, "a/1", nobody) == "0", "the island lost the answer to its lease"
    # A range that is a pass behind blocks the pass after the next.
    assert choose(["0", "1"], {"1": (2, 0)}, {"0": "a/1"}, "a/1", nobody, ["0"]) is None
    assert choose(["0", "1"], {"1": (1, 0)}, {"0": "a/1"}, "a/1", nobody, ["0"]) == "1"
    # No honest island leases as many.
    names = [str(n) for n in range(LEASES_MAX + 1)]
    assert choose(names[1:], {}, dict.fromkeys(names[1:], "m/1"), "a/1", nobody) is None
    assert choose(names, {}, dict.fromkeys(names, "m/1"), "a/1", nobody) == "0"
    # An island prefers the range of its earlier incarnation, and `ab` is another island.
    holders = {"1": "ab/1", "2": "a/1"}
    assert choose(["0", "1", "2"], {}, holders, "a/2", lambda _: True) == "2"
    assert choose(["0", "1", "2"], {"2": (1, 0)}, holders, "a/2", lambda _: True) == "0"


def test_a_lease_is_of_one_pass() -> None:
    assert holder_in("a/x:3", 3) == "a/x"
    for lease in ("a/x:3", "", "3", ":2", "a/x:2 ", "a/x:02", "a/x"):
        assert holder_in(lease, 2) == ""
