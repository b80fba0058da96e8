"""An island's ledger: strides, the window, calls, refusals, and progress that is sent at most once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from archipelago.broker.messages import Call, Refusal, Snapshot
from archipelago.broker.shards.layout import Layout
from archipelago.islands.sync.ledger import AHEAD_STEPS_MIN, Ledger

#: Tokens of one step.
TOKENS = 10


def ledger(fragments: int = 2, interval: int = 8, window: int = 2) -> Ledger:
    return Ledger("a", "x", Layout.whole(fragments), interval, window)


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


@pytest.mark.parametrize(("is_served", "ahead"), [(False, 8), (True, AHEAD_STEPS_MIN)])
def test_the_schedule_waits_for_the_merger(is_served: bool, ahead: int) -> None:
    of = ledger()
    of.heard(snapshot(of, 1, step=100))
    of.adopted(snapshot(of, 1, step=100), keeps_progress=False)
    for _ in range(500):
        of.stepped(1, TOKENS, is_held=of.is_held(is_served=is_served))
    assert of.global_step == 100 + ahead
    assert of.counts[0].steps == 500
    of.heard(snapshot(of, 2, step=100 + ahead))
    assert not of.is_held(is_served=is_served)


def test_a_slow_link_lets_the_schedule_run_further_ahead() -> None:
    of = ledger()
    of.stepped(AHEAD_STEPS_MIN, TOKENS)
    assert of.is_held(is_served=True)
    assert not of.is_held(is_served=True, stretch=8.0)
    assert of.is_held(is_served=False, stretch=8.0)


# -- strides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "fragments", "window", "each_step"),
    [
        (8, 2, 2, [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]),  # a stride of 4
        (5, 2, 2, [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]),  # 2.5: owed after 2.5, 5, 7.5, 10 steps
        (7, 3, 2, [0, 0, 1, 0, 1, 0, 1, 0, 0, 1]),  # 7/3: owed after 2.3, 4.7, 7, 9.3 steps
        (3, 3, 3, [1, 1, 1, 1]),
        (4, 6, 6, [1, 2, 1, 2]),  # 1.5 contributions a step
        (2, 6, 6, [3, 3, 3]),
        (2, 6, 2, [2, 2, 2]),  # three are owed, the window lets two through
        (1, 1, 2, [1, 1, 1]),
        (1, 4, 64, [4, 4, 4]),  # a window over P is P: each fragment once a step
    ],
)
def test_a_stride_is_h_over_p_steps(interval: int, fragments: int, window: int, each_step: list[int]) -> None:
    alone = ledger(fragments, interval, window)
    sent = train(alone, len(each_step), closing=True)
    assert [len(rounds) for rounds in sent] == each_step
    assert flat(sent) == list(range(1, 1 + sum(each_step)))


@pytest.mark.parametrize(("interval", "fragments"), [(24, 6), (5, 2), (200, 6), (10, 7), (3, 7)])
def test_on_average_every_fragment_is_sent_every_h_steps(interval: int, fragments: int) -> None:
    sent = flat(train(ledger(fragments, interval, fragments), 20 * interval, closing=True))
    assert len(sent) == 20 * fragments


def test_a_scan_over_several_strides_owes_all_of_them() -> None:
    scanning = ledger(fragments=4, interval=8, window=4)
    scanning.stepped(6, 60)
    assert send_due(scanning) == [1, 2, 3]


# -- the window ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "fragments"), [(1, 3), (2, 3), (3, 3), (9, 3)])
def test_an_island_without_events_fills_one_window(window: int, fragments: int) -> None:
    deaf = ledger(fragments, interval=6, window=window)
    sent = flat(train(deaf, 100, closing=False))
    assert sent == list(range(1, 1 + min(window, fragments)))
    assert deaf.global_step == 100
    assert deaf.due() is None


@pytest.mark.parametrize(("interval", "fragments", "burst"), [(8, 2, 1), (5, 2, 1), (8, 8, 1), (2, 6, 3), (4, 6, 2)])
def test_an_opening_window_causes_no_burst(interval: int, fragments: int, burst: int) -> None:
    held_up = ledger(fragments, interval, window=fragments)
    sent = flat(train(held_up, 100, closing=False))
    assert sent == list(range(1, 1 + fragments))
    for number in sent:
        held_up.heard(snapshot(held_up, number))
    # One stride is owed, or as many as one step covers.
    assert 1 <= len(send_due(held_up)) <= burst
    assert send_due(held_up) == []


def test_the_window_begins_after_the_last_closed_round() -> None:
    island = ledger(fragments=4, interval=4, window=2)
    island.heard(snapshot(island, 5))
    sent = flat(train(island, 10, closing=False))
    assert sent == [6, 7]


# -- calls ---------------------------------------------------------------------------------------------------------


def test_a_call_is_answered_at_the_next_boundary_and_settles_the_stride() -> None:
    slow = ledger(fragments=2, interval=8)  # strides of 4
    slow.heard(Call(1, 0))
    assert slow.due() is None  # no step yet
    slow.stepped(1, TOKENS)
    assert send_due(slow) == [1]
    slow.heard(snapshot(slow, 1))
    assert train(slow, 4, closing=True) == [[], [], [], [2]]  # a whole stride later, not three steps later


def test_a_call_settles_a_nearly_complete_stride_too() -> None:
    slow = ledger(fragments=2, interval=8)
    train(slow, 3, closing=False)
    slow.heard(Call(1, 0))
    assert send_due(slow) == [1]
    assert train(slow, 3, closing=False) == [[], [], []]
    assert train(slow, 1, closing=False) == [[2]]


def test_called_rounds_are_answered_once_and_in_order() -> None:
    island = ledger(fragments=3, interval=300, window=3)
    for number in (3, 1, 3):
        island.heard(Call(number, number - 1))
    island.stepped(1, TOKENS)
    assert send_due(island) == [1, 3]
    island.heard(Call(1, 0))
    island.stepped(1, TOKENS)
    assert send_due(island) == []


def test_calls_for_closed_rounds_are_ignored() -> None:
    island = ledger()
    island.stepped(1, TOKENS)
    island.heard(snapshot(island, 2))
    island.heard(Call(1, 0))
    island.heard(Call(2, 1))
    assert island.due() is None


def test_a_call_lapses_when_its_round_closes_unanswered() -> None:
    island = ledger()
    island.heard(Call(1, 0))
    island.heard(snapshot(island, 1))
    island.stepped(1, TOKENS)
    assert island.due() is None


def test_nothing_is_sent_without_a_step() -> None:
    island = ledger(fragments=2, interval=1, window=2)
    island.stepped(1, TOKENS)
    assert send_due(island) == [1, 2]
    island.heard(snapshot(island, 1))
    island.heard(snapshot(island, 2))
    island.heard(Call(3, 0))
    assert island.due() is None
    island.stepped(1, TOKENS)
    assert send_due(island) == [3, 4]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_refused_round_can_be_answered_again() -> None:
    lone = ledger(fragments=1, interval=2, window=1)
    assert train(lone, 6, closing=False) == [[], [1], [], [], [], []]
    lone.heard(refusal(1))
    assert send_due(lone) == [1]
    assert (lone.refused, lone.last_refusal) == (1, "it was too old")


def test_refusals_of_others_and_of_former_incarnations_do_not_count() -> None:
    lone = ledger(fragments=1, interval=2, window=1)
    train(lone, 4, closing=False)
    lone.heard(refusal(1, island="b"))
    lone.heard(refusal(1, incarnation="y"))
    assert lone.due() is None
    assert (lone.refused, lone.last_refusal) == (0, "")


def test_the_refusal_of_a_repeat_keeps_the_first_contribution() -> None:
    lone = ledger(fragments=1, interval=2, window=1)
    train(lone, 4, closing=False)
    lone.heard(replace(refusal(1), repeat=True))
    assert lone.due() is None
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
    island.heard(Call(6, 1))
    island.resumed(0, 1, {4})
    assert island.staleness == 0.0  # the island is ahead of the broker
    island.stepped(2, 20)
    assert send_due(island) == [2, 3]  # round 4 is answered already, and the call of round 6 was lost
    island.adopted(snapshot(island, 1), keeps_progress=False)
    assert island.counts[0].version == 1
    island.heard(snapshot(island, 3))
    assert island.staleness == 0.5


# -- adoption ------------------------------------------------------------------------------------------------------


def test_sending_resets_the_counts_of_its_fragment() -> None:
    island = ledger(fragments=2, interval=8)
    train(island, 4, closing=False)
    assert [(c.steps, c.tokens) for c in island.counts] == [(0, 0), (4, 40)]
    train(island, 1, closing=False)
    assert [(c.steps, c.tokens) for c in island.counts] == [(1, 10), (5, 50)]


@pytest.mark.parametrize("keeps_progress", [False, True])
def test_adoption_zeroes_the_counts_unless_progress_is_kept(keeps_progress: bool) -> None:
    island = ledger()
    island.stepped(3, 30)
    island.adopted(snapshot(island, 1), keeps_progress)
    kept = (3, 30) if keeps_progress else (0, 0)
    assert [(c.steps, c.tokens, c.version) for c in island.counts] == [(*kept, 1), (3, 30, 0)]


def test_an_adopted_snapshot_closes_its_round() -> None:
    island = ledger(fragments=2, interval=2)
    island.adopted(snapshot(island, 3), keeps_progress=False)
    island.stepped(1, TOKENS)
    assert send_due(island) == [4]


def test_the_global_step_never_decreases() -> None:
    island = ledger()
    island.stepped(5, 50)
    island.adopted(snapshot(island, 1, step=3), keeps_progress=False)
    assert island.global_step == 5
    island.adopted(snapshot(island, 2, step=9), keeps_progress=False)
    assert island.global_step == 9
    island.stepped(1, TOKENS)
    assert island.global_step == 10


def test_staleness_is_the_mean_lag_behind_the_announced_versions() -> None:
    island = ledger(fragments=2)
    assert island.staleness == 0.0
    for number in (1, 2, 3):  # versions 1 and 1, then 2 of fragment 0
        island.heard(snapshot(island, number))
    assert island.staleness == 1.5
    island.adopted(snapshot(island, 3), keeps_progress=False)
    assert island.staleness == 0.5
    island.adopted(snapshot(island, 4), keeps_progress=False)  # before its announcement is processed
    assert island.staleness == 0.0


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


# -- any order of events -------------------------------------------------------------------------------------------


class LedgerHistory(RuleBasedStateMachine):
    """An island and a merger that calls and closes rounds at any time. Its events arrive late."""

    @initialize(fragments=st.integers(1, 4), interval=st.integers(1, 12), window=st.integers(1, 5), keeps=st.booleans())
    def begin(self, fragments: int, interval: int, window: int, keeps: bool) -> None:
        self.ledger = Ledger("a", "x", Layout.whole(fragments), interval, window)
        self.window = min(window, fragments)
        self.fragments = fragments
        self.keeps = keeps
        self.trained = 0
        self.sent = [0] * fragments
        self.dropped = [0] * fragments
        self.outstanding: set[int] = set()
        self.closed = 0
        self.news: list[Call | Snapshot | Refusal] = []
        self.global_step = 0

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        self.ledger.stepped(steps, TOKENS * steps)
        self.trained += TOKENS * steps

    @rule()
    def boundary(self) -> None:
        while (number := self.ledger.due()) is not None:
            assert number > self.ledger.closed
            assert number not in self.outstanding
            self.send(number)

    @rule()
    def leave(self) -> None:
        """The ledger stays correct if the island continues after its farewells."""
        named = self.ledger.farewells()
        unsent = {p for p, count in enumerate(self.ledger.counts) if count.tokens}
        assert sorted(self.fragment(number) for number in named) == sorted(unsent)
        for number in named:
            self.send(number)
        assert self.ledger.farewells() == []
        self.outstanding &= set(range(self.ledger.closed + 1 + self.window))  # farewells look past the window

    def send(self, number: int) -> None:
        count = self.ledger.counts[self.fragment(number)]
        assert count.steps > 0
        assert count.tokens == TOKENS * count.steps
        self.sent[self.fragment(number)] += count.tokens
        self.outstanding.add(number)
        self.ledger.sent(number)

    @rule(ahead=st.integers(1, 5))
    def call(self, ahead: int) -> None:
        number = self.closed + min(ahead, self.window)
        self.news.append(Call(number, self.fragment(number)))

    @rule(step=st.integers(0, 100))
    def close(self, step: int) -> None:
        self.closed += 1
        self.news.append(snapshot(self.ledger, self.closed, step))

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        if self.outstanding:
            self.news.append(refusal(data.draw(st.sampled_from(sorted(self.outstanding)))))

    @rule()
    def resume(self) -> None:
        """Restart the merger and process all its events."""
        self.hear(len(self.news))
        self.ledger.resumed(0, self.closed, set(self.outstanding))

    @rule(count=st.integers(1, 4))
    def hear(self, count: int) -> None:
        for event in self.news[:count]:
            self.ledger.heard(event)
            if isinstance(event, Refusal):
                self.outstanding.discard(event.round)
        del self.news[:count]
        self.settle()

    @rule(data=st.data(), step=st.integers(0, 100))
    def adopt(self, data: st.DataObject, step: int) -> None:
        """Adopt the newest snapshot of a fragment, possibly before its announcement is processed."""
        p = data.draw(st.integers(0, self.fragments - 1))
        newest = max((n for n in range(1, self.closed + 1) if self.fragment(n) == p), default=0)
        found = snapshot(self.ledger, newest, step) if newest else None
        if found is None or found.version <= self.ledger.counts[p].version:
            return
        if not self.keeps:
            self.dropped[p] += self.ledger.counts[p].tokens
        self.ledger.adopted(found, self.keeps)
        self.settle()

    def settle(self) -> None:
        self.outstanding = {number for number in self.outstanding if number > self.ledger.closed}

    def fragment(self, number: int) -> int:
        return (number - 1) % self.fragments

    @invariant()
    def every_token_is_sent_at_most_once(self) -> None:
        for p, count in enumerate(self.ledger.counts):
            assert self.sent[p] + count.tokens + self.dropped[p] == self.trained

    @invariant()
    def undecided_rounds_fit_into_the_window(self) -> None:
        assert len(self.outstanding) <= self.window

    @invariant()
    def steps_and_rounds_never_decrease(self) -> None:
        assert self.ledger.global_step >= self.global_step
        self.global_step = self.ledger.global_step
        assert self.ledger.closed <= self.closed
        assert 0 <= self.ledger.staleness <= self.closed


TestLedgerHistory = LedgerHistory.TestCase
