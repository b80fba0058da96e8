"""An island's ledger: strides, the window, calls and refusals. The simulation plays it with events in any order."""

from __future__ import annotations

from dataclasses import replace

from archipelago.broker.manifest import Layout
from archipelago.broker.messages import Call, Refusal, Snapshot
from archipelago.islands.sync.ledger import AHEAD_STEPS_MIN, Ledger

#: Tokens of one step.
TOKENS = 10


def ledger(fragments: int = 2, interval: int = 8, window: int = 2) -> Ledger:
    return Ledger("a", "x", Layout((tuple(range(fragments)),)), interval, window)


def snapshot(of: Ledger, number: int, step: int = 0) -> Snapshot:
    """Return the merger's announcement that the round has closed."""
    fragments = len(of.counts)
    version = (number - 1) // fragments + 1
    return Snapshot(number, (number - 1) % fragments, version, step, "float32", 0, "0" * 32, "")


def refusal(number: int, island: str = "a", incarnation: str = "x") -> Refusal:
    return Refusal(island, incarnation, 0, number, 0, 100, "it was too old")


def send_due(of: Ledger) -> list[int]:
    """Send all contributions that are owed at this boundary, as an island does."""
    sent = []
    while (number := of.due()) is not None:
        of.sent(number)
        sent.append(number)
    return sent


def train(of: Ledger, steps: int, *, closing: bool) -> list[list[int]]:
    """Return the rounds sent after each step. With `closing`, each is closed before the next step."""
    sent = []
    for _ in range(steps):
        of.stepped(1, TOKENS)
        sent.append(send_due(of))
        for number in sent[-1] if closing else ():
            of.heard(snapshot(of, number))
    return sent


def flat(each_step: list[list[int]]) -> list[int]:
    return [number for numbers in each_step for number in numbers]


# -- the schedule --------------------------------------------------------------------------------------------------


def test_the_schedule_waits_for_the_merger() -> None:
    for is_served, ahead in ((False, 8), (True, AHEAD_STEPS_MIN)):
        of = ledger(window=9)  # of which 2 are of use
        of.heard(snapshot(of, 1, step=100))
        of.adopted(snapshot(of, 1, step=100), keeps_progress=False)
        for _ in range(500):
            of.stepped(1, TOKENS, is_held=of.is_held(is_served=is_served))
        assert of.global_step == 100 + ahead
        assert of.counts[0].steps == 500
        assert of.is_held(is_served=True, stretch=8.0) is False, "a slow link lets the schedule run further ahead"
        of.heard(snapshot(of, 2, step=100 + ahead))
        assert not of.is_held(is_served=is_served)


# -- the window ----------------------------------------------------------------------------------------------------


def test_an_island_without_events_fills_one_window() -> None:
    for window, fragments in ((1, 3), (2, 3), (3, 3), (9, 3)):
        deaf = ledger(fragments, interval=6, window=window)
        assert flat(train(deaf, 100, closing=False)) == list(range(1, 1 + min(window, fragments)))
        assert deaf.global_step == 100
        assert deaf.due() is None
    island = ledger(fragments=4, interval=4, window=2)
    island.heard(snapshot(island, 5))
    assert flat(train(island, 10, closing=False)) == [6, 7], "the window begins after the last closed round"


def test_an_opening_window_causes_no_burst() -> None:
    for interval, fragments, burst in ((8, 2, 1), (5, 2, 1), (8, 8, 1), (2, 6, 3), (4, 6, 2)):
        held_up = ledger(fragments, interval, window=fragments)
        for number in flat(train(held_up, 100, closing=False)):
            held_up.heard(snapshot(held_up, number))
        # One stride is owed, or as many as one step covers.
        assert 1 <= len(send_due(held_up)) <= burst, (interval, fragments)
        assert send_due(held_up) == []


# -- calls ---------------------------------------------------------------------------------------------------------


def test_a_call_is_answered_at_the_next_boundary_and_settles_the_stride() -> None:
    slow = ledger(fragments=2, interval=8)  # strides of 4
    slow.heard(Call(1, 0))
    assert slow.due() is None  # no step yet
    slow.stepped(1, TOKENS)
    assert send_due(slow) == [1]
    slow.heard(snapshot(slow, 1))
    assert train(slow, 4, closing=True) == [[], [], [], [2]]  # a whole stride later, not three steps later


def test_calls_for_closed_rounds_are_ignored_and_lapse_when_their_round_closes() -> None:
    island = ledger()
    island.stepped(1, TOKENS)
    island.heard(Call(1, 0))
    island.heard(snapshot(island, 2))
    island.heard(Call(1, 0))
    island.heard(Call(2, 1))
    assert island.due() is None


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_refused_round_can_be_answered_again() -> None:
    lone = ledger(fragments=1, interval=2, window=1)
    assert train(lone, 6, closing=False) == [[], [1], [], [], [], []]
    lone.heard(refusal(1))
    assert send_due(lone) == [1]
    assert (lone.refused, lone.last_refusal) == (1, "it was too old")


