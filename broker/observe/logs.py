"""What a worker says while it works: a line for people or, with `--log-json`, one JSON object for each record.

An object has time (ISO 8601, UTC), level, who, run, island and round where they are known, message, and exception: all
of it in one line. Records say which round they are about with `extra={"round": number}`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

OURS = ("archipelago",)

log = logging.getLogger(__name__)


@dataclass
class Origin:
    """Who speaks. The run may be learnt later than the first thing is said."""

    who: str
    run: str = ""
    island: str = ""


class JsonLines(logging.Formatter):
    """One JSON object for each record, without a line break in it."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """The object as text."""
        spoken: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "who": self.origin.who,
            "run": self.origin.run,
            "island": self.origin.island,
            "round": getattr(record, "round", None),
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None,
        }
        return json.dumps({k: v for k, v in spoken.items() if v not in (None, "")}, ensure_ascii=False)


def log_to_stderr(who: str, *, as_json: bool = False, run: str = "", island: str = "") -> Origin:
    """Lines of time, who and message on standard error, or JSON objects. `run` of what it gives may be set later."""
    origin = Origin(who, run, island)
    people = logging.Formatter(f"%(asctime)s {who} %(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(origin) if as_json else people)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in OURS:
        logging.getLogger(package).setLevel(logging.INFO)
    chatter = logging.getLogger("absl")
    chatter.setLevel(logging.ERROR)  # Orbax warns of files that it can do without
    if _is_news not in chatter.filters:
        chatter.addFilter(_is_news)
    logging.captureWarnings(as_json)
    _catch_the_rest()
    return origin


def as_json() -> bool:
    """Whether this process says everything in JSON."""
    return _formatter() is not None


def _formatter() -> JsonLines | None:
    found = (handler.formatter for handler in logging.getLogger().handlers)
    return next((formatter for formatter in found if isinstance(formatter, JsonLines)), None)


def say_error(sentence: str) -> None:
    """What ends the process, on standard error, in the form that was asked for."""
    if as_json():
        log.error("%s", sentence)
    else:
        sys.stderr.write(f"error: {sentence}\n")


def message_of(line: str) -> str:
    """What a line of a worker's log says, whichever form it has."""
    try:
        spoken = json.loads(line)
    except ValueError:
        return line
    return str(spoken.get("message", line)) if isinstance(spoken, dict) else line


# -- what nobody catches ---------------------------------------------------------------------------------------------


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax's threads log, with pages of traceback, what whoever waits for them is told as well."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def is_late_answer(error: BaseException | None) -> bool:
    """Whether a library told an event loop something that is closed by now, straight from a thread of its own.

    When one of several writes fails (a full disk), Orbax closes its loop and raises; tensorstore's other writes end
    later, and find nobody. The failure itself goes its own way: nothing is lost with this echo of it.
    """
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
        return False
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"


def _catch_the_rest() -> None:
    """Sees to what nobody catches: echoes go, and in JSON an error is one object with its traceback inside.

    In the human form all else is as Python has it.
    """
    if sys.unraisablehook.__module__ == __name__:
        return  # done before
    before, before_in_thread, before_unraisable = sys.excepthook, threading.excepthook, sys.unraisablehook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if as_json() and not issubclass(kind, KeyboardInterrupt):
            log.critical("ended by an error that was not foreseen: %s", error, exc_info=(kind, error, trace))
        else:
            before(kind, error, trace)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if as_json() and args.exc_value is not None:
            told = (args.exc_type, args.exc_value, args.exc_traceback)
            log.critical("thread %s ended: %s", args.thread and args.thread.name, args.exc_value, exc_info=told)
        else:
            before_in_thread(args)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if is_late_answer(args.exc_value):
            log.debug("a write that had failed was answered late")
        elif as_json() and args.exc_value is not None:
            told = (args.exc_type, args.exc_value, args.exc_traceback)
            log.error("%s: %s", args.err_msg or "exception ignored", args.object, exc_info=told)
        else:
            before_unraisable(args)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, uncaught_in_thread, unraisable
