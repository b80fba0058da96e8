"""What processes say: a line or an object per record, uncaught errors, progress, and never a control character."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import logs
from archipelago.broker.observe import progress as progress_module
from archipelago.broker.observe.logs import printable, printable_lines
from archipelago.broker.observe.progress import Activity, progress
from archipelago.broker.process import guarded
from archipelago.ops.settings import say
from tests.conftest import Until

ROOT = Path(__file__).parents[3]
Fields = dict[str, Any]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore logging and hooks, which belong to the process."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in (*logs.LOGGERS, "absl")]
    handlers, levels, filters = list(root.handlers), [log.level for log in (root, *ours)], list(ours[-1].filters)
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    ours[-1].filters[:] = filters
    for log, level in zip((root, *ours), levels, strict=True):
        log.setLevel(level)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def objects(text: str) -> list[Fields]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_is_one_object_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now(UTC)
    origin = logs.log_to_stderr("oslo", as_json=True, island="oslo")
    log = logging.getLogger("archipelago.test")
    log.info("joined %s", "a\nrun", extra={"round": 0})
    origin.run = "demo"
    log.warning("refused → “%s”", "why", extra={"round": 7})
    log.debug("not said")
    for error in (ValueError("two\nlines"), ConfigError("the port is taken", code="config.taken")):
        try:
            raise error
        except (ValueError, ConfigError):
            log.exception("it failed")
    first, second, failed, coded = objects(capsys.readouterr().err)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(first.pop("time")) <= datetime.now(UTC)
    assert first == {"level": "info", "who": "oslo", "island": "oslo", "round": 0, "message": "joined a\nrun"}
    del second["time"]
    assert second == {
        "level": "warning", "who": "oslo", "run": "demo", "island": "oslo", "round": 7, "message": "refused → “why”",
    }  # fmt: skip
    assert (failed["level"], failed["message"], failed["run"]) == ("error", "it failed", "demo")
    assert failed["exception"].startswith("Traceback (most recent call last):")
    assert failed["exception"].endswith("ValueError: two\nlines")
    assert coded["code"] == "config.taken"


def test_without_json_a_record_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", run="demo")
    logging.getLogger("archipelago.test").info("serving from round %s", 7, extra={"round": 7})
    at, rest = capsys.readouterr().err.split(" ", 1)
    assert datetime.strptime(at, "%H:%M:%S")
    assert rest == "merger serving from round 7\n"


def test_lines_of_a_later_day_have_its_date(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", run="demo")
    record = logging.makeLogRecord({"name": "archipelago.test", "levelno": logging.INFO, "msg": "serving"})
    record.created += 2 * 86400
    logging.getLogger("archipelago.test").handle(record)
    line = capsys.readouterr().err
    assert line == time.strftime("%b %d %H:%M:%S merger serving\n", time.localtime(record.created))


def test_a_final_error_has_the_requested_form(capsys: pytest.CaptureFixture[str]) -> None:
    def main(as_json: bool) -> int:
        logs.log_to_stderr("merger", as_json=as_json, run="demo")
        raise ConfigError("the port is taken", "Choose another.", code="config.taken")

    assert guarded(lambda: main(False)) == 2
    said = capsys.readouterr().err
    assert said == "error: the port is taken. Choose another. [config.taken]\n"
    assert guarded(lambda: main(True)) == 2
    (found,) = objects(as_object := capsys.readouterr().err)
    assert (found["level"], found["code"]) == ("error", "config.taken")
    assert found["message"] == logs.message_of(as_object.strip()) == "the port is taken. Choose another."
    for line, message in (("error: no", "error: no"), ('{"message": "no"}', "no"), ("[1]", "[1]"), ("{}", "{}"),
                          ("", "")):  # fmt: skip
        assert logs.message_of(line) == message


SET_UP = (
    "import threading, warnings; from archipelago.broker.observe import logs; logs.log_to_stderr('oslo', as_json={})"
)
ENDS = "; ".join(
    [
        "t = threading.Thread(target=lambda: 1 / 0, name='link-send')",
        "t.start()",
        "t.join()",
        "C = type('C', (), {'__del__': lambda self: 1 / 0})",
        "C()",
        "warnings.warn('old')",
        "raise RuntimeError('the end')",
    ]
)


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_uncaught_error_is_one_object_or_a_traceback() -> None:
    found = ended(f"{SET_UP.format(True)}; {ENDS}")
    *raised, warned, end = objects(found.stderr)
    assert found.returncode == 1
    assert {record["who"] for record in (*raised, warned, end)} == {"oslo"}
    last_lines = [record["exception"].splitlines()[-1] for record in (*raised, end)]
    assert last_lines == [*["ZeroDivisionError: division by zero"] * 2, "RuntimeError: the end"]
    assert "UserWarning: old" in warned["message"]
    found = ended(f"{SET_UP.format(False)}; raise RuntimeError('the end')")
    assert found.stderr.startswith("Traceback (most recent call last):")
    assert found.stderr.endswith("RuntimeError: the end\n")


# -- late answers to a failed write ----------------------------------------------------------------------------------


def closed_loop_error(straight: bool) -> RuntimeError:
    """Return the error of a closed loop, either with only the library's frame or with a caller's frame as well."""
    loop = asyncio.new_event_loop()
    loop.close()
    try:
        loop.call_soon_threadsafe(print)
    except RuntimeError as error:
        trace = error.__traceback__
        assert trace is not None
        return error.with_traceback(trace.tb_next) if straight else error
    raise AssertionError("the loop was closed")


def test_late_answers_and_errors_that_orbax_also_raises_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.is_late_answer(closed_loop_error(straight=True))
    assert not logs.is_late_answer(closed_loop_error(straight=False))  # Our own code called the loop.
    for error in (RuntimeError("Event loop is closed"), OSError(28, "No space left on device"), None):
        assert not logs.is_late_answer(error)
    logs.log_to_stderr("oslo")
    absl = logging.getLogger("absl")
    absl.error("[thread=x] _SignalingThread.run() raised an exception: no space")
    absl.warning("an optional file is missing")
    absl.error("something else is wrong")
    assert capsys.readouterr().err.split(" ", 2)[1:] == ["oslo", "something else is wrong\n"]


FULL = """
import resource, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import logs
from archipelago.merger.checkpoint import CheckpointStore
from tests import samples

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logs.log_to_stderr("merger")
manifest = samples.manifest(width=40_000)
image = samples.image(manifest, [], noise=np.random.default_rng(0).bytes(3_000_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
for number in (3, 4):
    try:
        CheckpointStore(Path(sys.argv[1])).save(replace(image, number=number))
    except ConfigError as error:
        print(error.code)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the size of files this way")
def test_a_full_disk_is_one_error_for_each_checkpoint_and_no_traceback(tmp_path: Path) -> None:
    """Orbax and tensorstore also report the failure from their own threads."""
    found = ended(FULL, str(tmp_path / "kept"))
    assert found.stderr == ""
    assert len(found.stdout.splitlines()) == 2


# -- text that came over the wire ------------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\r\u202e\x9b31m\u2028evil"


def harmless(shown: str) -> bool:
    return not any(character in shown for character in "\x1b\x07\r\u202e\x9b\u2028")


def test_a_line_of_a_script_goes_above_a_bar_of_rich() -> None:
    console, handler = Console(file=io.StringIO(), force_terminal=True), logs._AboveBars()
    with Live("a bar", console=console):
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
    assert "a line\na bar" in Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]


def test_control_characters_are_replaced_and_other_text_stays_as_it_is() -> None:
    for text in ("plain text", "Insel Öland, 日本, ✓", "a [bold]b[/]"):
        assert printable(text) == printable_lines(text) == text
    assert harmless(printable(HOSTILE)) and harmless(printable_lines(HOSTILE))
    assert printable("a\nb") == "a\ufffdb"
    assert printable_lines("a\nb\tc") == "a\nb\tc"


def test_a_message_in_a_log_is_one_line_and_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("island")
    logging.getLogger("archipelago.test").warning("refused: %s", f"{HOSTILE}\n12:00:00 merger all is well")
    logs.say_error(HOSTILE)
    say(HOSTILE)
    shown = capsys.readouterr().err
    assert harmless(shown)
    assert len(shown.splitlines()) == 3


# -- long work ---------------------------------------------------------------------------------------------------------


def test_only_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    said: list[str] = []
    with progress("loading", say=said.append):
        pass
    assert said == []
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "EVERY_SECONDS", 0.01)
    with progress("replaying", 4, said.append) as activity:
        until(lambda: any("0 of 4" in line for line in said), "a first line")
        activity.done = 2
        until(lambda: any("2 of 4" in line and "left" in line for line in said), "a line with the rest")
    assert said[-1].startswith("replaying: ended")
    said.clear()
    with pytest.raises(KeyError), progress("loading", say=said.append):
        until(lambda: said, "a line")
        raise KeyError
    assert len(said) >= 2, "work that fails says so"


def test_the_time_left_is_estimated_from_what_is_done() -> None:
    for done, left in ((25, "about 30 s left"), (1, "about 16 min left")):
        assert left in Activity("x", 100, done).line(10.0)
    for done in (0, 100):
        assert "left" not in Activity("x", 100, done).line(10.0)
