"""The processes of an island over several hosts come together, before JAX connects them.

JAX takes any process that reaches its coordinator, and ends all of them if one does not come, or comes twice. So the
leader waits for the others at an address of its own. Both sides prove that they know the address of the run's Redis,
and they compare what must be the same. When all have come, the leader lets them go on and listens no longer. Each
message is one line of JSON.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError
from archipelago.islands.team.ranks import HostRank, flag_error

#: A message is at most this long. It names versions of packages and a few flags.
MESSAGE_MAX = 1 << 16
#: A process that has just connected says who it is within this time.
ANSWER_SECONDS = 5.0
#: How often a process looks for a signal, and for processes that are not there yet.
POLL_SECONDS = 0.2

#: Whether a signal has arrived.
Stopped = Callable[[], bool]

log = logging.getLogger(__name__)


# -- the leader --------------------------------------------------------------------------------------------------------


def gather(here: HostRank, about: Mapping[str, str], key: bytes, seconds: float, stopped: Stopped) -> None:
    """Wait until all others have come, and let them go on.

    Args:
        here: The rank of this process.
        about: What all processes must have alike, by its name in words.
        key: What strangers do not know.
        seconds: How long to wait.
        stopped: Whether a signal has arrived.

    Raises:
        ConfigError: A port cannot be used (`hosts.port`), or a process does not agree (`hosts.disagree`).
        HostError: Some processes have not come in time (`hosts.missing`).
        KeyboardInterrupt: A signal has arrived.
    """
    log.info("waiting at %s for the %s other hosts of this island", here.address, here.hosts - 1)
    others: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with listening(here.port) as listener, listening(here.jax_port), ExitStack() as connections:
        try:
            while len(others) < here.hosts - 1:
                if stopped():
                    raise KeyboardInterrupt
                if time.monotonic() >= deadline:
                    raise _missing(here, others, seconds)
                ready, _, _ = select.select([listener, *others.values()], [], [], POLL_SECONDS)
                others = {rank: sock for rank, sock in others.items() if sock not in ready}  # it says no more: it ended
                if listener in ready:
                    sock = connections.enter_context(closing(listener.accept()[0]))
                    _welcome(here, about, key, sock, others)
        except BaseException as error:
            reason = error.what if isinstance(error, ArchipelagoError) else "it was stopped"
            refusal = HostError(f"the leader of this island has ended: {reason}", code="hosts.missing")
            for sock in others.values():
                _refuse(sock, refusal)
            raise
        for sock in others.values():
            _send(sock, {"go": True})


def _missing(here: HostRank, others: Mapping[int, Any], seconds: float) -> HostError:
    missing = ", ".join(str(rank) for rank in range(1, here.hosts) if rank not in others)
    return HostError(
        f"the hosts {missing} of this island have not come to {here.address} in {seconds:g} s",
        "Start all of them, or raise --wait-seconds.",
        code="hosts.missing",
    )


def _welcome(
    here: HostRank, about: Mapping[str, str], key: bytes, sock: socket.socket, others: dict[int, socket.socket]
) -> None:
    """Let another process in, or tell it why not. A stranger learns nothing. Raises ConfigError (`hosts.disagree`)."""
    try:
        challenge = secrets.token_hex(32)
        _send(sock, {"challenge": challenge})
        hello = _receive(sock, ANSWER_SECONDS)
        rank, theirs, own = int(hello["rank"]), str(hello["about"]), str(hello["challenge"])
        require_proof(str(hello["proof"]), key, here.address, challenge, str(rank), theirs, own)
        require_fit(here, about, rank, dict(json.loads(theirs)), others)
        _send(sock, {"proof": proof(key, own)})
        others[rank] = sock
        log.info("host %s of %s has come", rank, here.hosts)
    except ConfigError as refusal:
        _refuse(sock, refusal)
        if refusal.code == "hosts.disagree":
            raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        log.debug("a process that came to the leader has left: %s", error)
        sock.close()


def require_fit(
    here: HostRank, about: Mapping[str, str], rank: int, theirs: Mapping[str, str], others: Mapping[int, Any]
) -> None:
    """Raise ConfigError unless a process that knows the key may be let in (`hosts.disagree`, `config.value`)."""
    for what, own in about.items():
        if own != theirs.get(what, "none"):
            raise disagreement(what, own, rank, theirs.get(what, "none"))
    if not 0 <= rank < here.hosts:
        raise flag_error(f"this island has no host {rank}", f"Give a --host-rank below {here.hosts}.")
    if rank == 0 or rank in others:
        raise flag_error(
            f"another process is host {rank} of this island already",
            "Give each process another --host-rank, and end those of earlier starts.",
        )


def disagreement(what: str, own: str, rank: int, other: str) -> ConfigError:
    """Return the error of hosts that have not the same."""
    return ConfigError(
        f"the hosts of this island disagree: host 0 has {what} {own}, and host {rank} has {other}",
        "Install the same versions, and start all hosts with the same flags and as many devices.",
        code="hosts.disagree",
    )


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port, for IPv6 and IPv4. Raises ConfigError (`hosts.port`)."""
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        pass
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"the leader of this island cannot listen on port {port} ({error.strerror or error})",
            "Choose another port for --coordinator, or end the process that has this one.",
            code="hosts.port",
        ) from None


