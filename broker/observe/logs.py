"""Logging of workers: a line for people or, with `--log-json`, one JSON object on each line; and printable text.

An object has time (ISO 8601, UTC), level, who and message; and run, island, shard, round, code (of an error) and
exception where they are known. A record states its round with `extra={"round": number}`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

from archipelago.broker.errors import ArchipelagoError

LOGGERS = ("archipelago",)
#: The name of a thread that serves one shard of a run, before the shard's number. What it logs names the shard.
SHARD_THREAD = "shard "

log = logging.getLogger(__name__)


@dataclass
class Origin:
    """The process that logs. Its run may become known after the first records."""

    who: str
    run: str = ""
    island: str = ""


class JsonLines(logging.Formatter):
    """A formatter that writes each record as one JSON object on one line, with the fields of its origin."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, without the fields that are not known."""
        error = record.exc_info[1] if record.exc_info else None
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "who": self.origin.who,
            "run": self.origin.run,
            "island": self.origin.island,
            "shard": shard_of(record),
            "round": getattr(record, "round", None),
            "code": error.code if isinstance(error, ArchipelagoError) else getattr(record, "code", None),
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        known = {name: value for name, value in fields.items() if value not in (None, "")}
        return json.dumps(known, ensure_ascii=False, default=str)


class _Lines(logging.Formatter):
    """One line for people. Messages may quote text that anyone has written, so they show no control characters."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who} %(message)s")
        self._day = time.localtime()[:3]

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the library's name
        """Return the time of day, and before it the date if that is not the day on which the process began."""
        at = time.localtime(record.created)
        return time.strftime("%H:%M:%S" if at[:3] == self._day else "%b %d %H:%M:%S", at)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        shard = shard_of(record)
        record.message = (f"{SHARD_THREAD}{shard}: " if shard else "") + printable(record.message)
        return super().formatMessage(record)


def shard_of(record: logging.LogRecord) -> str:
    """Return the number of the shard whose thread has logged that record; empty for other threads."""
    name = record.threadName or ""
    return name.removeprefix(SHARD_THREAD) if name.startswith(SHARD_THREAD) else ""


def log_to_stderr(who: str, *, as_json: bool = False, run: str = "", island: str = "") -> Origin:
    """Log to standard error: time, who and message, or JSON objects. Return the origin, whose run may be set later."""
    origin = Origin(who, run, island)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(origin) if as_json else _Lines(who))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in LOGGERS:
        logging.getLogger(package).setLevel(logging.INFO)
    absl = logging.getLogger("absl")
    absl.setLevel(logging.ERROR)  # Orbax warns about optional files.
    if _is_news not in absl.filters:
        absl.addFilter(_is_news)
    logging.captureWarnings(as_json)
    _install_hooks()
    return origin


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above the progress bars of a trainer, and not into them."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # while a bar of rich is shown, another one, which moves the bar
        bars = sys.modules.get("tqdm")
        with bars.tqdm.external_write_mode(self.stream) if bars else nullcontext():
            super().emit(record)


def show_unless_set_up() -> None:
    """Log to standard error in a user's script, until it sets up logging itself."""
    ours, root = logging.getLogger(LOGGERS[0]), logging.getLogger()
    if ours.handlers or ours.level or root.handlers:
        return
    handler = _AboveBars()
    handler.setFormatter(_Lines("archipelago"))
    handler.addFilter(lambda record: not root.handlers)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def as_json() -> bool:
    """Return whether this process logs JSON objects."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def say_error(sentence: str, code: str = "") -> None:
    """Report the error that ends the process, on standard error, in the form that was asked for.

    People see its code in brackets: docs/reference/codes.md has it as an anchor.
    """
    if as_json():
        log.error("%s", sentence, extra={"code": code} if code else None)
    else:
        sys.stderr.write(f"error: {printable_lines(sentence)}{f' [{code}]' if code else ''}\n")


def message_of(line: str) -> str:
    """Return the message in a line of a worker's log, in either form."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    return str(fields.get("message", line)) if isinstance(fields, dict) else line


# -- uncaught errors -----------------------------------------------------------------------------------------------


def _is_news(record: logging.LogRecord) -> bool:
    """Filter out errors that Orbax's threads log with a traceback although they also raise them to the caller."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def is_late_answer(error: BaseException | None) -> bool:
    """Return whether a library's thread called an event loop that was already closed.

    When one of several writes fails (a full disk), Orbax closes its loop and raises. tensorstore's other writes end
    later and call the closed loop. The caller already has the failure itself, so this error can be dropped.
    """
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
        return False
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"


def _install_hooks() -> None:
    """Log uncaught errors as one JSON object each, and drop late answers. Otherwise Python's own hooks run."""
    if sys.unraisablehook.__module__ == __name__:
        return  # They are installed already.
    before, before_in_thread, before_unraisable = sys.excepthook, threading.excepthook, sys.unraisablehook

    def is_told(error: BaseException | None, text: str) -> bool:
        """Log an uncaught error as an object, if objects were asked for."""
        if not as_json() or error is None or isinstance(error, KeyboardInterrupt):
            return False
        log.critical("%s: %s", text, error, exc_info=error)
        return True

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_told(error, "unexpected error"):
            before(kind, error, trace)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if not is_told(args.exc_value, f"thread {args.thread and args.thread.name} ended"):
            before_in_thread(args)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if is_late_answer(args.exc_value):
            log.debug("a write ended after its event loop was closed")
        elif not is_told(args.exc_value, f"{args.err_msg or 'exception ignored'} {args.object}"):
            before_unraisable(args)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, uncaught_in_thread, unraisable


# -- text that is safe to show in a terminal or a log ------------------------------------------------------------------

# Everyone who can write to a run's Redis chooses names of hosts and devices, notes and reasons. A control character
# among them could rewrite a terminal's screen or forge a line of a log, and an override of the writing direction could
# disguise a name.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SEPARATORS = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
#: Maps the characters that are not shown to the replacement character.
CONTROLS: Final = dict.fromkeys([*range(32), *range(0x7F, 0xA0), *_DIRECTIONS, *_SEPARATORS, *_SURROGATES], "\ufffd")
_IN_LINES: Final = {code: shown for code, shown in CONTROLS.items() if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text with a replacement for every control character, also for line ends."""
    return text.translate(CONTROLS)


def printable_lines(text: str) -> str:
    """Return the text with a replacement for every control character except line ends and tabs."""
    return text.translate(_IN_LINES)
