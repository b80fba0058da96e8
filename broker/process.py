"""Functions that every process of archipelago needs: exit on errors, stop on signals, connect to a run."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import platformdirs
import tyro

from archipelago.broker import invitation as invitations
from archipelago.broker.errors import (
    ArchipelagoError,
    ConfigError,
    DivergedError,
    HostError,
    UnknownRunError,
    UnreachableError,
    WireError,
    few_of,
    is_outage,
    require_number,
)
from archipelago.broker.files import exposure, file_error
from archipelago.broker.invitation import ADMIN, Invitation, Role
from archipelago.broker.observe import logs
from archipelago.broker.redis.transport import RedisTransport, connect

URL_VARIABLE = "ARCHIPELAGO_URL"
RUN_VARIABLE = "ARCHIPELAGO_RUN"


def name_of_new_run() -> str:
    """Return the name of a run that is created without one."""
    return os.environ.get(RUN_VARIABLE) or "demo"


def up_command(folder: Path, run: str) -> str:
    """Return the command that continues the run of `up` in that folder; empty if `up` has not made it."""
    place = folder.absolute()
    if place.name != run or not (place / "redis").is_dir():
        return ""
    is_usual = place.parent == Path("runs").absolute()
    where = "" if is_usual else f" --folder {shlex.quote(str(place.parent))}"
    return f"archipelago up --run {run}{where}" + (" --open" if (place / "redis" / "certificates").is_dir() else "")


CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
#: How long a process waits for another one that compiles the same programs, and how often it looks.
COMPILING_SECONDS, COMPILING_POLL_SECONDS = 300.0, 0.1
#: The pause before a failed call is repeated.
PAUSE_SECONDS = 0.5
#: The exit status of a command that a user's mistake ended, and of one that Ctrl-C ended.
USER_ERROR, INTERRUPTED = 2, 130
#: Further statuses of processes that a supervisor restarts. 75 is EX_TEMPFAIL of sysexits.h.
FAILED, OUTAGE = 1, 75
#: The exit status of an island whose name was taken over. Supervisors must not restart it.
REPLACED = 3
STATUS_MAX = 255
#: How long an orchestrator should let a worker leave after SIGTERM before it kills it. After its last inner steps, an
#: island needs at most 12 s to send what it has. The rest is for those steps and for a checkpoint, which may be killed.
LEAVE_SECONDS = 60

T = TypeVar("T")

log = logging.getLogger(__name__)


_interrupted = threading.Event()
#: After this time, Ctrl-C interrupts once more if Python has dropped it.
AGAIN_SECONDS = 0.05


def interruptible() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt. `guarded` recognises it even if a library raises another error.

    A second SIGTERM ends the process at once.
    """
    _interrupted.clear()

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _interrupted.set()
        raise KeyboardInterrupt

    def again() -> None:
        if signal.getsignal(signal.SIGINT) is interrupt:
            os.kill(os.getpid(), signal.SIGINT)

    def dropped(found: Any) -> None:
        """Interrupt once more if Python has dropped the exception, as in callbacks of its garbage collector."""
        if found.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(found)
            return
        timer = threading.Timer(AGAIN_SECONDS, again)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = dropped
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


