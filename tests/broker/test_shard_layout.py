"""The fragments and rounds of shards."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.manifest import Layout, dealt
from tests.tiers import examples

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


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
def test_each_round_is_one_of_its_shard(layout: Layout, number: int) -> None:
    shard = layout.shard_of(number)
    assert (number - 1) % layout.count in layout.fragments[shard]
    assert layout.rounds[shard].following(number - 1, 1) == [number]
    assert layout.rounds[shard].until(number) == layout.rounds[shard].until(number - 1) + 1
    assert sum(layout.rounds[each].until(number) for each in range(layout.shards)) == number


@given(layouts())
@settings(max_examples=examples(100))
def test_rounds_of_a_shard_follow_each_other_in_the_order_of_its_fragments(layout: Layout) -> None:
    for shard, fragments in enumerate(layout.fragments):
        rounds = layout.rounds[shard].following(0, 3 * len(fragments))
        assert rounds == sorted(rounds)
        assert [(number - 1) % layout.count for number in rounds] == list(fragments) * 3
        assert layout.rounds[shard].following(rounds[0], 2) == rounds[1:3]


def test_a_run_with_one_shard_counts_as_without() -> None:
    layout = Layout(((0, 1, 2),))
    assert layout.rounds[0].following(4, 2) == [5, 6]
    assert (layout.shard_of(6), layout.rounds[0].until(6)) == (0, 6)