def test_refusals_of_others_of_former_incarnations_and_of_repeats_do_not_count() -> None:
    lone = ledger(fragments=1, interval=2, window=1)
    train(lone, 4, closing=False)
    for other in (refusal(1, island="b"), refusal(1, incarnation="y"), replace(refusal(1), repeat=True)):
        lone.heard(other)
        assert lone.due() is None, other
        assert (lone.refused, lone.last_refusal) == (0, "")


# -- restarts of the merger ----------------------------------------------------------------------------------------


def test_after_a_resume_only_unresolved_rounds_are_answered() -> None:
    island = ledger(fragments=4, interval=4, window=3)
    assert flat(train(island, 4, closing=False)) == [1, 2, 3]
    island.resumed(0, 0, {1, 3})
    island.stepped(1, TOKENS)
    assert send_due(island) == [2]
    island.heard(snapshot(island, 2))
    island.resumed(0, 2, {1, 2, 3})
    island.stepped(4, 40)
    assert send_due(island) == [4, 5]


def test_after_a_loss_an_island_goes_back_to_the_brokers_round() -> None:
    island = ledger(fragments=2, interval=2, window=2)
    for number in (1, 2, 3, 4):
        island.adopted(snapshot(island, number), keeps_progress=False)
    island.heard(snapshot(island, 5))
    island.heard(Call(6, 1))
    island.resumed(0, 1, {4})
    assert island.staleness == 0.0  # the island is ahead of the broker, which has lost round 5
    island.stepped(2, 20)
    assert send_due(island) == [2, 3]  # round 4 is answered already, and the call of round 6 was lost
    island.adopted(snapshot(island, 1), keeps_progress=False)
    assert island.counts[0].version == 1
    island.heard(snapshot(island, 3))
    assert island.staleness == 0.5


def test_shards_have_rounds_strides_and_losses_of_their_own() -> None:
    island = Ledger("a", "x", Layout(((0,), (1, 2))), 8, 1)
    assert train(island, 8, closing=True) == [[], [2], [], [], [], [3], [], [1]]
    assert island.closed == 3
    island.stepped(8, 80)
    assert [island.due(blocked) for blocked in ((0,), (1,), (0, 1))] == [5, 4, None]
    for number, step in ((1, 9), (2, 5), (3, 7)):
        island.adopted(snapshot(island, number, step), keeps_progress=False)
    island.resumed(0, 0, set())
    assert [shard.closed for shard in island.shards] == [0, 3]
    assert island.global_step == 7, "the step of round 1 is lost, and round 3 is of the other shard"


# -- adoption ------------------------------------------------------------------------------------------------------


def test_adoption_closes_its_round_and_zeroes_the_counts_unless_progress_is_kept() -> None:
    for keeps_progress, kept in ((False, (0, 0)), (True, (3, 30))):
        island = ledger(fragments=2, interval=2)
        island.stepped(3, 30)
        island.adopted(snapshot(island, 1), keeps_progress)
        assert [(c.steps, c.tokens, c.version) for c in island.counts] == [(*kept, 1), (3, 30, 0)]
        assert send_due(island)[0] == 2


def test_a_run_that_loses_rounds_takes_the_clock_back_to_its_last_step() -> None:
    for closed, step in ((4, 9), (3, 6), (2, 0)):
        island = ledger(fragments=2, interval=4, window=2)
        for number in (1, 2, 3, 4):
            island.adopted(snapshot(island, number, step=2 * number), keeps_progress=False)
        island.stepped(1, 10)
        island.resumed(0, closed, set())
        assert island.global_step == step, "a version that is left tells it, and else those that arrive now"
    island = ledger(fragments=2, interval=4, window=2)
    island.adopted(snapshot(island, 1, step=2), keeps_progress=False)
    island.resumed(0, 0, set())
    assert island.global_step == 0
    island.adopted(snapshot(island, 2, step=4), keeps_progress=False)
    island.adopted(snapshot(island, 1, step=2), keeps_progress=False)
    assert island.global_step == island.merged_step == 4


def test_a_version_with_other_parameters_is_not_held() -> None:
    """A broker that lost a round closes one of that number again."""
    island = ledger(fragments=2, interval=2)
    held = replace(snapshot(island, 1), held="a" * 32)
    island.adopted(held, keeps_progress=True)
    assert island.holds(held)
    assert not island.holds(replace(held, held="b" * 32))
    assert not island.holds(snapshot(island, 3))


# -- leaving -------------------------------------------------------------------------------------------------------


def test_farewells_name_every_fragment_with_unsent_progress_once() -> None:
    island = ledger(fragments=3, interval=300)
    assert island.farewells() == []
    island.heard(snapshot(island, 4))
    island.stepped(2, 20)
    assert island.farewells() == [5, 6, 7]  # fragments 1, 2, 0
    island.sent(5)
    assert island.farewells() == [6, 7]
    island.adopted(snapshot(island, 6), keeps_progress=False)
    assert island.farewells() == [7]
