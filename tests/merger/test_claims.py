"""What islands claim is bounded by what the merger sees, and rounds wait for islands that send and contribute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import (
    DataConfig,
    InnerConfig,
    RunConfig,
    SyncConfig,
)
from archipelago.broker.manifest import OwnRounds
from archipelago.broker.messages import Contribution
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.merger import claims
from archipelago.merger.claims import SILENT_ROUNDS, Account
from archipelago.merger.rounds import (
    NEWCOMERS_MIN,
    SILENT_SECONDS,
    SILENT_SECONDS_MAX,
    SPEED_MAX,
    Liveness,
    fastest_step_seconds,
)
from archipelago.merger.state import RunState
from tests import samples
from tests.tiers import examples

H, P = 24, 6
CONFIG = RunConfig(
    data=DataConfig(batch_size=2, sequence_length=8),
    inner=InnerConfig(steps=1000),
    sync=SyncConfig(interval=H, fragments=P),
)
BATCH = CONFIG.tokens_per_step
STRIDE = H / P


def claim(**changes: Any) -> Contribution:
    return samples.contribution(**changes)


# -- contradictions --------------------------------------------------------------------------------------------------


def test_impossible_claims_cannot_fill_the_counters() -> None:
    assert claims.counted_tokens(claim(tokens=100), CONFIG) == 100
    assert claims.counted_tokens(claim(tokens=1 << 53), CONFIG) * 1_000_000 < 1 << 62


# -- the work that weighs ----------------------------------------------------------------------------------------------


def seen(*claims_: Contribution, accounts: Mapping[str, Account] | None = None, **changes: Any) -> claims.SeenWork:
    """Return what weighs in round 8, before which the fragment has version 3."""
    values: dict[str, Any] = {
        "version": 3,
        "number": 8,
        "usual_batch": 0.0,
        "sync": CONFIG.sync,
        "rounds": OwnRounds(range(P), P),
    } | changes
    return claims.seen(claims_, accounts=accounts or {}, **values)


def test_steps_weigh_as_rounds_close() -> None:
    """An island that claims more than it can have done gains nothing, by any number of contributions."""
    most, known = 1 << 40, {"a": Account(round=7, credit=5), "b": Account(round=2)}

    def steps(island: str, claimed: int, base: int = 3) -> int:
        return seen(claim(island=island, steps=claimed, base=base), accounts=known).steps[0]

    assert [steps("new", claimed) for claimed in (1, H, most)] == [1, H, H]
    assert [steps("a", claimed) for claimed in (H, H + 5, most)] == [H, H + 5, H + 5]
    assert steps("b", most) == H + CONFIG.sync.window * H / P, "it covers an interval and the window"
    assert steps("b", most, base=0) == 4 * H + CONFIG.sync.window * H / P, "on a thin link"
    assert steps("a", most, base=0) == H + 5, "a stale base adds nothing to what rounds allow"
    both = seen(*(claim(island="a", sequence=n, steps=20) for n in (1, 0)), accounts=known)
    assert (both.steps, both.credit) == ([9, 20], {"a": 0})
    assert seen(claim(island="a", steps=4), accounts=known).credit == {"a": H + 1}
    long_ago = {"a": Account(round=-10_000)}
    assert seen(claim(island="a", steps=1), accounts=long_ago).credit["a"] < (CONFIG.sync.staleness_cap + 1) * P * H


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=99))
def test_an_island_weighs_no_more_steps_than_one_that_answers_all_rounds(claimed: list[int]) -> None:
    state, weighed = RunState(), 0
    for number, steps in enumerate(claimed, 1):
        found = seen(claim(steps=steps, base=0), number=number, accounts=state.accounts)
        state.after_round(number, 4, [claim(steps=steps)], {}, found.credit)
        weighed += found.steps[0]
        assert weighed <= number * H


def test_a_minority_cannot_make_larger_batches_weigh() -> None:
    def batches(sizes: list[int], islands: str, usual: float = 0.0) -> list[float]:
        every = [claim(island=i, tokens=4 * n, sequence=k) for k, (n, i) in enumerate(zip(sizes, islands, strict=True))]
        return list(seen(*every, usual_batch=usual).batches)

    assert batches([1, 64, 1, 1], "axbc") == [1] * 4
    assert batches([64, 64, 1, 1, 1], "xyabc") == [1] * 5
    assert batches([64, 64, 1, 1], "xxab") == [1] * 4, "one island sent two"
    assert batches([2, 2, 1, 1], "abcd") == [2, 2, 1, 1], "half of the islands"
    assert batches([64, 1], "xa") == [64, 1], "of two, nobody can tell which one is right"
    assert batches([64, 1], "xa", usual=2.0) == [2, 1], "in a small round, the run's other islands count"
    assert batches([], "") == []
    accounts = {"a": Account(round=9, batch=2.0), "b": Account(round=9, batch=4.0), "x": Account(round=9, batch=64.0)}
    assert claims.usual_batch(accounts, 9) == 4.0
    assert claims.usual_batch(accounts | {"c": Account(round=8 - SILENT_ROUNDS, batch=99.0)}, 9) == 4.0
    assert claims.usual_batch({}, 9) == 0.0


# -- speed -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=9), st.floats(1e-300, 1e9))
def test_a_minority_moves_the_fastest_speed_only_among_honest_speeds(honest: list[float], false: float) -> None:
    hostile = (len(honest) - 1) // 2
    reported = {f"h{i}": s for i, s in enumerate(honest)} | {f"x{i}": false for i in range(hostile)}
    fastest = fastest_step_seconds(reported, reported.keys())
    assert min(honest) / SPEED_MAX <= fastest <= max(min(honest), max(honest) / SPEED_MAX)


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 1.6), min_size=1))
def test_honest_step_times_are_believed(reported: dict[str, float]) -> None:
    assert fastest_step_seconds(reported, reported.keys()) == min(reported.values()), "they differ 16-fold"


def test_the_fastest_step_time_by_hand() -> None:
    reported = {"fast": 0.5, "slow": 2.0, "gone": 0.1, "new": 0.0, "odd": math.nan, "stuck": math.inf}
    assert fastest_step_seconds(reported, {"fast", "slow"}) == 0.5
    assert fastest_step_seconds(reported, {"slow"}) == 2.0
    for none_of in (set[str](), {"new", "odd", "stuck"}):  # no live island is known or has reported a time: use all
        assert fastest_step_seconds(reported, none_of) == 0.1
    assert fastest_step_seconds({"new": 0.0, "wrong": -1.0}, {"new"}) == 0.0
    assert fastest_step_seconds({"x": 1e-300, "a": 1.0, "b": 1.1, "c": 1.2}, set("abcx")) == 1.1 / 16
    assert fastest_step_seconds({"x": 1e-300, "a": 1.0}, set("ax")) == 1.0 / 256


# -- the schedule ----------------------------------------------------------------------------------------------------

LEAST = math.ceil(claims.STRIDES_OF_A_ROUND * STRIDE)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 40))
def test_the_schedule_follows_the_fastest_island(slower: list[int], rounds: int) -> None:
    step = 0
    for number in range(1, rounds + 1):
        furthest = math.ceil(number * STRIDE)
        others = {"fast": furthest} | {f"s{i}": furthest // (1 + slow) for i, slow in enumerate(slower)}
        step = claims.next_step(step, [claim(island="fast", global_step=furthest)], others, STRIDE, others.keys())
        assert step == furthest


@given(st.integers(1, (1 << 31) - 1), st.integers(1, 20))
def test_one_of_three_islands_cannot_end_the_run(claimed: int, rounds: int) -> None:
    step = 0
    for _ in range(rounds):
        members = [claim(island="x", global_step=claimed), claim(island="a", global_step=step + 1)]
        after = claims.next_step(step, members, {"a": step + 1, "b": step, "x": claimed}, STRIDE, set("abx"))
        assert step <= after <= step + LEAST
        step = after
    assert claims.next_step(0, [claim(island="x", global_step=claimed)], {}, STRIDE, set("ax")) <= LEAST
    assert claims.next_step(0, [claim(island="x", global_step=claimed)], {"a": 0}, STRIDE, {"x"}) <= LEAST


def test_islands_of_stretched_intervals_move_the_schedule_together() -> None:
    """On thin links, many strides go into one contribution. A single island is taken at its word."""
    assert claims.next_step(0, [claim(island="a", global_step=480)], {"a": 480}, STRIDE, {"a"}) == 480
    first = claims.next_step(0, [claim(island="a", global_step=480)], {"a": 480}, STRIDE, set("ab"))
    both = claims.next_step(first, [claim(island="b", global_step=470)], {"a": 480, "b": 470}, STRIDE, set("ab"))
    assert (first, both) == (LEAST, 470)
    others = {"a": 480, "b": 470, "x": 0}
    assert claims.next_step(first, [claim(island="a", global_step=480)], others, STRIDE, set("abx")) == 470
    assert claims.next_step(480, [claim(global_step=4)], {}, STRIDE) == 480
    assert claims.next_step(480, [], {}, STRIDE) == 480


# -- data ------------------------------------------------------------------------------------------------------------


def test_positions_that_no_island_can_have_reached_move_nothing() -> None:
    cursors = {"0": (2, 10), "1": (0, 0)}

    def believed(data: str, tokens: int = 4 * BATCH, sequences: int = 10_000) -> str:
        c = claim(data=data, tokens=tokens)
        return claims.believed_data(c, c.steps, cursors, CONFIG, sequences)

    assert believed("0:2:18 1:0:3") == "0:2:18 1:0:3"
    assert believed("0:2:0 0:2:9") == "0:2:0 0:2:9"  # nothing new
    reach = 4 * 4 * 2 + H * 2
    assert believed("0:99999999:0") == believed("0:3:1") == f"0:2:{10 + reach}"
    assert believed("0:99999999:0", sequences=50) == "0:3:0"
    assert believed("0:2:9999") == f"0:2:{10 + reach}"
    assert believed("0:3:0") == f"0:2:{10 + reach}"
    assert believed("0:3:0", sequences=50) == "0:3:0"
    assert believed("1:0:70 0:2:70") == f"1:0:70 0:2:{10 + reach - 70}"  # the ranges share the work of the contribution
    assert believed(f"1:0:{reach} 0:2:99") == f"1:0:{reach} 0:2:10"


def test_an_island_may_have_read_on_while_it_waited_and_as_rounds_closed() -> None:
    """While no merger serves, an island trains on. Its next contribution has few steps, and says all that was read."""

    def read(steps: int, account: Account | None, closed: int = 10) -> int:
        return claims.steps_read(claim(steps=steps), account, closed, H, P)

    assert (read(1 << 40, None), read(5, None)) == (claims.FIRST_BURST_INTERVALS * H, 5)
    assert read(1, Account(round=10)) == read(1, Account(round=12)) == claims.BURST_INTERVALS * H
    assert read(1, Account(round=10), 10 + P) == (claims.BURST_INTERVALS + 1) * H


def test_steps_that_were_claimed_long_ago_move_no_schedule() -> None:
    accounts = {"a": Account(round=10, global_step=4)}
    assert claims.global_steps(accounts, 10 + SILENT_ROUNDS) == {"a": 4}
    assert claims.global_steps(accounts, 11 + SILENT_ROUNDS) == {}


# -- heartbeats ------------------------------------------------------------------------------------------------------


class Watch:
    """A merger that looks at heartbeats each second. Islands that are not `frozen` send one each second."""

    def __init__(self) -> None:
        self.liveness = Liveness()
        self.now, self.closed = 0.0, 0

    def look(
        self, islands: Iterable[str], frozen: Iterable[str] = (), age: float = 0.5, since: float | None = None,
        **changes: Any,
    ) -> set[str]:  # fmt: skip
        self.now += 1.0
        beats = [Presence(samples.heartbeat(island, tokens=int(self.now), **changes), 0.5) for island in islands]
        beats += [Presence(samples.heartbeat(island), age) for island in frozen]
        return set(self.liveness.look(beats, self.now, self.closed, since))

    def contribute(self, *islands: str) -> None:
        for island in islands:
            self.liveness.heard(island, self.now, self.closed)


def test_a_heartbeat_that_never_changes_counts_for_ten_seconds() -> None:
    watch = Watch()
    found = [watch.look("a", frozen=["x"], age=0.25) for _ in range(int(LIVE_SECONDS) + 5)]
    assert found[0] == {"a", "x"}
    assert found[-1] == {"a"}
    assert Watch().look("a", frozen=["x"], age=-1e9) == {"a"}, "a life cannot be endless"
    watch, ages = Watch(), [0.1, 0.9, 0.2, 0.8] * 10
    again = [watch.look([], frozen=["a"], age=age) for age in ages]
    assert again == [{"a"}] * 40, "it may be written again with the same text"


def test_islands_that_never_contribute_stop_counting() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    idle = [f"x{i:03}" for i in range(1000)]
    assert len(watch.look(["a", "b", *idle])) == 2 + NEWCOMERS_MIN
    for _ in range(SILENT_ROUNDS + 1):
        watch.closed += 1
        watch.contribute("a", "b")
    watch.now += SILENT_SECONDS
    assert watch.look(["a", "b", *idle]) == {"a", "b"}
    assert len(watch.liveness.idle) == 1000


def test_an_island_that_stops_contributing_stops_counting_and_returns() -> None:
    watch = Watch()
    watch.contribute("a", "b")
    for _ in range(SILENT_ROUNDS + 1):
        assert watch.look("ab") == {"a", "b"}
        watch.closed += 1
        watch.contribute("a")
    watch.now += SILENT_SECONDS
    watch.contribute("a")
    assert watch.look("ab") == {"a"}
    watch.contribute("b")
    assert watch.look("ab") == {"a", "b"}


def test_nobody_stops_counting_while_no_round_waits() -> None:
    """A pause, an upload over a thin link, or an outage of all other islands may take days."""
    watch = Watch()
    watch.contribute("a", "b")
    watch.look("ab")
    for _ in range(10):
        watch.now += 5.0
        assert watch.look("abc") == {"a", "b", "c"}
    watch.now += 1e6
    assert watch.look("abc") == {"a", "b", "c"}
    assert watch.look("abc", since=watch.now - 100.0) == {"a", "b", "c"}, "the round has not waited for long"


def test_an_island_that_never_contributes_stops_no_round_for_ever() -> None:
    """With a quorum of two, no round closes without it."""
    for step_seconds, least, most in ((1.0, 890.0, 910.0), (1e9, 86_390.0, 86_410.0)):
        watch = Watch()
        watch.contribute("a")
        watch.look("a", step_seconds=step_seconds)
        watch.now += least
        assert watch.look("a", since=0.0, step_seconds=step_seconds) == {"a"}
        watch.now += most - least
        assert watch.look("a", since=0.0, step_seconds=step_seconds) == set()


def test_slow_islands_have_more_time() -> None:
    watch = Watch()
    watch.contribute("a")
    for _ in range(600):
        assert "slow" in watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    watch.now += 5.0
    for _ in range(int(SILENT_SECONDS_MAX)):
        watch.look(["slow"], step_seconds=1e9)
        watch.closed += 1
    assert watch.look(["slow"], step_seconds=1e9) == set()
