"""`archipelago dash`: show runs live in the browser."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from archipelago.broker.errors import ConfigError, UnknownRunError, require_number
from archipelago.broker.machine import require_extra
from archipelago.broker.process import (
    RUN_VARIABLE,
    URL_VARIABLE,
    Patience,
    connect_to,
    print_json,
    stop_on_signals,
)
from archipelago.ops.dashboard.page_data import Boards
from archipelago.ops.run_source import RUNS, RunSource, address_of, shown
from archipelago.ops.settings import say
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.run_list import all_runs

STOP_SECONDS = 5


@dataclass(frozen=True)
class DashOptions(RunSource):
    """Show runs live in the browser. Needs only Redis, so it can run anywhere.

    It shows the run that is named, or without a name all runs of the Redis and of the folder runs/. Anyone who can
    reach the port can see the runs. The page changes none: use `archipelago steer`.
    """

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 shows the runs to everyone who can reach this machine."""
    name: tuple[str, ...] = ()
    """More host names under which browsers reach the page, such as that of a proxy. Other names are refused."""
    port: int = 8765
    """The port to listen on. 0 takes a free one."""
    wait_seconds: float = 30.0
    """How many seconds to wait for a Redis that does not answer, and for the run that is named; 0 fails at once."""
    json: bool = False
    """Print one JSON object with the address, once it serves."""


def main(options: DashOptions) -> int:
    require_extra("dash", "The dashboard")
    require_number("--wait-seconds", options.wait_seconds, "Give a number of seconds, or 0.")
    stopped = stop_on_signals()
    named = options.run or os.environ.get(RUN_VARIABLE) or (options.url and "://" not in options.url)
    with ExitStack() as stack:
        if named:
            awaited = Patience(options.wait_seconds, stopped)
            found = awaited(lambda: stack.enter_context(options.open()))
            shows = partial(Watcher, found.transport, address=found.address, folder=found.folder)
            watch = awaited(shows, for_run=True)
            run, boards = watch.manifest.run, Boards(watch)
        else:
            run, boards = "", Boards(None, lambda: all_runs(options.url, RUNS), lambda run: _opened(run, options.url))
            Patience(options.wait_seconds, stopped)(boards.listed)
        with serving(boards, options.host, options.port, options.name) as address:
            if options.json:
                print_json({"run": run, "address": address})
            say(f"{f'run {run!r}' if run else 'runs'} in the browser: {address} (Ctrl-C ends the page, not the run)")
            while not stopped():
                time.sleep(0.1)
    return 0


def _opened(run: str, url: str | None) -> Watcher:
    """Return a reader of one of the runs that are listed. Its Redis must run: its page starts none."""
    where = next((entry.where for entry in all_runs(url, RUNS) if entry.run == run), "")
    at_redis = where == "redis" or not (Path(where) / "redis").is_dir()  # its merger or an island was started here
    try:
        address = (url or os.environ.get(URL_VARIABLE) if at_redis else address_of(Path(where))) if where else ""
    except OSError as error:
        raise UnknownRunError(f"cannot read {where}: {error.strerror}", "Its user can show the run.") from None
    if not address:
        raise UnknownRunError(f"the Redis of the run {run!r} does not run", f"`archipelago dash {run}` starts it.")
    folder = None if where == "redis" else Path(where)
    return Watcher(connect_to(address, run), address=shown(address), folder=folder)


@contextmanager
def serving(boards: Boards, host: str, port: int, names: Sequence[str] = ()) -> Iterator[str]:
    """Serve the page from threads of this process while the block runs; yield its address. Raise ConfigError.

    Requests may carry `names`, beside this machine's own names and addresses.
    """
    import uvicorn

    from archipelago.ops.dashboard.app import application, own_names

    app = application(boards, own_names(host).union(names))
    with _listening(host, port) as listener, boards:
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        # Only the main thread receives signals.
        pages = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="pages", daemon=True)
        pages.start()
        try:
            yield f"http://{_named(host)}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            pages.join(2 * STOP_SECONDS)


def _named(host: str) -> str:
    named = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host)  # noqa: S104 - the user's choice
    return named or (f"[{host}]" if ":" in host else host)


def _listening(host: str, port: int) -> socket.socket:
    require_number("--port", port, "Choose 0 to 65535.", most=65535)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            remedy = "Choose another --port; --port 0 takes a free one."
        else:
            remedy = "Name an address of this machine with --host."
        raise ConfigError(
            f"the page cannot be served on {host}:{port} ({reason})", remedy, code="config.value"
        ) from None