# -- the others --------------------------------------------------------------------------------------------------------


def come(here: HostRank, about: Mapping[str, str], key: bytes, seconds: float, stopped: Stopped) -> None:
    """Come to the leader, and wait until it lets all go on.

    Args:
        here, about, key, stopped: As in `gather`.
        seconds: How long to wait for the leader, and then for the others.

    Raises:
        HostError: The leader is not there, or has ended (`hosts.missing`).
        ConfigError: The leader refuses this process; the code is the leader's. Or it is no leader (`hosts.stranger`).
        KeyboardInterrupt: A signal has arrived.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((here.host, here.port), timeout=ANSWER_SECONDS) as sock:
                _greet(here, about, key, sock)
                _await_others(sock, time.monotonic() + seconds, stopped)
            return
        except (OSError, KeyError, TypeError, ValueError) as error:
            if stopped():
                raise KeyboardInterrupt from error
            if time.monotonic() >= deadline:
                raise HostError(
                    f"the leader of this island does not answer at {here.address} ({error})",
                    "Start host 0 there, or check --coordinator. Its port and the next one must be open to all hosts.",
                    code="hosts.missing",
                ) from None
        time.sleep(POLL_SECONDS)


def _greet(here: HostRank, about: Mapping[str, str], key: bytes, sock: socket.socket) -> None:
    """Prove to the leader that this process knows the key, and let it prove the same."""
    challenge = str(_receive(sock, 2 * ANSWER_SECONDS)["challenge"])  # another process may be at it
    own, text = secrets.token_hex(32), json.dumps(dict(about))
    proven = proof(key, challenge, str(here.rank), text, own)
    _send(sock, {"rank": here.rank, "about": text, "challenge": own, "proof": proven})
    require_proof(str(_answer(sock, ANSWER_SECONDS)["proof"]), key, here.address, own)


def _await_others(sock: socket.socket, deadline: float, stopped: Stopped) -> None:
    while not select.select([sock], [], [], POLL_SECONDS)[0]:
        if stopped():
            raise KeyboardInterrupt
        if time.monotonic() >= deadline:
            raise TimeoutError("it waits for other hosts")
    _answer(sock, ANSWER_SECONDS)


def _answer(sock: socket.socket, seconds: float) -> Mapping[str, Any]:
    """Return what the leader answers. Raises the error with which it refuses this process."""
    found = _receive(sock, seconds)
    if "refused" in found:
        kind = HostError if found["code"] == "hosts.missing" else ConfigError
        raise kind(str(found["refused"]), str(found["remedy"]), code=str(found["code"]))
    return found


# -- messages and proofs -----------------------------------------------------------------------------------------------


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _refuse(sock: socket.socket, error: ArchipelagoError) -> None:
    with suppress(OSError):
        _send(sock, {"refused": error.what, "remedy": error.remedy, "code": error.code})
    sock.close()


def _receive(sock: socket.socket, seconds: float) -> Mapping[str, Any]:
    """Return the next message. Raises OSError or ValueError if there is none in time."""
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        part = sock.recv(1)  # another message may follow
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        line += part
        if len(line) > MESSAGE_MAX:
            raise ValueError("the message is too long")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("this is no message")
    return found


def proof(key: bytes, *parts: str) -> str:
    """Return what only a process can compute that knows the key."""
    return hmac.new(key, "\0".join(parts).encode(), "sha256").hexdigest()


def require_proof(found: str, key: bytes, address: str, *parts: str) -> None:
    """Raise ConfigError (`hosts.stranger`) for another proof, after a time that tells nothing about the key."""
    if not hmac.compare_digest(found.encode(), proof(key, *parts).encode()):
        raise ConfigError(
            f"this process and what answers at {address} do not know the same Redis",
            "Check --coordinator, and give all hosts of an island the same Redis URL or join file.",
            code="hosts.stranger",
        )
