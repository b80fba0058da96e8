"""The view of a run: each number is compared with a calculation by hand, and the terminal shows all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from archipelago.broker.config import OWN_MODEL, ModelConfig
from archipelago.broker.messages import COPIED, UNCOPIED, Counters, Evaluation, Note, RoundMember, TapeEntry
from archipelago.broker.presence import LIVE_SECONDS, Presence
from archipelago.broker.transport import Memory
from archipelago.ops.watch.advice import problems, state_of
from archipelago.ops.watch.formatting import number, size
from archipelago.ops.watch.history import RECENT_ROUNDS
from archipelago.ops.watch.reading import RunReading, summarise
from archipelago.ops.watch.run_view import RunView, evaluated
from archipelago.ops.watch.status import problem_lines, render
from tests import samples
from tests.samples import member

MANIFEST = samples.manifest()  # The model has 8·4 + 4·4 + 4·3 + 4 = 64 parameters in two fragments.
ROUND = samples.commit([]).tape


def entry(number: int, members: Sequence[RoundMember], **changes: Any) -> TapeEntry:
    return replace(ROUND, round=number, step=10 * number, members=tuple(members), **changes)


TAPE = [
    entry(1, [member("a")], loss=9.0, grace_seconds=0.1, open_seconds=0.4),
    entry(2, [member("a", 1), member("b", 4)], loss=3.0, grace_seconds=0.3, open_seconds=0.8),
    entry(3, [], loss=math.nan, grace_seconds=0.2, open_seconds=0.6),
    entry(4, [member("a"), member("a", 2), member("gone")], loss=5.0, grace_seconds=0.2, open_seconds=0.2),
]
PRESENCES = [
    Presence(samples.heartbeat("a", tokens=1000, tokens_unsent=60), 0.5),
    Presence(
        samples.heartbeat("b", tokens=500, tokens_unsent=20, link="the Redis does not answer [red]x[/]"), LIVE_SECONDS
    ),
    Presence(samples.heartbeat("c", "joining", tokens=0, loss=math.nan, last_refusal="too old"), 3.0),
    Presence(samples.heartbeat("d", "left", tokens=70, bytes_down=6_000_000), 1.0),
    Presence(samples.heartbeat("e", "leaving", tokens=7), 9.9),
]
COUNTERS = Counters(published=10, published_tokens=3744, merged=6, merged_tokens=3345, refused=1, refused_tokens=100,
              bytes_up=5_000)  # fmt: skip
EVALUATIONS = [Evaluation(n, 0, 0, 0.0, bits) for n, bits in enumerate([8.0, 5.0, 4.25])]
ACCOUNTS = {"a": [1801], "b": [400], "d": [140], "e": [4], "x": [1000]}
MERGED = json.dumps({"accounts": ACCOUNTS, "tokens": 3345})
MEMORY = Memory(7_000, 0)
VIEW = summarise(MANIFEST, TAPE, PRESENCES, COUNTERS, EVALUATIONS, MERGED, MEMORY)


def test_the_run_matches_a_calculation_by_hand() -> None:
    assert (VIEW.run, VIEW.parameters, VIEW.fragments) == ("sample", 64, 2)
    assert (VIEW.rounds, VIEW.step, VIEW.steps) == (4, 40, MANIFEST.config.inner.steps)
    shorter = {"inner.steps": "30"}
    cut = summarise(MANIFEST, TAPE, [], COUNTERS, control=shorter)
    assert (cut.steps, cut.unfinished) == (40, False), "it has made more already"
    assert (VIEW.known, VIEW.live, VIEW.participating) == (5, 3, 1)  # a, c and e are live, and only a was merged.
    assert VIEW.contributions_per_round == (1 + 2 + 0 + 3) / 4
    assert VIEW.grace_seconds == pytest.approx(0.2)
    assert VIEW.open_seconds == pytest.approx(0.5)
    assert VIEW.loss == pytest.approx(
        5.0 / math.log(2.0)
    )  # In bits. The mean of the last round of each fragment, one of which has no loss.
    assert (VIEW.held_out_first, VIEW.held_out_last) == (8.0, 4.25)
    assert VIEW.tokens_merged == 1673  # A token is merged once it is in both fragments: ⌈3345 / 2⌉.
    assert VIEW.tokens_trained == 1000 + 500 + 0 + 70 + 7 + 1000 // 2  # An island of long ago has its merged tokens.
    assert (VIEW.tokens_refused, VIEW.tokens_pending) == (100 // 2, 299 // 2)
    assert (VIEW.pending, VIEW.memory_bytes) == (3, 7_000)
    assert VIEW.tokens_unsent == 60  # Island b is not live, so it will not send its tokens.
    assert VIEW.tokens_lost == VIEW.tokens_trained - 1673 - 50 - 149 - 60 == 145
    known = {name: ACCOUNTS[name] for name in "abde"}
    for accounts, tokens, why in (
        (known, 3345, "x was forgotten"),
        (known | {"a": [1001]}, 2545, "the state is older than the counters"),
    ):
        state = json.dumps({"accounts": accounts, "tokens": tokens})
        found = summarise(MANIFEST, TAPE, PRESENCES, COUNTERS, EVALUATIONS, state, MEMORY)
        assert (found.tokens_trained, found.tokens_lost) == (VIEW.tokens_trained, 145), why
    assert VIEW.counters == COUNTERS


def test_a_run_is_finished_only_when_each_shard_is() -> None:
    sharded, until_40 = replace(MANIFEST, shards=2), {"inner.steps": "40"}

    def view(tape: Sequence[TapeEntry], step: int = 0, **changes: Any) -> RunView:
        return summarise(sharded, tape, [], COUNTERS, state=json.dumps({"step": step}), control=until_40, **changes)

    behind = view(TAPE[:2] + TAPE[3:])  # one shard closed the rounds 2 and 4, and the other one round 1
    assert (behind.step, behind.unfinished, behind.syncs) == (40, True, (2 + 1) / 2)
    assert state_of(behind, problems(behind)) == "no islands"
    assert not replace(behind, pending=0).unfinished, "its last contributions were lost, and no island makes more"
    assert view(TAPE[3:]).unfinished, "the recent tape lacks the other shard"
    assert not view(TAPE[3:], step=40).unfinished, "the other shard ended long before"
    away = sharded.shard_layout.shard_of(3)
    assert not view(TAPE, unreachable={away: "gone"}).unfinished, "its steps are unknown"
    ended = view([*TAPE, entry(5, [member("a")])])
    assert (ended.unfinished, ended.syncs) == (False, 5 / 2)


def test_the_islands_match_a_calculation_by_hand() -> None:
    found = {island.name: island for island in VIEW.islands}
    assert list(found) == ["a", "b", "c", "d", "e"]
    assert [island.live for island in VIEW.islands] == [True, False, True, False, True]
    # An island that contributed to a round twice participated in it once.
    assert [island.participation for island in VIEW.islands] == [3 / 4, 1 / 4, 0, 0, 0]
    assert found["b"].last_seen_seconds == LIVE_SECONDS
    reported = samples.heartbeat("c", "joining", tokens=0, loss=math.nan, last_refusal="too old")
    shown = asdict(found["c"])
    for key, value in asdict(reported).items():
        if key in shown and key != "loss":
            assert shown[key] == value


def seen(
    tape: Sequence[TapeEntry] = (),
    presences: Sequence[Presence] = (),
    counters: Counters | None = None,
    evaluations: Sequence[Evaluation] = (),
    state: str = "",
) -> RunView:
    """Return the view of a run with these rounds and islands, and without anything else unless it is given."""
    return summarise(MANIFEST, tape, presences, counters or Counters(), evaluations, state, MEMORY)


def test_what_is_not_known_yet() -> None:
    view = seen()
    assert (view.rounds, view.step, view.known, view.live, view.participating) == (0, 0, 0, 0, 0)
    assert (view.contributions_per_round, view.grace_seconds, view.open_seconds) == (0.0, 0.0, 0.0)
    assert all(math.isnan(value) for value in (view.loss, view.held_out_first, view.held_out_last))
    assert view.islands == ()
    assert "ago" not in evaluated(view, 1090.0)
    own = replace(view, manifest=replace(MANIFEST, config=replace(MANIFEST.config, model=ModelConfig(size=OWN_MODEL))))
    assert "run.report" in evaluated(own, 1090.0), "only a script can evaluate its model"
    assert "`evaluate`" in evaluated(replace(own, manifest=replace(own.manifest, task="digits")), 1090.0)
    back = seen(evaluations=[replace(EVALUATIONS[0], round=3, unix_seconds=1000.0)])
    assert "of round 3 (before the run went back)" in evaluated(back, 1090.0)
    text = words(shown(view, 80))
    assert "0 known, 0 live, 0 participating" in text
    assert "training loss –, in bits per byte" in text
    (island,) = seen(presences=PRESENCES[:1]).islands
    assert (island.live, island.participation) == (True, 0.0)
    assert math.isnan(seen([entry(n, [member("a")], loss=math.nan) for n in (1, 2)]).loss), "it was not measured"
    once = seen(evaluations=EVALUATIONS[1:2])
    assert (once.held_out_first, once.held_out_last) == (5.0, 5.0)


def test_the_age_of_the_newest_evaluation_is_known() -> None:
    known = [Evaluation(2, 0, 0, 1000.0, 5.0), Evaluation(3, 0, 0, 1060.0, 4.0, "b")]
    view = seen([entry(number, [member("a")]) for number in range(1, 8)], evaluations=known)
    said = evaluated(view, 1090.0)
    assert "30 s ago by b" in said
    assert "round 3 (4 rounds ago)" in said
    assert "0 s ago" in evaluated(view, 1000.0), "the clock of the island is ahead"


def test_a_view_has_what_is_there_and_only_the_recent_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = samples.merged_one_of_three(EVALUATIONS[0])
    reader, view = transport.reader, samples.view_of(transport)
    assert (view.rounds, view.known, view.live, view.participating, view.pending) == (1, 1, 1, 1, 2)
    assert (view.counters.published, view.counters.merged, view.held_out_last) == (3, 1, 8.0)
    (newest,) = reader.tape(1)
    old = [replace(newest, round=0, members=()) for _ in range(RECENT_ROUNDS)]
    monkeypatch.setattr(reader, "tape", lambda count: [*old, newest])
    (island,) = samples.view_of(transport).islands
    assert island.participation == pytest.approx(1 / RECENT_ROUNDS), "only the recent rounds count"


def test_copies_to_a_bucket_fail_until_the_mergers_of_all_shards_say_that_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = samples.merged_one_of_three(EVALUATIONS[0])
    served, works = ("served", "epoch 2"), (COPIED, "copied again")
    fails, other = ((UNCOPIED, f"checkpoints stay on the disk only: {why}") for why in ("503", "denied"))
    for notes, expected in (
        ((served, fails), fails),
        ((served, fails, works), None),
        ((served, fails, other, works), other),
        ((served, fails, other, works, works), None),
        ((served, fails, served), None),
        ((served, fails, served, fails), fails),
        ((served, works, fails), fails),
    ):
        said = [Note(0.0, "merger", kind, text) for kind, text in notes]
        said.append(Note(0.0, "a", COPIED, "an island's"))
        monkeypatch.setattr(transport.reader, "notes", lambda count, said=said: said)
        view = samples.view_of(transport)
        assert view.uncopied == (expected[1] if expected else ""), notes
        finished = replace(view, step=view.steps, pending=0)
        for each in (view, finished):
            assert ("bucket.behind" in {problem.code for problem in problems(each)}) == bool(expected)


def test_an_island_merged_beyond_its_last_heartbeat_lost_nothing() -> None:
    """The island may have died between two heartbeats."""
    gone = Presence(samples.heartbeat("d", tokens=70), 2 * LIVE_SECONDS)
    counters = Counters(published=1, published_tokens=200, merged=1, merged_tokens=200)
    view = seen(presences=[gone], counters=counters, state='{"accounts": {"d": [200]}}')
    assert (view.tokens_trained, view.tokens_merged, view.tokens_lost) == (100, 100, 0)


def test_a_state_of_any_form_is_read_as_far_as_possible() -> None:
    state = '{"accounts": {"a": [14]}, "refused": {"wire.payload": 2}, "covered": "many"}'
    view = seen(presences=PRESENCES[:1], state=state)
    assert (view.islands[0].tokens_merged, view.refused_by_code, view.covered) == (7, {"wire.payload": 2}, 0)
    for state in ("", "{}", "[]", "no JSON", '{"accounts": 3}', '{"accounts": {"a": ["many"]}}'):
        assert seen(presences=PRESENCES[:1], state=state).islands[0].tokens_merged == 0, state


def shown(view: RunView, width: int) -> str:
    console = Console(record=True, width=width, file=StringIO(), highlight=False)
    console.print(render(RunReading(view, 0.0, problems(view))))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    return text


def words(text: str) -> str:
    """Replace each run of white space, including line breaks, by one space."""
    return " ".join(text.split())


def test_a_terminal_shows_the_facts() -> None:
    for width in (80, 120):
        text = words(shown(VIEW, width))
        for fact in ("4.250", "7.213", "5 known, 3 live", "10 = merged 6", "lost 145", "6.0 MB"):
            assert fact in text
        score = " 1.00" if width >= 88 else ""
        for row in (f"a training 10 100 2.885 0.00 75%{score} 0 10 B", f"b silent 10 – 2.885 0.00 25%{score} 0 10 B"):
            assert row in text
        assert "does not answer" not in text  # The last link state of a silent island is not shown.


def test_a_finished_run_has_its_next_commands() -> None:
    ended = replace(VIEW, step=VIEW.steps, live=0, pending=0)
    assert all(f"archipelago {verb} " in words(shown(ended, 80)) for verb in ("report", "export", "generate"))


def test_numbers_are_not_cut_in_80_columns() -> None:
    busy = samples.heartbeat(
        "an-island-with-a-long-name-7", steps=123_456, tokens_per_second=1_234_567.0, loss=2.345, staleness=12.34,
        backlog=12, bytes_up=123_456_789_000, bytes_down=9_876_543, link="[red]no[/] link",
    )  # fmt: skip
    view = summarise(MANIFEST, TAPE, [Presence(busy, 8.6)], COUNTERS, memory=MEMORY)
    text = words(shown(view, 80))
    assert "training 123,456 1,234,567 3.383 12.34 0% 12 123 GB 9.9 MB 9 s" in text
    assert "an-island-" in text
    assert "[island.link]" in text, "the code by which the guide has the problem"
    # Text from islands is not interpreted as markup.
    assert "an-island-with-a-long-name-7: Its link fails: [red]no[/] link" in text
    assert "no held-out loss yet" in text


def test_formatted_sizes_and_numbers() -> None:
    sizes = {999: "999 B", 1000: "1.0 kB", 123_456: "123 kB", 7e15: "7.0 PB"}
    assert {count: size(count) for count in sizes} == sizes
    assert (number(1234.5678), number(0.5, 1), number(math.nan)) == ("1,234.568", "0.5", "–")
    small = {0.0: "0.000", 0.1: "0.100", 0.05: "0.0500", -0.00123456: "-0.00123", 1.2e-7: "1.20e-07"}
    assert {value: number(value) for value in small} == small
    assert number(0.05, 1) == "0.1", "no more digits than asked for"


def test_a_problem_of_many_islands_names_few_of_them() -> None:
    view = summarise(MANIFEST, TAPE, [Presence(samples.heartbeat(f"i{n:02}"), 20.0) for n in range(60)], COUNTERS)
    (line,) = [str(each) for each in problem_lines(view, problems(view)) if "island.silent" in str(each)]
    assert line.count("i0") == 8 and "and 52 more)" in line


def test_a_status_of_many_islands_says_how_many_more_there_are() -> None:
    names = [f"i{n:03}" for n in range(256)]
    presences = [
        Presence(samples.heartbeat(name, last_refusal="too old"), 99.0 * (n < 100)) for n, name in enumerate(names)
    ]
    view = summarise(MANIFEST, TAPE, presences, COUNTERS, memory=MEMORY)
    shown = Console(width=80, record=True)
    shown.print(render(RunReading(view, 0.0)))
    text = shown.export_text()
    assert "… and 217 more, of which 117 live" in text
    assert "… and 217 more problems" in text
    assert len(text.splitlines()) < 100
