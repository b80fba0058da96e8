"""Leases and cursors: text round trips, cursors that only advance, and one merge per sequence and pass."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.corpus_shards import (
    PASSES_MAX,
    PLACES_MAX,
    Claim,
    Place,
    advanced,
    choose,
    claims_that_count,
    cursor_text,
    parse_claim,
    parse_cursor,
    parse_places,
    shard_name,
)
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Contribution, from_fields, to_fields
from tests import samples
from tests.failing import failing

NAMES = st.builds(
    shard_name, st.just("") | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True), st.integers(0, 9999999)
)
PASSES, POSITIONS = st.integers(0, PASSES_MAX - 1), st.integers(0, 10**15 - 1)
PLACES = st.builds(Place, NAMES, PASSES, POSITIONS) | st.builds(Place, NAMES, PASSES, st.just(0), st.just(True))
CURSORS = st.tuples(PASSES, POSITIONS)


# -- as text ----------------------------------------------------------------------------------------------------------


@given(st.lists(PLACES, max_size=PLACES_MAX))
def test_places_survive_a_round_trip(places: list[Place]) -> None:
    assert parse_places(" ".join(map(str, places))) == tuple(places)


def test_all_places_of_a_contribution_fit_into_it() -> None:
    longest = Place(shard_name("c" * 64, 9999999), PASSES_MAX - 1, 10**15 - 1)
    text = " ".join([str(longest)] * PLACES_MAX)
    assert parse_places(text) == (longest,) * PLACES_MAX
    contribution = replace(samples.contribution(), data=text)
    assert from_fields(Contribution, to_fields(contribution)).data == text


def test_places_have_the_documented_text() -> None:
    assert [str(Place("17", 0, 96)), str(Place("17", 0, 96, ended=True)), str(Place("site/17", 2, 5))] == [
        "17:0:96",
        "17:0:end",
        "site/17:2:5",
    ]
    assert Place("17", 3, 96).cursor == (3, 96)
    assert Place("17", 3, 96, ended=True).cursor == (4, 0)
    assert parse_places("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "17",
        "17:0",
        "17:0:",
        "17:0:1:2",
        "17:0:-1",
        "17:0:END",
        "17:0:1e3",
        "017:0:1",  # a second name of shard 17
        "١٧:0:1",
        "17:٠:1",
        "17:0:١",
        "12345678:0:1",
        "17:1234567890123:1",
        "17:0:1234567890123456",
        "/17:0:1",
        "site/:0:1",
        "a/b/17:0:1",
        ".site/17:0:1",
        "s" * 65 + "/17:0:1",
        "17:0:1,18:0:1",
        "17:0:1\x00",
        "9" * 100_000,
        " ".join(["17:0:1"] * (PLACES_MAX + 1)),
    ],
)
def test_an_invalid_place_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(WireError) as refused:
        parse_places(text)
    assert len(str(refused.value)) < 300


@given(st.text(max_size=60) | st.from_regex(r"[0-9a/]{1,9}:\d{1,14}:(\d{1,17}|end)", fullmatch=True))
def test_any_text_is_parsed_within_bounds_or_refused(text: str) -> None:
    try:
        places = parse_places(text)
    except WireError:
        return
    assert parse_places(" ".join(map(str, places))) == places
    for place in places:
        assert 0 <= place.pass_number < PASSES_MAX
        assert 0 <= place.position < 10**15
        assert place.shard.isascii()


@given(CURSORS)
def test_cursors_survive_a_round_trip(cursor: tuple[int, int]) -> None:
    assert parse_cursor(cursor_text(cursor)) == cursor


@pytest.mark.parametrize("text", ["", "1", "1:", "1:-1", "1:2:3", "1:end", "١:0", "1" * 14 + ":0", "1:2 "])
def test_an_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        parse_cursor(text)


# -- cursors ----------------------------------------------------------------------------------------------------------

FEW = st.sampled_from(["0", "1", "2", "site/0"])
SMALL = st.integers(0, 3)


@given(
    st.dictionaries(FEW, st.tuples(SMALL, SMALL)),
    st.lists(st.builds(Place, FEW, SMALL | st.just(PASSES_MAX - 1), SMALL, st.booleans()), max_size=8),
)
def test_cursors_go_forwards_only(cursors: dict[str, tuple[int, int]], places: list[Place]) -> None:
    moved = advanced(cursors, places)
    for shard, cursor in moved.items():
        assert cursor > cursors.get(shard, (0, 0))
        assert cursor[0] < PASSES_MAX
        assert cursor in [place.cursor for place in places if place.shard == shard]
    after = {**cursors, **moved}
    for place in places:
        assert place.cursor <= after.get(place.shard, (0, 0)) or place.cursor[0] >= PASSES_MAX
    assert advanced(after, places) == {}


@given(CURSORS, st.booleans())
def test_every_reachable_cursor_can_be_written_as_a_place(cursor: tuple[int, int], ended: bool) -> None:
    for pass_number, position in advanced({}, [Place("0", *cursor, ended)]).values():
        place = Place("0", pass_number, position)
        assert parse_places(str(place)) == (place,)


# -- choice of a shard ------------------------------------------------------------------------------------------------

ISLANDS = ["a/1", "a/2", "b/1", "c/1"]
SHARDS = st.lists(st.sampled_from([*map(str, range(6)), "site/0", "site/1"]), unique=True, max_size=8)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[str], dict[str, tuple[int, int]], dict[str, str], set[str]]:
    """Draw shards, cursors, holders, and the holders that are gone."""
    shards = draw(SHARDS)
    cursors = draw(st.dictionaries(st.sampled_from(shards), st.tuples(SMALL, SMALL))) if shards else {}
    holders = draw(st.dictionaries(st.sampled_from(shards), st.sampled_from(["", *ISLANDS]))) if shards else {}
    return shards, cursors, holders, draw(st.sets(st.sampled_from(ISLANDS)))


@given(situations())
def test_a_shard_is_chosen_by_the_rules(
    situation: tuple[list[str], dict[str, tuple[int, int]], dict[str, str], set[str]],
) -> None:
    shards, cursors, holders, gone = situation
    chosen = choose(shards, cursors, holders, "a/3", gone.__contains__)
    passes = {name: cursors.get(name, (0, 0))[0] for name in shards}
    free = [name for name in shards if not holders.get(name) or holders[name] in gone]
    within = [name for name in free if passes[name] <= min(passes.values()) + 1]
    if chosen is None:
        assert not within
        return
    assert chosen in within
    fewest = [name for name in free if passes[name] == passes[chosen]]
    assert passes[chosen] == min(passes[name] for name in free)
    own = [name for name in fewest if holders.get(name, "").startswith("a/")]
    assert chosen == (own or fewest)[0]


def test_without_shards_none_is_chosen() -> None:
    assert choose([], {}, {}, "a/1", lambda _: True) is None
    assert choose(["0"], {}, {"0": "a/2"}, "a/1", lambda _: False) is None


def test_an_island_that_lost_the_answer_gets_its_shard_again() -> None:
    assert choose(["0"], {}, {"0": "a/1"}, "a/1", lambda _: False) == "0"


def test_a_held_shard_that_is_a_pass_behind_blocks_new_passes() -> None:
    """No other shard may start the pass after the next while this one is behind."""
    assert choose(["1"], {"1": (2, 0)}, {"0": "a/1"}, "a/1", lambda _: False) is None


def test_an_island_prefers_the_shard_of_its_earlier_incarnation() -> None:
    holders = {"1": "ab/1", "2": "a/1"}
    assert choose(["0", "1", "2"], {}, holders, "a/2", lambda _: True) == "2"
    assert choose(["0", "1", "2"], {"2": (1, 0)}, holders, "a/2", lambda _: True) == "0"


# -- many islands that die --------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """One incarnation of an island.

    Attributes:
        place: Its place in the shard that it reads.
        unsent: The sequences that it has read since its last contribution, each as shard, pass and number.
        held: Its place in each shard that it holds.
    """

    place: Place | None = None
    unsent: list[tuple[str, int, int]] = field(default_factory=list)
    held: dict[str, Place] = field(default_factory=dict)


@dataclass
class Simulation:
    """Islands that read, contribute and die at random, and a merger that merges late.

    Attributes:
        lengths: The number of sequences of each shard.
        waiting: Contributions that are not merged yet, each with its island, its places and its sequences.
    """

    random: Random
    lengths: Mapping[str, int]
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    waiting: deque[tuple[str, str, list[tuple[str, int, int]]]] = field(default_factory=deque)
    merged: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    deaths: int = 0

    def lease(self, me: str) -> None:
        wanted = sorted(self.lengths.keys() - {shard for shard, holder in self.holders.items() if holder == me})
        order = self.random.sample(wanted, len(wanted))
        chosen = choose(order, self.cursors, self.holders, me, self._gone)
        if chosen is not None:
            assert self._gone(self.holders.get(chosen, ""))
            self.holders[chosen] = me
            self.readers[me].place = place = Place(chosen, *self.cursors.get(chosen, (0, 0)))
            assert place.pass_number <= self.slowest() + 1

    def slowest(self) -> int:
        """Return the pass that every shard has reached."""
        return min(self.cursors.get(shard, (0, 0))[0] for shard in self.lengths)

    def _gone(self, holder: str) -> bool:
        return holder not in self.readers and all(who != holder for who, _, _ in self.waiting)

    def read(self, me: str) -> None:
        """Read on in the shard that the island holds; lease one first if necessary."""
        if self.readers[me].place is None:
            self.lease(me)
        reader, place = self.readers[me], self.readers[me].place
        if place is None:
            return
        until = min(place.position + self.random.randint(1, 4), self.lengths[place.shard])
        reader.unsent += [(place.shard, place.pass_number, number) for number in range(place.position, until)]
        ended = until == self.lengths[place.shard]
        reader.held[place.shard] = now = Place(place.shard, place.pass_number, 0 if ended else until, ended)
        reader.place = None if ended else now

    def contribute(self, me: str) -> None:
        reader = self.readers[me]
        self.waiting.append((me, " ".join(map(str, reader.held.values())), reader.unsent))
        reader.unsent = []
        reader.held = {shard: place for shard, place in reader.held.items() if not place.ended}

    def merge(self) -> None:
        if not self.waiting:
            return
        _, text, sequences = self.waiting.popleft()
        self.merged.update(sequences)
        for shard, cursor in advanced(self.cursors, parse_places(text)).items():
            if cursor[0] > self.cursors.get(shard, (0, 0))[0]:
                self.holders.pop(shard)
            self.cursors[shard] = cursor

    def die(self, me: str) -> None:
        """Replace an island by its next incarnation."""
        del self.readers[me]
        self.deaths += 1
        self.readers[f"{me.partition('/')[0]}/{self.deaths}"] = Reader()

    def step(self) -> None:
        me = self.random.choice(sorted(self.readers))
        deed = self.random.choices([self.read, self.contribute, self.die], [10, 5, 1])[0]
        deed(me)
        if self.random.random() < 0.4:
            self.merge()


@pytest.mark.parametrize("islands", [1, 3, 12])
@pytest.mark.parametrize("seed", range(4))
def test_each_completed_pass_merges_each_sequence_once_even_if_islands_die(islands: int, seed: int) -> None:
    random = Random(seed)
    lengths = {str(number): random.randint(1, 40) for number in range(12)}
    simulation = Simulation(random, lengths, readers={f"i{number}/0": Reader() for number in range(islands)})
    while simulation.slowest() < 3:
        simulation.step()
    assert simulation.deaths > 5
    for shard, count in lengths.items():
        pass_number, position = simulation.cursors[shard]
        expected = {(shard, done, number): 1 for done in range(pass_number) for number in range(count)}
        expected |= {(shard, pass_number, number): 1 for number in range(position)}
        assert {key: times for key, times in simulation.merged.items() if key[0] == shard} == expected


# -- claims -------------------------------------------------------------------------------------------------------


def claim(holder: str, turn: int = 0, pass_number: int = 0) -> Claim:
    return Claim(holder, pass_number, turn)


def test_the_last_turn_of_the_present_pass_counts() -> None:
    claims = {
        "a": {"0": claim("a/x"), "1": claim("a/x", turn=1), "2": claim("a/x")},
        "b": {"0": claim("b/y", turn=1), "1": claim("b/y"), "2": claim("b/y", turn=9, pass_number=1)},
    }
    found = claims_that_count(claims, {"1": (0, 5)})
    assert {shard: each.holder for shard, each in found.items()} == {"0": "b/y", "1": "a/x", "2": "a/x"}
    assert claims_that_count(claims, {"0": (1, 0), "1": (1, 0), "2": (1, 0)}) == {"2": claim("b/y", 9, 1)}


def test_a_claim_that_nobody_could_take_over_does_not_count() -> None:
    forged = {"0": claim("mallory/m", turn=10**14), "1": claim("mallory/m", turn=10**9)}
    claims = {"a": {"0": claim("a/x")}, "mallory": forged}
    assert claims_that_count(claims, {}) == {"0": claim("a/x")}


def test_an_island_holds_a_bounded_number_of_shards() -> None:
    claims = {"mallory": {str(n): claim("mallory/m") for n in range(1000)}, "a": {"500": claim("a/x", turn=1)}}
    found = claims_that_count(claims, {})
    assert len(found) == PLACES_MAX + 1
    assert found["500"].holder == "a/x"


def test_the_text_of_a_claim_gives_the_claim_again() -> None:
    assert parse_claim("a", str(Claim("a/x.1", 3, 7))) == Claim("a/x.1", 3, 7)
    for text in ("", "x:0", "x:0:-1", "x/y:0:0", "x:0:0:0", f"x:0:{10**15}"):
        with failing(WireError):
            parse_claim("a", text)
