"""How often a run has synchronised its fragments, and how many steps enough syncs take."""

from __future__ import annotations

from archipelago.ops.watch.syncs import SYNCS_ENOUGH, in_words, steps_for_enough, syncs_of


def test_a_round_synchronises_one_fragment() -> None:
    assert syncs_of(48, 6) == 8.0
    assert syncs_of(0, 6) == 0.0


def test_enough_syncs_take_intervals_of_the_run() -> None:
    assert steps_for_enough(48, 6, 192, 24) == 24 * SYNCS_ENOUGH
    assert steps_for_enough(0, 6, 0, 24) == 24 * SYNCS_ENOUGH
    assert steps_for_enough(48, 6, 400, 24) == 50 * SYNCS_ENOUGH  # a slow link has stretched the interval


def test_a_short_run_of_several_islands_has_more_to_explain() -> None:
    short, long, alone = (
        in_words(48, 6, 192, 24, 3),
        in_words(6 * SYNCS_ENOUGH, 6, 3840, 24, 3),
        in_words(9, 6, 40, 24, 1),
    )
    assert f"{24 * SYNCS_ENOUGH:,}" in short
    assert len(short) > len(long) > len(alone)