class StoppedWaiting(KeyboardInterrupt):
    """A signal has ended a worker's wait for its Redis. `status` is the exit status of the worker."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def guarded(main: Callable[[], int], *, supervised: bool = False) -> int:
    """Run `main` and return its exit status.

    An ArchipelagoError, and an error of a disk or a folder, becomes a message on standard error and status 2. Ctrl-C
    becomes status 130, and StoppedWaiting its own.

    Args:
        supervised: Whether a supervisor restarts this process. Errors that a restart may end then have other statuses:
            OUTAGE if Redis or another host is away, FAILED if the loss is not finite.
    """
    try:
        return main()
    except SystemExit:
        raise
    except BaseException as error:  # Ctrl-C may arrive as any error.
        if _interrupted.is_set() or isinstance(error, KeyboardInterrupt):
            _interrupted.clear()
            sys.stderr.write("interrupted\n")
            return error.status if isinstance(error, StoppedWaiting) else INTERRUPTED
        if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has closed it
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the interpreter flushes it at exit
            return 0
        known = error if isinstance(error, ArchipelagoError) else file_error(error)
        if known is None:
            raise
        logs.say_error(str(known), known.code)
        return supervised_status(known) if supervised else USER_ERROR


def supervised_status(error: ArchipelagoError) -> int:
    """Return the exit status with which an error ends a process that a supervisor restarts."""
    if is_outage(error) or isinstance(error, HostError):
        return OUTAGE
    return FAILED if isinstance(error, DivergedError) else USER_ERROR


def stop_on_signals(end_seconds: float | None = None) -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT, and return a function that tells whether one has arrived.

    A second signal ends the process at once. A Ctrl-C that arrived before this call counts, too. Python may have
    dropped its exception, as it does in callbacks of its garbage collector.

    Args:
        end_seconds: The most seconds between the first signal and the end of the process. If something hangs, the
            process then writes where each thread is to standard error, and ends. None sets no limit.
    """
    stopped = threading.Event()

    def stop(number: int, _frame: object) -> None:
        if stopped.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request()

    def request() -> None:
        stopped.set()
        if end_seconds is not None:
            faulthandler.dump_traceback_later(end_seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    if _interrupted.is_set():
        _interrupted.clear()
        request()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return stopped.is_set


def keep_compiled() -> None:
    """Let JAX cache compiled programs on disk, so that a restarted worker is ready within seconds.

    Call this before JAX is imported, because JAX reads these variables then. Cached programs are code, so a folder
    that another user owns or can write to is not used, even if JAX_COMPILATION_CACHE_DIR names it.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is None or "://" not in chosen:  # a bucket has rights of its own
        folder = Path(chosen) if chosen else platformdirs.user_cache_path("archipelago") / "jax"
        if fault := exposure(folder):
            log.warning(
                "compiled programs are not cached: %s %s. Delete it, or set %s to a folder of your own.",
                folder, fault, CACHE_VARIABLE,
            )  # fmt: skip
            os.environ.pop(CACHE_VARIABLE, None)
            return
        os.environ[CACHE_VARIABLE] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@contextmanager
def compiled_once(programs: str) -> Iterator[None]:
    """Let one process of a machine compile the programs of this name, while the others wait for it.

    Then these read the programs from the cache (`keep_compiled`), and so does every later process at once. The wait
    ends after COMPILING_SECONDS, because the other process may be stopped.
    """
    folder = os.environ.get(CACHE_VARIABLE, "")
    with ExitStack() as held:
        lock: IO[str] | None = None
        if folder and "://" not in folder:
            with suppress(OSError):  # such as a file system without locks: each process compiles for itself
                lock = held.enter_context((Path(folder) / f"{programs}.lock").open("a"))
                deadline = time.monotonic() + COMPILING_SECONDS
                # It is empty until a process has compiled the programs.
                while not lock.seek(0, os.SEEK_END) and time.monotonic() < deadline:
                    with suppress(BlockingIOError):  # another process compiles them
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(COMPILING_POLL_SECONDS)
        yield
        if lock is not None and not lock.seek(0, os.SEEK_END):
            with suppress(OSError):
                lock.write("compiled\n")
                lock.flush()


def print_json(value: Any) -> None:
    """Print the value as one line of JSON. NaN and infinity become null."""
    sys.stdout.write(json.dumps(finite(value)) + "\n")
    sys.stdout.flush()


def finite(value: Any, shown: Callable[[float], float] = float) -> Any:
    """Return the value in a form that JSON can hold.

    NaN and infinity become None, tuples lists, and dataclasses objects with their fields; `shown` rounds other floats.
    """
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): finite(part, shown) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part, shown) for part in value]
    if not isinstance(value, float):
        return value
    return shown(value) if math.isfinite(value) else None


class Patience:
    """Repeats calls while Redis does not answer, so that a worker can start before its Redis.

    Each call is repeated for that many seconds after its first failure, or until `stopped`.
    """

    def __init__(
        self,
        seconds: float,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        stopped_status: int = INTERRUPTED,
    ) -> None:
        self.seconds, self.stopped, self.clock, self.pause = seconds, stopped, clock, pause
        self.stopped_status = stopped_status

    def __call__(self, call: Callable[[], T], *, for_run: bool = False) -> T:
        """Return the result of `call`.

        A fragment that cannot be read counts as an outage, because the merger writes it again. With `for_run`, so does
        a run that does not exist yet.

        Raises:
            UnreachableError, UnknownRunError, WireError: The last one, when the time is over. Every other error is
                raised at once.
            StoppedWaiting: A signal has arrived.
        """
        gives_up_at = math.inf
        while True:
            try:
                return call()
            except (UnreachableError, UnknownRunError, WireError) as error:
                waited = ("wire.fragment", UnknownRunError.code) if for_run else ("wire.fragment",)
                if not isinstance(error, UnreachableError) and error.code not in waited:
                    raise
                if gives_up_at == math.inf:
                    gives_up_at = self.clock() + self.seconds
                    if self.seconds > 0:
                        log.warning("%s Trying again for %g s.", error, self.seconds)
                if self.stopped():
                    raise StoppedWaiting(self.stopped_status) from error
                if self.clock() >= gives_up_at:
                    raise error.with_traceback(None) from None  # the sentence says what the library has said
            self.pause(PAUSE_SECONDS)


@dataclass(frozen=True)
class RunAddress:
    """The options with which a command finds its run.

    Attributes:
        url: The URL of the Redis (redis://HOST:PORT, rediss://… or unix://…), or a join file that `archipelago invite`
            made. The default is $ARCHIPELAGO_URL.
        run: The name of the run. The default is $ARCHIPELAGO_RUN, the run of the join file, or the only run of that
            Redis.
    """

    url: Annotated[str | None, tyro.conf.Positional] = None
    run: str | None = None

    def connect(self) -> RedisTransport:
        return connect_to(self.url, self.run)

    def invitation(self) -> Invitation | None:
        """Return the content of the join file, if one was given instead of a URL."""
        return invitation_at(self.url or os.environ.get(URL_VARIABLE, ""))


@dataclass(frozen=True)
class AwaitedRun(RunAddress):
    """The options with which a worker finds its run, and ends. A worker may start before its Redis.

    Attributes:
        wait_seconds: At the start, how many seconds to wait for a Redis that does not answer; 0 fails at once.
        stopped_status: The exit status when a signal ends this worker before the run has ended. A launcher that starts
            again only what has failed needs another one than 0, such as 75.
    """

    wait_seconds: float = 30.0
    stopped_status: int = 0

    def require_status(self) -> None:
        """Raise ConfigError if `stopped_status` cannot be an exit status."""
        remedy = f"Give 0 to {STATUS_MAX}. 75 says that another try may succeed."
        require_number("--stopped-status", self.stopped_status, remedy, most=STATUS_MAX)

    def patience(self, stopped: Callable[[], bool]) -> Patience:
        """Return the Patience for a worker's first calls. Once it runs, a worker handles outages itself."""
        require_number("--wait-seconds", self.wait_seconds, "Give a number of seconds, or 0.")
        return Patience(self.wait_seconds, stopped, stopped_status=self.stopped_status)


def connect_to(url: str | None, run: str | None) -> RedisTransport:
    """Connect to the run that the arguments or the environment name; without a name, to the only run there is.

    Raises:
        ConfigError: No URL was given, the join file cannot be used, or there is not exactly one run to choose.
    """
    url = url or os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigError(
            "no Redis URL was given",
            f"Give it (redis://HOST:PORT), or a join file such as runs/demo/admin.join, or set ${URL_VARIABLE}.",
            code="config.which-run",
        )
    run = run or os.environ.get(RUN_VARIABLE)
    if invited := invitation_at(url):
        if run not in (None, invited.run):
            raise ConfigError(
                f"the join file is for the run {invited.run!r}, not for {run!r}",
                f"Leave the name and ${RUN_VARIABLE} out, or use the join file of that run.",
                code="invitation.other",
            )
        return connect(invited.url, invited.run, invited)
    if run:
        return connect(url, run)
    with closing(connect(url, "any")) as finder:
        runs = finder.reader.runs()
    if len(runs) != 1:
        here = f"there are {len(runs)} runs ({few_of(runs)})" if runs else "there is no run"
        raise ConfigError(
            f"{here} at that Redis",
            "Name one (--run NAME), or create one with `archipelago init`.",
            code="config.which-run",
        )
    return connect(url, runs[0])


def invitation_at(address: str) -> Invitation | None:
    """Return the content of a join file; None for an address that is a URL. Raises ConfigError."""
    if not address or not invitations.is_join_file(address):
        return None
    return invitations.read(Path(address))


def require_role(invited: Invitation | None, role: Role) -> None:
    """Raise ConfigError if there is an invitation, and it is one for another role.

    The file of an administrator admits mergers, whose key it holds. So a merger can restore a run whose Redis has lost
    all members. If the run is not signed, it admits every role, as the URL in it does.
    """
    if invited is None or invited.role == role:
        return
    if invited.role != ADMIN or (invited.merger_key and role != "merger"):
        raise ConfigError(
            f"the join file of {invited.name!r} is for the role {invited.role}, so no {role} can use it",
            f"Ask for another: `archipelago invite NAME --role {role}`.",
            code="invitation.other",
        )
