"""`archipelago dash`: show a run live in the browser, and steer it from there with a token."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.machine import require_extra
from archipelago.broker.process import print_json, stop_on_signals
from archipelago.ops.run_source import RunSource
from archipelago.ops.settings import say
from archipelago.ops.watch.watcher import LOOK_SECONDS, Watcher, repeated

TOKEN_VARIABLE = "ARCHIPELAGO_TOKEN"  # noqa: S105 - only its name
STOP_SECONDS = 5


@dataclass(frozen=True)
class DashOptions(RunSource):
    """Show a run live in the browser, and steer it from there. Needs only Redis, so it can run anywhere.

    Anyone who can reach the port can see the run. Changing it needs the token: that in $ARCHIPELAGO_TOKEN, or a random
    one that is printed at the start.
    """

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 shows the run to everyone who can reach this machine."""
    name: tuple[str, ...] = ()
    """More host names under which browsers reach the page, such as that of a proxy. Other names are refused."""
    port: int = 8765
    """The port to listen on. 0 takes a free one."""
    json: bool = False
    """Print one JSON object, address and token, once it serves."""


def main(options: DashOptions) -> int:
    """Serve until a signal arrives."""
    require_extra("dash", "The dashboard")
    stopped = stop_on_signals()
    token = _token()
    with options.open() as found:
        watch = Watcher(found.transport)
        with serving(watch, token, options.host, options.port, options.name) as address:
            _greet(watch.manifest.run, address, token, options)
            while not stopped():
                time.sleep(0.1)
    return 0


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    if not re.fullmatch(r"[!-~]+", token):  # Only these characters are valid in a header.
        remedy = "Use letters, digits and signs, or unset it for a random one."
        raise ConfigError(f"the token in ${TOKEN_VARIABLE} cannot be used", remedy, code="config.value")
    return token


def _greet(run: str, address: str, token: str, options: DashOptions) -> None:
    whole = f"{address}/#token={quote(token)}"
    if options.json:
        print_json({"run": run, "address": address, "token": token})
    say(f"run {run!r} in the browser: {whole}")
    say(f"  token   {token} (needed to change the run; Ctrl-C ends the page, not the run)")


@contextmanager
def serving(watch: Watcher, token: str, host: str, port: int, names: Sequence[str] = ()) -> Iterator[str]:
    """Serve the page from threads of this process while the block runs; yield its address. Raise ConfigError.

    Changes need the token. Requests may carry `names`, beside this machine's own names and addresses.
    """
    import uvicorn

    from archipelago.ops.dashboard.app import Board, application, own_names

    board = Board(watch)
    app = application(board, token, own_names(host).union(names))
    with _listening(host, port) as listener, repeated(board.update, LOOK_SECONDS):
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        # Only the main thread receives signals.
        pages = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="pages", daemon=True)
        pages.start()
        try:
            yield f"http://{_shown(host)}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            pages.join(2 * STOP_SECONDS)


def _shown(host: str) -> str:
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
