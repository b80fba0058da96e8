"""Logging: a line for people or one JSON object per record, also for uncaught errors."""

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


def test_round_zero_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", as_json=True)
    logging.getLogger("archipelago.test").info("serving", extra={"round": 0})
    assert objects(capsys.readouterr().err)[0]["round"] == 0


def test_an_exception_is_inside_its_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", as_json=True, run="demo")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("archipelago.test").exception("it failed")
    (said,) = objects(capsys.readouterr().err)
    assert (said["level"], said["message"], said["run"]) == ("error", "it failed", "demo")
    assert said["exception"].startswith("Traceback (most recent call last):")
    assert said["exception"].endswith("ValueError: two\nlines")


def test_without_json_a_record_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("merger", run="demo")
    logging.getLogger("archipelago.test").info("serving from round %s", 7, extra={"round": 7})
    time, rest = capsys.readouterr().err.split(" ", 1)
    assert datetime.strptime(time, "%H:%M:%S")
    assert rest == "merger serving from round 7\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_final_error_has_the_requested_form(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def main() -> int:
        logs.log_to_stderr("merger", as_json=as_json, run="demo")
        raise ConfigError("the port is taken", "Choose another.", code="config.taken")

    assert guarded(main) == 2
    said = capsys.readouterr().err
    if as_json:
        (said_object,) = objects(said)
        assert (said_object["level"], said_object["code"]) == ("error", "config.taken")
        assert said_object["message"] == "the port is taken. Choose another."
    else:
        assert said == "error: the port is taken. Choose another.\n"
    assert logs.message_of(said.strip()).removeprefix("error: ") == "the port is taken. Choose another."


@pytest.mark.parametrize(("line", "message"), [("error: no", "error: no"), ('{"message": "no"}', "no"), ("[1]", "[1]"),
                                               ("{}", "{}"), ("", "")])  # fmt: skip
def test_the_message_of_a_log_line_is_found(line: str, message: str) -> None:
    assert logs.message_of(line) == message


SET_UP = "import threading; from archipelago.broker.observe import logs; logs.log_to_stderr('oslo', as_json={})"
ENDS = {
    "main": "raise RuntimeError('the end')",
    "thread": "t = threading.Thread(target=lambda: 1 / 0, name='link-send'); t.start(); t.join()",
    "warning": "import warnings; warnings.warn('old')",
    "unraisable": "C = type('C', (), {'__del__': lambda self: 1 / 0}); C()",
}


def ended(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ENDS)
def test_an_uncaught_error_is_one_object(end: str) -> None:
    found = ended(f"{SET_UP.format(True)}; {ENDS[end]}")
    (record,) = objects(found.stderr)
    assert record["who"] == "oslo"
    assert (found.returncode == 1) == (end == "main")
    if end == "warning":
        assert "UserWarning: old" in record["message"]
    else:
        assert record["exception"].splitlines()[-1] in ("RuntimeError: the end", "ZeroDivisionError: division by zero")


def test_without_json_a_traceback_is_printed() -> None:
    found = ended(f"{SET_UP.format(False)}; raise RuntimeError('the end')")
    assert found.stderr.startswith("Traceback (most recent call last):")
    assert found.stderr.endswith("RuntimeError: the end\n")


def test_an_archipelago_error_is_logged_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    logs.log_to_stderr("oslo", as_json=True)
    try:
        raise ConfigError("the port is taken", code="config.taken")
    except ConfigError:
        logging.getLogger("archipelago.test").exception("it failed")
    assert objects(capsys.readouterr().err)[0]["code"] == "config.taken"


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


def test_late_answers_are_recognised_by_their_traceback() -> None:
    assert logs.is_late_answer(closed_loop_error(straight=True))
    assert not logs.is_late_answer(closed_loop_error(straight=False))  # Our own code called the loop.
    assert not logs.is_late_answer(RuntimeError("Event loop is closed"))
    assert not logs.is_late_answer(OSError(28, "No space left on device"))
    assert not logs.is_late_answer(None)


def test_errors_that_orbax_also_raises_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
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
image = samples.image(manifest, [], outer=np.random.default_rng(0).bytes(3_000_000))
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
