"""`status --watch`: the screen fits any terminal, and it survives an outage."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from archipelago.broker.control import Control
from archipelago.broker.errors import ConfigError, UnreachableError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Counters, Evaluation, Refusal
from archipelago.broker.observe.logs import CONTROLS
from archipelago.broker.presence import Presence
from archipelago.broker.redis.administration import delete_shard
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory, MergerStatus, Transport
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.watch import formatting, status
from archipelago.ops.watch.advice import Problem, problems
from archipelago.ops.watch.history import Event
from archipelago.ops.watch.reading import RunReading, Watcher, summarise
from archipelago.ops.watch.run_view import RunView, describe_control
from archipelago.ops.watch.state_line import state_line
from tests import samples
from tests.failing import failing
from tests.intercept import Intercepted

NOW = 1.8e9
MANIFEST = samples.manifest()
ROUND = samples.commit([]).tape
FINE = MergerStatus("00b81fc22d7c", 3, 4.0, 0.5)


def view(islands: int = 3, live: int | None = None, **changes: object) -> RunView:
    """Return a run that is half finished."""
    live = islands if live is None else live
    presences = [
        Presence(samples.heartbeat(f"island-{n}", step_seconds=0.1), 0.5 if n < live else 90.0) for n in range(islands)
    ]
    member = replace(ROUND.members[0], island="island-0")
    tape = [replace(ROUND, round=70, step=1000, members=(member,))]
    found = summarise(MANIFEST, tape, presences, Counters(), memory=Memory(600, 1000))
    return replace(found, **{"merger": FINE, **changes})  # type: ignore[arg-type]


def reading(islands: int = 3, events: int = 0, live: int | None = None) -> RunReading:
    happenings = [Event(NOW - 60 + n, f"island-{n}", "refused", "too old " * 20) for n in range(events)]
    return RunReading(view(islands, live), NOW, events=happenings)


def drawn(shown: RunReading | None, width: int, height: int, outage: UnreachableError | None = None) -> list[str]:
    console = Console(record=True, width=width, height=height, file=StringIO(), highlight=False, force_terminal=True)
    console.print(status.live_screen(shown, outage, NOW, height))
    return console.export_text().rstrip("\n").split("\n")


# -- the screen -------------------------------------------------------------------------------------------------------


def test_it_fits_a_usual_terminal() -> None:
    for (width, height), islands, events in itertools.product(((80, 24), (100, 30), (200, 60)), (0, 3, 200), (0, 30)):
        lines = drawn(reading(islands, events), width, height)
        where = f"{width} x {height}, {islands} islands, {events} events"
        assert max(map(len, lines)) <= width, where
        assert len(lines) <= height, where
        text = "\n".join(lines)
        assert "(50%)" in text, where
        assert "island-0" in text or not islands, where
        assert "more, of which" in text or islands < 200, where


def test_one_line_says_of_which_round_the_held_out_loss_is() -> None:
    assert "held-out" not in status.line(reading())
    known = replace(view(), evaluations=[Evaluation(3, 0, 0, NOW, 2.5)], held_out_last=2.5)
    assert "round 70, step 1,000 of 2,000 · held-out 2.500 of round 3, training" in status.line(RunReading(known, NOW))


def test_the_next_line_does_not_repeat_a_problem() -> None:
    shown = RunReading(view(), NOW, problems=(Problem("run.few-syncs", "warn", "run", "It has few syncs.", "More."),))
    assert "training · 50% · It has few syncs · round" in status.line(shown, known="merger.slow merger")
    assert "training · 50% · round" in status.line(shown, known=state_line(shown).about)


def test_live_islands_and_events_are_shown() -> None:
    mixed = replace(reading(), view=view(50, live=2))
    mixed = replace(mixed, view=replace(mixed.view, islands=tuple(reversed(mixed.view.islands))))
    text = "\n".join(drawn(mixed, 80, 24))
    assert "island-0 " in text and "island-1 " in text, "live islands come first"
    assert "of which 0 live" in text
    text = "\n".join(drawn(reading(events=2, live=0), 80, 40))
    assert re.search(r"59 s ago refused +island-1 +too old .*…$", text, re.MULTILINE)


def test_the_worst_problem_and_an_outage_are_shown_above_the_last_reading() -> None:
    silent = Problem("island.silent", "warn", "bergen", "It sends no heartbeats.", "Start it again.")
    lines = drawn(replace(reading(), problems=[silent, replace(silent, who="oslo")]), 80, 24)
    assert [line.split(":")[0] for line in lines if "heartbeats" in line] == ["training · 50% · bergen"]
    assert any("[island.silent]" in line for line in lines)
    for last in (None, reading()):
        text = "\n".join(drawn(last, 80, 30, UnreachableError("Redis does not answer", "refused")))
        as_of = r" · figures as of \w+ \d+ \d\d:\d\d" if last else ""
        share = "50%" if last else "0%"
        assert re.search(
            rf"no answer · {share} · stalled{as_of} · Redis does not answer refused", " ".join(text.split())
        )
        assert ("island-0" in text) is (last is not None)
    assert "reading · 0%" in drawn(None, 80, 30)[1]


def test_spans_of_time() -> None:
    spans = {0.4: "0 s", 119: "119 s", 121: "2 min", 7200: "2 h", 259200: "3 d", -3: "0 s"}
    assert {seconds: formatting.ago(seconds) for seconds in spans} == spans


# -- words ------------------------------------------------------------------------------------------------------------


def test_controls_are_described_in_words() -> None:
    wishes = {"outer.learning_rate": "0.5", "merging": "paused", "island.oslo": "drain", "island.x": "expel", "y": "1"}
    text = describe_control(Control.of(wishes))
    assert [part.split()[0] for part in text.split(", ")] == ["merging", "outer.learning_rate", "oslo", "x", "y"]
    assert describe_control(Control()) == ""
    assert "1234567" in describe_control(Control.of({"inner.steps": "1234567"}))


def test_control_characters_never_reach_the_terminal() -> None:
    evil = "\x1b]0;mine\x07\x9b2J[/nope]"
    found = view(run=evil, refusals=((NOW, Refusal("b", "x", 0, 7, 0, 100, evil)),),
                 control=Control(faults={evil: evil}), merger=MergerStatus(evil, 3, 4.0, 0.5))  # fmt: skip
    found = replace(found, islands=(replace(found.islands[0], link=evil, last_refusal=evil),))
    shown = RunReading(found, NOW, events=[Event(NOW, evil, "refused", evil)])
    console = Console(file=StringIO(), width=200, height=60, highlight=False)
    console.print(status.render(RunReading(found, NOW, problems(found))))
    console.print(status.live_screen(shown, UnreachableError(evil), NOW, 60))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert text.count("mine") >= 10
    assert not set(text) & set(map(chr, CONTROLS)) - {"\n"}


def test_the_exit_status_says_whether_a_run_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    url, run = f"fakeredis://{uuid.uuid4().hex}", "situation"
    transport = samples.begin(connect(url, run))
    options = status.StatusOptions(url, run, json=True)
    assert status.main(options) == 1
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["problems"]] == ["run.no-islands"]
    transport.island.heartbeat(samples.heartbeat("oslo"))
    assert status.main(options) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    transport.island.heartbeat(samples.heartbeat("oslo", link="the Redis does not answer"))
    assert [status.main(replace(options, strict=strict)) for strict in (False, True)] == [0, 1]
    transport.close()


# -- reading ----------------------------------------------------------------------------------------------------------


class Flaky(Intercepted):
    """A broker that can become unreachable."""

    silent = False

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.silent and name == "tape":
            raise UnreachableError("the Redis does not answer (Connection refused)")
        return method(*args, **kwargs)


@pytest.fixture
def flaky() -> Flaky:
    made = samples.begin(Flaky(MemoryBroker(clock=lambda: 100.0).connect("sample")))
    made.island.heartbeat(samples.heartbeat("a"))
    return made


def closed(transport: Transport, *rounds: int) -> None:
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    for number in rounds:
        commit = samples.commit([], round_number=number)
        transport.merger.commit(epoch, replace(commit, tape=replace(commit.tape, unix_seconds=NOW - 100 + number)))
    transport.merger.release(epoch)


def test_a_watcher_survives_an_outage(flaky: Flaky) -> None:
    times = iter([NOW + n for n in range(100)])
    watch = Watcher(flaky, clock=lambda: 0.0, wall=lambda: next(times))
    closed(flaky, 1, 2)
    assert watch.update()
    first = watch.latest
    assert first is not None
    assert first.view.rounds == 2
    flaky.silent = True
    assert not watch.update()
    since = watch.outage()
    assert since is not None
    assert "refused" in since.what
    assert not watch.update()
    assert (watch.latest, str(watch.outage())) == (first, str(since))
    flaky.silent = False
    closed(flaky, 3)
    flaky.reader.record_evaluation(Evaluation(3, 1, 1, NOW, 2.5))
    assert watch.update()
    assert watch.outage() is None
    assert watch.latest is not None
    assert watch.latest.view.rounds == 3
    assert [e.bits_per_byte for e in watch.latest.view.evaluations] == [2.5], "after an outage everything is read again"


def test_a_run_that_was_created_again_before_its_first_round_is_shown_as_it_is_now() -> None:
    transport = samples.begin(connect(f"fakeredis://{uuid.uuid4().hex}", "sample"))
    watch = Watcher(transport)
    assert watch.update()
    delete_shard(transport.connection)
    assert not watch.update()
    samples.begin(transport, fragments=4)
    assert watch.update()
    assert watch.latest is not None and watch.latest.view.fragments == 4


def test_it_needs_a_terminal() -> None:
    with failing(ConfigError, "config.value"):
        status.main(status.StatusOptions(watch=True))


# -- a real terminal --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.processes
def test_ctrl_c_ends_it(server: RedisServer) -> None:
    run = "terminal"
    transport = samples.begin(connect(server.url, run))
    transport.island.heartbeat(samples.heartbeat("oslo"))
    transport.close()
    terminal, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "archipelago", "status", "--watch", server.url, "--run", run],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}, stdin=subprocess.DEVNULL,
        stdout=child_end, stderr=subprocess.PIPE,
    )  # fmt: skip
    output = b""
    try:
        while b"oslo" not in output:
            assert process.poll() is None
            if select.select([terminal], [], [], 30.0)[0]:
                output += os.read(terminal, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert (process.communicate()[1], process.returncode) == (b"", 0)
        assert b"\x1b[?1049h" in output  # The code of the alternate screen.
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(child_end)
