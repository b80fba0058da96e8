"""What is said of a run: each problem when it is there and only then, its state and line, events, and the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.control import Control
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Counters, Evaluation, Note, Refusal, TapeEntry
from archipelago.broker.presence import Presence
from archipelago.broker.process import up_command
from archipelago.broker.redis.failures import refused_writes
from archipelago.broker.shards.reader import combined_status
from archipelago.broker.transport import Memory, MergerStatus
from archipelago.ops.launch.opening import CERTIFICATES
from archipelago.ops.watch import advice
from archipelago.ops.watch.advice import Problem, grouped, problems, rising, state_of, verdict
from archipelago.ops.watch.history import events_of
from archipelago.ops.watch.reading import RunReading, summarise
from archipelago.ops.watch.run_view import RunView
from archipelago.ops.watch.state_line import MOODS, state_line, steps_per_second
from tests import samples

NOW = 1.8e9
MANIFEST = samples.manifest()
ROUND = samples.commit([]).tape
#: The manifest of a run with a long interval.
RARE = replace(MANIFEST, config=replace(MANIFEST.config, sync=replace(MANIFEST.config.sync, interval=2400)))
SERVED: dict[str, Any] = {"merger": MergerStatus("m", 1, 4.0, 0.5), "covered": 1 << 40}


def tape_of(losses: Sequence[float], seconds: float = 1.0) -> list[TapeEntry]:
    """Return one round for each loss, `seconds` apart, the last of them at NOW."""
    begin = NOW - seconds * (len(losses) - 1)
    member = replace(ROUND.members[0], island="a")
    return [replace(ROUND, round=n + 1, step=1000, loss=loss, unix_seconds=begin + n * seconds, members=(member,))
            for n, loss in enumerate(losses)]  # fmt: skip


def view(*beats: Presence, tape: Sequence[TapeEntry] = (), **changes: Any) -> RunView:
    """Return a run that is half finished and served, with two healthy islands and those of `beats`."""
    usual = [Presence(samples.heartbeat(name), 0.5) for name in ("a", "b")]
    presences = {each.heartbeat.island: each for each in (*usual, *beats)}
    found = summarise(MANIFEST, tape or tape_of([2.0]), list(presences.values()), Counters(), memory=Memory(6, 10))
    return replace(found, **SERVED | changes)


def beat(island: str, age: float = 0.5, **changes: Any) -> Presence:
    return Presence(samples.heartbeat(island, **changes), age)


def codes(found: Sequence[Problem]) -> list[str]:
    return [problem.code for problem in found]


def look(seen: RunView, **changes: Any) -> list[str]:
    return codes(problems(replace(seen, **changes), NOW))


def status(**changes: Any) -> MergerStatus:
    return replace(MergerStatus("m", 1, 4.0, 0.5), **changes)


def test_a_healthy_run_has_no_problem() -> None:
    seen = view(tape=tape_of([3.0 - 0.01 * n for n in range(48)]))
    assert look(seen) == []


def remedies(seen: RunView) -> dict[str, str]:
    return {problem.code: problem.remedy for problem in problems(seen, NOW)}


def test_a_run_of_up_whose_redis_has_ended_is_continued_by_up() -> None:
    ended = view(beat("a", age=60.0), beat("b", age=60.0), merger=status(holder=""), address="URL")
    again = remedies(replace(ended, up="archipelago up --run demo"))
    assert again["run.no-islands"] == again["merger.missing"] == "Continue the run with `archipelago up --run demo`."
    assert "archipelago merger" in remedies(ended)["merger.missing"]


def test_each_steer_command_finds_the_run() -> None:
    control = Control.of({"merging": "paused", "sync.quorum": "many"})
    rising_again = tape_of([2.0] * 24 + [2.4] * 24)
    seen = [view(tape=tape, control=control, address="runs/sample/admin.join") for tape in ([LOWERED], rising_again)]
    found = {text for each in seen for text in remedies(each).values() if "archipelago steer" in text}
    assert len(found) == 4
    assert all("`archipelago steer runs/sample/admin.join --run sample " in text for text in found)


def test_only_a_folder_of_up_is_continued_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("runs/demo/redis", "runs/demo/merger", "a b/demo/redis", f"runs/shared/redis/{CERTIFICATES}"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert up_command(Path("runs/demo"), "demo") == "archipelago up --run demo"
    assert up_command(Path("runs/shared"), "shared") == "archipelago up --run shared --open"
    assert up_command(Path("a b/demo"), "demo") == f"archipelago up --run demo --folder '{tmp_path}/a b'"
    assert up_command(Path("runs/demo"), "other") == up_command(Path("runs/demo/merger"), "demo") == ""
    monkeypatch.chdir(tmp_path / "runs")
    assert up_command(Path("demo"), "demo") == f"archipelago up --run demo --folder {tmp_path}/runs"


def test_a_redis_that_refuses_writes_is_told_in_place_of_what_follows() -> None:
    refuses: dict[str, Any] = {"refuses_writes": refused_writes({"min_slaves_good_slaves": 0})}
    silent = view(beat("a", 90.0), beat("b", 80.0), merger=status(holder=""), **refuses)
    (found,) = problems(silent, NOW)
    assert (found.code, found.text) == (
        "redis.refuses-writes", "Redis has too few replicas that follow it, so it refuses writes.",
    )  # fmt: skip
    assert found.remedy.startswith("Start its replicas") and state_of(silent, [found]) == "stalled"
    assert look(view(merger=status(still_seconds=61.0), **refuses)) == ["redis.refuses-writes"]
    assert look(view(beat("b", 40.0), **refuses)) == ["island.silent"], "one may watch a run at a replica"
    for faults, also in ({"aof_last_write_status": "err"}, []), ({"rdb_last_bgsave_status": "err"}, ["run.stalled"]):
        stalled = view(merger=status(still_seconds=61.0), refuses_writes=refused_writes(faults))
        assert look(stalled) == ["redis.refuses-writes", *also], "Redis may take writes after a failed snapshot"


def test_a_merger_that_cannot_keep_up_is_a_problem() -> None:
    member = replace(ROUND.members[0], island="a", steps=2 * MANIFEST.config.sync.interval)
    usual = [replace(entry, members=(member,)) for entry in tape_of([2.0] * 40, 10.0)]
    slow = [replace(entry, busy_seconds=9.9, spectra_seconds=9.0) for entry in usual]
    assert look(view(tape=slow)) == ["merger.slow"]
    assert look(view(tape=slow, merger=status(holder=""))) == ["merger.missing"], "another problem says more"
    paused = view(tape=slow, control=Control(is_paused=True))
    assert look(paused) == ["run.paused"], "the recent rounds say nothing about now"
    assert "merger.slow" not in look(view(beat("a", 90.0), beat("b", 90.0), tape=slow)), "no island is live"
    waits = [replace(entry, busy_seconds=1.0) for entry in slow]
    assert look(view(tape=waits)) == [], "the islands are slow"
    turns = [replace(entry, epoch=n % 2, fragment=n % 2) for n, entry in enumerate(usual)]
    served = shards(MergerStatus("m", 1), MergerStatus("n", 1))
    half = [replace(entry, busy_seconds=10.0) for entry in turns]
    assert look(served, tape=half) == [], "two mergers that are busy half of the time are not one always busy"
    one = [replace(entry, busy_seconds=19.9 if entry.fragment else 1.0) for entry in turns]
    assert look(served, tape=one) == ["merger.slow"]


REFUSED = Refusal("a", "x", 0, 7, 0, 100, "staleness 40 is over the cap of 16")
EXPELLED = Refusal("b", "x", 0, 7, 0, 100, "expelled by the operator")


LOWERED = replace(tape_of([2.0])[0], members=(replace(ROUND.members[0], island="a", factor=0.2, score=0.1),))
CASES: list[tuple[RunView, list[str]]] = [
    (view(beat("a", 90.0), beat("b", 80.0)), ["run.no-islands", "island.silent", "island.silent"]),
    (view(beat("b", 40.0)), ["island.silent"]),
    (view(live=0, known=0), ["run.no-islands"]),  # A new run.
    (
        view(manifest=RARE, merger=status(still_seconds=350.0)),
        ["run.few-syncs"],
    ),  # A stride is 120 s; slow islands have three.
    (view(manifest=RARE, merger=status(still_seconds=361.0)), ["run.stalled", "run.few-syncs"]),
    (view(beat("b", 7200.0)), []),  # It is gone for good.
    (view(beat("b", 40.0, state="left")), []),
    (view(beat("b", link="thin link at 3.2 Mbit/s up: fewer bits")), ["island.thin-link"]),
    (view(beat("b", link="the Redis does not answer")), ["island.link"]),
    (view(beat("b", link="no merger serves the run"), merger=status(holder="")), ["merger.missing"]),
    (view(tape=[LOWERED]), ["island.lowered"]),
    (view(memory_bytes=79, memory_limit_bytes=100), ["redis.memory"]),
    (view(unreadable=("x",)), ["redis.unreadable"]),
    (view(merger=status(holder="")), ["merger.missing"]),
    (view(merger=status(still_seconds=61.0)), ["run.stalled"]),
    (view(beat("a", state="joining"), beat("b", state="joining"), merger=status(still_seconds=61.0)), []),
    (view(merger=status(still_seconds=61.0), control=Control.of({"merging": "paused"})), ["run.paused"]),
    (view(control=Control.of({"sync.quorum": "many"})), ["steer.ignored"]),
    (view(refusals=((NOW - 200.0, REFUSED),)), ["island.refused"]),
    (view(refusals=((NOW - 400.0, REFUSED),)), []),
    (view(refusals=((NOW - 9.0, EXPELLED),), control=Control.of({"island.b": "expel"})), ["island.refused"]),
    (view(refusals=((NOW - 9.0, EXPELLED),)), []),  # It was admitted again.
    (view(merger=MergerStatus()), []),  # This broker does not know its merger.
    (view(beat("a", 90.0), step=2000, rounds=20, merger=status(holder="")), []),  # The run is finished.
    (view(beat("a", 90.0), step=2000, rounds=19), ["run.few-syncs"]),
    (view(steps=9 * MANIFEST.config.sync.interval + 1), ["run.few-syncs"]),  # Long before its end.
]


def test_each_problem_is_found() -> None:
    for seen, expected in CASES:
        assert look(seen) == expected, seen


def shards(*each: MergerStatus) -> RunView:
    return view(shards=((0,), (1,)), merger=combined_status(each))


def test_a_shard_without_a_merger_or_at_a_standstill_is_named() -> None:
    found = problems(shards(MergerStatus("m", 1, 5.0), MergerStatus("", 1, 0.0, 7.0)))
    assert [(each.code, each.seconds) for each in found] == [("merger.missing", 7.0)]
    ended = replace(shards(MergerStatus("m", 1, 5.0), MergerStatus("", 1, 0.0, 7.0)), ended=(1,))
    assert problems(ended) == (), "a merger leaves a shard that has ended"
    assert found[0].text == "No merger serves shard 1, and the others go on."
    assert look(shards(MergerStatus("", 1), MergerStatus("", 1))) == ["merger.missing"]
    assert look(shards(MergerStatus("m", 1), MergerStatus("n", 1))) == []
    one = shards(MergerStatus("m", 1, 5.0, 1.0), MergerStatus("n", 1, 5.0, 90.0))
    (still,) = problems(one)
    assert (still.code, still.text) == ("run.stalled", "Nothing was merged in shard 1 for 90 s.")
    both = shards(MergerStatus("m", 1, 5.0, 80.0), MergerStatus("n", 1, 5.0, 90.0))
    assert [each.text for each in problems(both)] == ["Nothing was merged for 90 s."]


def test_each_problem_is_in_the_guide() -> None:
    source, guide = Path(advice.__file__), Path(__file__).parents[3] / "docs/guide/problems.md"
    known = set(re.findall(r'"([a-z]+\.[a-z-]+)", "(?:bad|warn|info)"', source.read_text(encoding="utf-8")))
    assert len(known) > 15
    assert {
        code for code in known if f'| <a id="{code}"></a>`{code}` | ' not in guide.read_text(encoding="utf-8")
    } == set()


def test_the_worst_comes_first() -> None:
    found = problems(view(beat("b", link="thin link"), merger=status(holder="")), NOW)
    assert [(problem.mood, problem.who) for problem in found] == [("bad", "merger"), ("info", "b")]
    assert all(problem.text and problem.remedy for problem in found)


def test_a_late_checkpoint() -> None:
    tape = tape_of([2.0] * 4, seconds=100.0)
    assert look(view(tape=tape, covered=0)) == []  # 4 rounds take 400 s.
    tape = tape_of([2.0] * 7, seconds=100.0)
    assert look(view(tape=tape, covered=0)) == ["checkpoint.late"]
    assert look(view(tape=tape, covered=2)) == []
    night = [replace(each, unix_seconds=each.unix_seconds - 36_000.0) for each in tape[:3]] + tape[3:]
    assert look(view(tape=night, covered=2), rounds=7) == []


def test_a_loss_that_rises_is_a_problem() -> None:
    for losses, rises in (
        ([2.0 + 0.02 * n for n in range(48)], True),
        ([3.0 - 0.02 * n for n in range(48)], False),
        ([2.0 + 0.3 * math.sin(7.0 * n) for n in range(48)], False),
        ([math.nan] * 40 + [1.0, 9.0], False),
        ([1.0] * 10 + [9.0] * 10, False),  # There are too few rounds.
    ):
        assert (rising(losses) is not None) is rises, losses
        assert look(view(tape=tape_of(losses)), rounds=1) == (["loss.rises"] if rises else [])


def test_events_about_which_something_has_to_be_done_have_a_remedy_and_repeated_refusals_are_counted() -> None:
    late = [(NOW + 10.0 + n, replace(REFUSED, island="b", round=n)) for n in range(3)]
    other = (NOW + 13.0, replace(REFUSED, reason="it is expelled"))
    notes = [Note(NOW, "b", "joined", "new"), Note(NOW + 11.5, "merger", "served", "in epoch 2")]
    notes += [
        Note(NOW + 20.0, "b", "replaced", "by another"),
        Note(NOW + 21.0, "merger", "refused", "it says what to do"),
    ]
    found = events_of(notes, [*late, other])
    assert [(event.unix_seconds - NOW, event.who, event.kind, event.times, bool(event.remedy)) for event in found] == [
        (0.0, "b", "joined", 1, False), (11.0, "b", "refused", 2, True), (11.5, "merger", "served", 1, False),
        (12.0, "b", "refused", 1, True), (13.0, "a", "refused", 1, True), (20.0, "b", "replaced", 1, True),
        (21.0, "merger", "refused", 1, False),
    ]  # fmt: skip
    assert found[1].remedy != found[4].remedy


# -- the state, and the line -------------------------------------------------------------------------------------------


NOTHING = summarise(MANIFEST, [], [], Counters())


def test_the_state_of_a_run() -> None:
    live: dict[str, Any] = {"known": 2, "live": 2, "rounds": 3}
    waiting = live | {"pending": 1}
    ended = {"known": 2, "rounds": 3, "step": 2000}
    paused = {"control": Control(is_paused=True)}
    for changes, seconds, word in (
        ({}, 0.0, "new"),
        ({"known": 2}, 0.0, "no islands"),
        ({"rounds": 3}, 0.0, "no islands"),
        ({"known": 2, "live": 2}, 0.0, "starting"),
        (live, 61.0, "stalled"),  # also if no contribution waits
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
        found = replace(NOTHING, **changes | {"merger": merger})
        assert state_of(found, problems(found)) == word, (changes, seconds)
        assert word in MOODS
    away = replace(NOTHING, unreachable={0: "gone"}, shards=((0, 1),), **live)
    assert state_of(away, problems(away)) == "shard away"


HANGS = UnreachableError("Redis does not answer", "The display continues by itself.")


PACED = [replace(ROUND, round=n, step=10 * n, unix_seconds=NOW - 40 + 4.0 * n) for n in range(1, 9)]


def reading(still_seconds: float = 0.5, holder: str = "m", **changes: Any) -> RunReading:
    found = summarise(MANIFEST, PACED, [beat("oslo")], Counters(1, 1))
    found = replace(found, **{"merger": status(holder=holder, still_seconds=still_seconds), **changes})
    return RunReading(found, NOW, problems(found, NOW))


def test_a_run_that_trains_has_an_estimate_and_no_old_figures() -> None:
    state = state_line(reading())
    assert (state.word, state.mood) == ("training", "good")
    assert state.share == pytest.approx(80 / 2000)
    assert state.seconds_left == pytest.approx((2000 - 80) / 2.5)
    assert math.isnan(state.since_unix_seconds)
    assert state.text == "training · 4% · about 13 min left"


@pytest.mark.parametrize(
    ("word", "still", "holder", "outage", "since"),
    [
        ("no answer", 0.5, "m", HANGS, NOW),
        ("no merger", 7.0, "", None, NOW - 7.0),
        ("stalled", 90.0, "m", None, NOW - 90.0),
    ],
)
def test_a_run_that_stands_still_is_stalled_and_its_figures_have_a_time(
    word: str, still: float, holder: str, outage: UnreachableError | None, since: float
) -> None:
    state = state_line(reading(still, holder), outage)
    assert (state.word, state.mood, state.left, state.urgency) == (word, "warn", "stalled", "bad")
    assert math.isnan(state.seconds_left)
    assert state.since_unix_seconds == since
    assert state.sentence and state.remedy and state.about
    assert state_line(reading(still, holder, pending=0), outage).word == word, "also if nothing waits"


def test_a_run_that_trains_with_a_problem_is_not_good_and_names_its_code() -> None:
    silent = view(*(beat(f"i{n}", 20.0) for n in range(60)), tape=PACED)
    state = state_line(RunReading(silent, NOW, problems(silent, NOW)))
    assert (state.word, state.mood, state.urgency, state.about) == ("training", "warn", "warn", "island.silent islands")
    assert state.remedy.endswith("[island.silent]")
    assert state.sentence.startswith("60 islands: ") and "more)" not in state.sentence, "they are one problem"
    thin = view(beat("a", link="thin link at 3.2 Mbit/s up: fewer bits"), tape=PACED)
    assert state_line(RunReading(thin, NOW, problems(thin, NOW))).mood == "good", "nothing has to be done"


def test_a_finished_run_stays_finished_without_its_redis() -> None:
    ended = reading(step=2000, live=0, pending=0)
    for outage in (None, HANGS):
        state = state_line(ended, outage)
        assert (state.word, state.mood, state.share, state.left, state.urgency) == ("finished", "idle", 1.0, "", "idle")


def test_the_next_commands_of_a_finished_run_name_it_where_the_reader_finds_it() -> None:
    for address, folder, place in (
        ("eyes.join", "", "eyes.join --run sample"),
        ("", "", "--run sample"),
        ("runs/sample/admin.join", "runs/sample", "runs/sample"),
    ):
        remedy = state_line(reading(step=2000, live=0, pending=0, address=address, folder=folder)).remedy
        assert re.findall("`archipelago (.+?)`", remedy) == [
            f"report {place}", f"export {place} --out sample-model", f"generate {place}"
        ]  # fmt: skip


def test_before_the_first_reading() -> None:
    assert state_line(None).word == "reading"
    assert state_line(None, HANGS).word == "no answer"


def test_the_speed_of_a_run_leaves_out_a_night_without_rounds() -> None:
    assert math.isnan(steps_per_second([ROUND, ROUND])), "this tape has no times"
    assert steps_per_second(PACED) == pytest.approx(2.5)
    assert math.isnan(steps_per_second(PACED[:1]))
    times = [10.0 * n + (36_000.0 if n > 4 else 0.0) for n in range(8)]
    tape = [replace(ROUND, step=8 * n, unix_seconds=1e9 + at) for n, at in enumerate(times)]
    assert steps_per_second(tape) == pytest.approx(0.8)
    assert steps_per_second(tape[:6]) == pytest.approx(0.8), "the rounds before the night count"


# -- whether it learns, and problems of many islands -----------------------------------------------------------


def evaluated(losses: Sequence[float], training: float = 2.0) -> RunView:
    seen = [Evaluation(n, n, n, 1.7e9 + n, loss) for n, loss in enumerate(losses, 1)]
    tape = [replace(ROUND, loss=training)]
    return summarise(MANIFEST, tape, [], Counters(), seen)


@pytest.mark.parametrize(
    ("losses", "begin"),
    [
        ([5.0, 4.0], "Best held-out loss so far: 4.0000, after round 2."),
        ([5.0, 4.0, 3.0, 2.0], "It learns: the held-out loss is at its best, 2.0000, after round 4."),
        ([5.0, 4.0, 3.0, 3.01], "It is level"),
        ([5.0, 2.0, 2.001, 2.002, 2.003, 2.004], "It is level"),
        ([5.0, 2.0, 3.0, 3.0, 3.0, 4.0], "It does not learn any more: the best held-out loss was 2.0000"),
        ([1.0, 1.5e-4], "Best held-out loss so far: 0.000150, after round 2."),
        ([1.0, 0.0], "Best held-out loss so far: 0.0000, after round 2."),
        ([1.0, 0.0, 0.2, 0.2, 0.2, 0.2], "It does not learn any more: the best held-out loss was 0.0000"),
        (
            [1.0, 0.0, 0.0, 0.0, 0.0],
            "It is level: the best held-out loss was 0.0000, after round 2; the newest is 0.0% ",
        ),
        ([-1.0, -2.0, -1.0, -1.0, -1.0, -1.0], "It does not learn any more: the best held-out loss was -2.0000"),
        ([], "Nothing was evaluated yet."),
    ],
)
def test_the_verdict_names_the_best_when_it_was_and_the_trend(losses: Sequence[float], begin: str) -> None:
    assert verdict(evaluated(losses)).startswith(begin)
    assert " 1 evaluations" not in verdict(evaluated(losses))


def test_a_run_of_scripts_without_losses_says_so() -> None:
    assert "no losses" in verdict(evaluated([], training=math.nan))
    assert verdict(replace(evaluated([]), tape=())) == ""


def test_a_problem_of_many_islands_is_shown_once_with_their_names_and_the_whole_command() -> None:
    silent = [beat(name, 20.0 + n) for n, name in enumerate(["a", "island", "b", "log", "it"])]
    found = problems(view(*silent, address="runs/sample/admin.join"))
    (problem,) = [each for each in grouped(found) if each.code == "island.silent"]
    assert (problem.who, problem.names, problem.seconds) == ("5 islands", ("a", "b", "island", "log", "it"), 24.0)
    assert "`archipelago island runs/sample/admin.join --run sample --name NAME`" in problem.remedy
    assert problem.remedy.replace("NAME", "a") == next(each.remedy for each in found if each.who == "a")
    few = [Problem("island.link", "warn", name, "x", "y") for name in ("a", "b")]
    assert grouped(few) == few
