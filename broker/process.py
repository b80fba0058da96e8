"""What our processes have in common: errors end them with one sentence, signals ask them to stop."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import platformdirs
import tyro

from archipelago.broker.errors import ArchipelagoError, ConfigError, UnreachableError
from archipelago.broker.observe import logs
from archipelago.broker.redis.transport import RedisTransport, connect

URL_VARIABLE = "ARCHIPELAGO_URL"
RUN_VARIABLE = "ARCHIPELAGO_RUN"
PAUSE_SECONDS = 0.5
"""between two tries"""
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""of glibc's malloc.h"""

T = TypeVar("T")

log = logging.getLogger(__name__)


def guarded(main: Callable[[], int]) -> int:
    """Runs `main`; an error that a user can meet becomes one sentence on standard error and exit status 2."""
    try:
        return main()
    except ArchipelagoError as error:
        logs.say_error(str(error), error.code)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has gone
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the interpreter flushes it on its way out
        return 0


def stop_on_signals() -> Callable[[], bool]:
    """Whether SIGTERM or SIGINT has come since; a second one ends the process at once."""
    stopped = threading.Event()

    def stop(number: int, _frame: object) -> None:
        if stopped.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return stopped.is_set


def keep_compiled() -> None:
    """Let JAX keep compiled programs between processes, so that a restarted worker is back within seconds.

    Call this before JAX is imported, as JAX reads these variables then. Cached programs are code, so a folder to which
    other users may write is not used.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = platformdirs.user_cache_path("archipelago") / "jax"
        if not _is_private(folder):
            return
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _is_private(folder: Path) -> bool:
    """Create the folder if necessary, and tell whether only its owner, this user, may enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
            return True
    except OSError as error:
        log.debug("compiled programs are not kept: %s", error)
    return False


def keep_freed_memory() -> None:
    """Large arrays reuse memory that this process has touched already, where the C library can (glibc).

    Fresh pages cost a merger more than its arithmetic. What was once needed stays with the process; call it early,
    before there are threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(parameter, value)


def print_json(value: Any) -> None:
    """One JSON object on standard output; numbers that JSON lacks become null."""
    sys.stdout.write(json.dumps(finite(value)) + "\n")
    sys.stdout.flush()


def finite(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinity, which it lacks, become null."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Patience:
    """Calls that are tried again for a while where nobody answers: how a worker begins while its Redis is away."""

    def __init__(
        self,
        seconds: float,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`seconds` from the first failure of a call; `stopped` ends it early."""
        self.seconds, self.stopped, self.clock, self.pause = seconds, stopped, clock, pause

    def __call__(self, call: Callable[[], T]) -> T:
        """What `call` returns. Raises its last UnreachableError, and all other errors at once."""
        gives_up_at = math.inf
        while True:
            try:
                return call()
            except UnreachableError as error:
                if gives_up_at == math.inf:
                    gives_up_at = self.clock() + self.seconds
                    if self.seconds > 0:
                        log.warning("%s Trying again for %g s.", error, self.seconds)
                if self.stopped() or self.clock() >= gives_up_at:
                    raise
            self.pause(PAUSE_SECONDS)


@dataclass(frozen=True)
class RunAddress:
    """Where a worker or a reader finds its run: what the options of most verbs begin with."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """redis://HOST:PORT, rediss://… or unix://…; default $ARCHIPELAGO_URL"""
    run: str | None = None
    """name of the run; default $ARCHIPELAGO_RUN, or the only run there"""

    def connect(self) -> RedisTransport:
        """A connection to that run."""
        return connect_to(self.url, self.run)


@dataclass(frozen=True)
class AwaitedRun(RunAddress):
    """The same for a worker, which may be started before its Redis is, or while it is away."""

    wait_seconds: float = 30.0
    """at the start, how long to try again where Redis does not answer; 0 gives up at once"""

    def patience(self, stopped: Callable[[], bool]) -> Patience:
        """For all that a worker asks before its own way through outages begins."""
        if not 0.0 <= self.wait_seconds < math.inf:
            raise ConfigError(
                f"--wait-seconds cannot be {self.wait_seconds}",
                "Give seconds, or 0 for none.",
                code="config.wait-seconds",
            )
        return Patience(self.wait_seconds, stopped)


def connect_to(url: str | None, run: str | None) -> RedisTransport:
    """A connection to the run that arguments or environment name; without a name, to the only run that is there."""
    url = url or os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigError(
            "no Redis was named", f"Give its URL (redis://HOST:PORT) as an argument, or in ${URL_VARIABLE}."
        )
    run = run or os.environ.get(RUN_VARIABLE)
    if run:
        return connect(url, run)
    finder = connect(url, "any")
    try:
        runs = finder.reader.runs()
    finally:
        finder.close()
    if len(runs) != 1:
        here = f"there are {len(runs)} runs ({', '.join(runs)})" if runs else "there is no run"
        raise ConfigError(f"{here} at that Redis", "Name one with --run, or make it with `archipelago init`.")
    return connect(url, runs[0])
