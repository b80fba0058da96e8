"""The log: a line for people as ever, or one JSON object a record, also for what nobody catches."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.observe import logs
from archipelago.broker.process import guarded

ROOT = Path(__file__).parents[3]
Fields = dict[str, Any]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Logging and hooks belong to the process."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in (*logs.OURS, "absl")]
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
    log = logging.getLogger("islands.test")
    log.info("joined %s", "a\nrun")
    origin.run = "demo"
    log.warning("refused → “%s”", "why", extra={"round": 7})
    log.debug("not said")
    first, second = objects(capsys.readouterr().err)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(first.pop("time")) <= datetime.now(UTC)
    assert first == {"level": "info", "who": "oslo", "island": "oslo", "message": "joined a\nrun"}
    del second["time"]
    assert second == {
        "level": "warning", "who": "oslo", "run": "demo", "island": "oslo", "round": 7, "message": "refused → “why”",
    }  # fmt: skip


def test_round_zero_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", as_json=True)
    logging.getLogger("merger.test").info("serving", extra={"round": 0})
    assert objects(capsys.readouterr().err)[0]["round"] == 0


def test_an_exception_is_inside_its_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", as_json=True, run="demo")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("merger.test").exception("it failed")
    (said,) = objects(capsys.readouterr().err)
    assert (said["level"], said["message"], said["run"]) == ("error", "it failed", "demo")
    assert said["exception"].startswith("Traceback (most recent call last):")
    assert said["exception"].endswith("ValueError: two\nlines")


def test_people_read_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", run="demo")
    logging.getLogger("merger.test").info("serving from round %s", 7, extra={"round": 7})
    time, rest = capsys.readouterr().err.split(" ", 1)
    assert datetime.strptime(time, "%H:%M:%S")
    assert rest == "merger serving from round 7\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_sentence_that_ends_a_process(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def main() -> int:
        logs.log_to_stderr("merger", as_json=as_json, run="demo")
        raise ConfigError("the port is taken", "Choose another.")

    assert guarded(main) == 2
    said = capsys.readouterr().err
    if as_json:
        (said_object,) = objects(said)
        assert (said_object["level"], said_object["message"]) == ("error", "the port is taken. Choose another.")
    else:
        assert said == "error: the port is taken. Choose another.\n"
    assert logs.message_of(said.strip()).removeprefix("error: ") == "the port is taken. Choose another."


@pytest.mark.parametrize(("line", "message"), [("error: no", "error: no"), ('{"message": "no"}', "no"), ("[1]", "[1]"),
                                               ("{}", "{}"), ("", "")])  # fmt: skip
def test_what_a_line_says(line: str, message: str) -> None:
    assert logs.message_of(line) == message


ENDS = {
    "main": "raise RuntimeError('the end')",
    "thread": "t = threading.Thread(target=lambda: 1 / 0, name='link-send'); t.start(); t.join()",
    "warning": "import warnings; warnings.warn('old')",
    "unraisable": "C = type('C', (), {'__del__': lambda self: 1 / 0}); C()",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_nobody_catches_is_one_object_too(end: str) -> None:
    code = (
        f"import threading; from broker import logs; logs.log_to_stderr('oslo', as_json=True, run='demo'); {ENDS[end]}"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    (said,) = objects(found.stderr)
    assert (said["who"], said["run"]) == ("oslo", "demo")
    assert (found.returncode == 1) == (end == "main")
    if end == "warning":
        assert "UserWarning: old" in said["message"]
    else:
        assert said["exception"].splitlines()[-1] in ("RuntimeError: the end", "ZeroDivisionError: division by zero")


def test_people_see_a_traceback_as_ever() -> None:
    code = "from broker import logs; logs.log_to_stderr('oslo'); raise RuntimeError('the end')"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stderr.startswith("Traceback (most recent call last):")
    assert found.stderr.endswith("RuntimeError: the end\n")


# -- echoes of a write that failed ----------------------------------------------------------------------------------


def closed_loop_error(straight: bool) -> RuntimeError:
    """What a closed loop raises: straight from the call, or in code that has a caller of ours."""
    loop = asyncio.new_event_loop()
    loop.close()
    try:
        loop.call_soon_threadsafe(print)
    except RuntimeError as error:
        trace = error.__traceback__
        assert trace is not None
        return error.with_traceback(trace.tb_next) if straight else error
    raise AssertionError("it was closed")


def test_only_a_late_answer_to_a_loop_that_is_closed_is_an_echo() -> None:
    assert logs.is_late_answer(closed_loop_error(straight=True))
    assert not logs.is_late_answer(closed_loop_error(straight=False))  # somebody of ours called it: a real error
    assert not logs.is_late_answer(RuntimeError("Event loop is closed"))
    assert not logs.is_late_answer(OSError(28, "No space left on device"))
    assert not logs.is_late_answer(None)


def test_what_whoever_waits_is_told_is_not_logged_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("oslo")
    chatter = logging.getLogger("absl")
    chatter.error("[thread=x] _SignalingThread.run() raised an exception: no space")
    chatter.warning("a file that it can do without")
    chatter.error("something else is wrong")
    assert capsys.readouterr().err.split(" ", 2)[1:] == ["oslo", "something else is wrong\n"]


FULL = """
import resource, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from broker import logs
from broker.errors import ConfigError
from merger.checkpoint import CheckpointStore
from tests import samples

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logs.log_to_stderr("merger")
manifest = samples.manifest(width=40_000)
image = samples.image(manifest, [], outer=np.random.default_rng(0).bytes(3_000_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
for number in (3, 4):
    try:
        CheckpointStore(Path(sys.argv[1])).save(replace(image, number=number))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on files are Linux's")
def test_a_full_disk_is_one_sentence_for_each_checkpoint_and_no_traceback(tmp_path: Path) -> None:
    """Through Orbax and tensorstore as they are: their threads have more to say than whoever called them."""
    found = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "kept")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    assert found.stdout.splitlines() == [
        f"checkpoint {number} cannot be written to {tmp_path / 'kept'} (File too large). Free some space there, or "
        "name another folder with --folder. Earlier checkpoints are as they were."
        for number in (3, 4)
    ]
