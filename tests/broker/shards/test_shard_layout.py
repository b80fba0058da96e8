"""The fragments and rounds of shards."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.messages import Marker, Refusal, Resume, Snapshot
from archipelago.broker.shards.layout import Layout, dealt
from tests.tiers import examples

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def snapshot(number: int, fragment: int, version: int) -> Snapshot:
    return Snapshot(number, fragment, version, 0, "int4", 1, "0" * 32, merged="")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(SIZES)
    return Layout(dealt(sizes, draw(st.integers(1, len(sizes)))))


@given(SIZES, st.data())
@settings(max_examples=examples(200))
def test_fragments_are_dealt_out_evenly(sizes: list[int], data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, len(sizes)))
    hands = dealt(sizes, shards)
    assert sorted(p for hand in hands for p in hand) == list(range(len(sizes)))
    assert all(hand and list(hand) == sorted(hand) for hand in hands)
    heaviest = max(sum(sizes[p] for p in hand) for hand in hands)
    assert heaviest <= sum(sizes) / shards + max(sizes)


@given(layouts(), st.integers(1, 200))
@settings(max_examples=examples(200))
def test_each_round_of_the_run_is_one_round_of_one_shard(layout: Layout, number: int) -> None:
    shard = layout.shard_of(number)
    assert layout.run_round(shard, layout.own_round(number)) == number
    assert (number - 1) % layout.count in layout.fragments[shard]


@given(layouts())
@settings(max_examples=examples(100))
def test_rounds_of_a_shard_follow_each_other_in_the_order_of_its_fragments(layout: Layout) -> None:
    for shard, fragments in enumerate(layout.fragments):
        rounds = list(layout.next_rounds(shard, 0, 3 * len(fragments)))
        assert rounds == sorted(rounds)
        assert [(number - 1) % layout.count for number in rounds] == list(fragments) * 3
        assert list(layout.next_rounds(shard, rounds[0], 2)) == rounds[1:3]


def test_a_run_with_one_shard_counts_as_before() -> None:
    layout = Layout.whole(3)
    fifth = snapshot(5, 1, 2)
    assert layout.in_run(0, fifth) is fifth
    assert list(layout.next_rounds(0, 4, 2)) == [5, 6]
    assert (layout.place(2), layout.shard_of(6), layout.own_round(6)) == ((0, 2), 0, 6)


def test_announcements_get_the_numbers_of_the_run() -> None:
    layout = Layout(((0, 3), (1, 2)))
    found = layout.event_in_run(1, snapshot(3, 0, 2))
    assert isinstance(found, Snapshot)
    assert (found.round, found.fragment, found.version) == (6, 1, 2)
    assert layout.event_in_run(1, Resume(4, 9)) == Resume(7, 9)
    assert layout.event_in_run(0, Marker(1, 0)) == Marker(1, 0)
    first = layout.in_run(1, snapshot(0, 1, 0))
    assert (first.round, first.fragment) == (0, 2)
    refused = layout.event_in_run(1, Refusal("a", "x", 0, 2, 77, 5, "a fragment that does not exist"))
    assert isinstance(refused, Refusal)
    assert (refused.round, refused.fragment) == (3, 2)
