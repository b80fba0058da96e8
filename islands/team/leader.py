"""The leader of an island over several hosts: its connections to the others, and what happens when one is lost.

The leader waits at its address until all others have come. Both sides prove that they know the address of the run's
Redis, and they compare what must be the same. Then the leader says what all processes do, in order, and the others do
it. Each side sends a sign of life each second. When one process is lost, all of them end: no computation over several
hosts can go on.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import INTERRUPTED, USER_ERROR, supervised_status
from archipelago.islands.options import IslandOptions, require_valid
from archipelago.islands.running import run_island
from archipelago.islands.team.coordinator import connect, forget_others, leave, listening, start_coordinator
from archipelago.islands.team.messages import (
    BEAT_SECONDS,
    HELLO_SECONDS,
    LOST_STATUS,
    POLL_SECONDS,
    SILENCE_SECONDS,
    Connection,
    Frame,
    Value,
    exit_now,
    in_words,
    proof,
    require_proof,
    say_lost,
)
from archipelago.islands.team.ranks import HostRank, alike, flag_error, key_of

if TYPE_CHECKING:
    from archipelago.islands.worker import Island

#: How long a process takes to find its devices. On a loaded machine, JAX alone loads for many seconds.
DEVICES_SECONDS = 300.0
#: The most seconds in which a leader that has lost a host announces its departure and ends.
DEPARTURE_SECONDS = 15.0

log = logging.getLogger(__name__)


def lead(options: IslandOptions, here: HostRank, stopped: Callable[[], bool]) -> int:
    """Run an island as the leader of its hosts."""
    require_valid(options)
    leader = HostLeader(here, alike(options, here.hosts), key_of(options.url))
    try:
        status = run_island(options, lambda: stopped() or leader.is_stopping, leader=leader)
    except BaseException as error:
        leader.end(error=error)
        raise
    leader.end(status)
    return status


class _OtherHost:
    """One of the other processes, as the leader sees it. Its frames are sent by a thread, so the leader never waits."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection
        self.frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.is_stopping = self.has_ended = False
        self.said: queue.SimpleQueue[Frame] = queue.SimpleQueue()


class HostLeader:
    """The leader's connections to the other processes, and the island that it leads.

    Attributes:
        island: The island, as soon as there is one. It announces its departure if a host is lost.
    """

    def __init__(
        self, here: HostRank, about: Mapping[str, str], key: bytes, exits: Callable[[int], None] = exit_now
    ) -> None:
        """Note what the others must agree with.

        Args:
            here: The rank of this process.
            about: What all processes must have alike, by its name in words.
            key: What strangers do not know.
            exits: Ends this process at once if another is lost. Computations over several hosts would wait for ever.
        """
        self.island: Island | None = None
        self._here, self._about, self._key, self._exits = here, dict(about), key, exits
        self._others: dict[int, _OtherHost] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self._fault: ArchipelagoError | None = None
        self._listener: socket.socket | None = None
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._departing: threading.Thread | None = None

    # -- coming together ----------------------------------------------------------------------------------------------

    def gather(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until all others have come.

        Raises:
            ConfigError: The port cannot be used (`hosts.port`), or a process does not agree (`hosts.disagree`).
            HostError: Some processes have not come in time (`hosts.missing`).
            KeyboardInterrupt: A signal has arrived.
        """
        log.info("waiting at %s for the %s other hosts of this island", self._here.address, self._here.hosts - 1)
        self._listener = listening(self._here.port)
        threading.Thread(target=self._accept, name="hosts-accept", daemon=True).start()
        deadline = time.monotonic() + seconds
        while len(self._others) < self._here.hosts - 1:
            if self._fault is not None:
                raise self._fault
            if stopped():
                raise KeyboardInterrupt
            if time.monotonic() >= deadline:
                missing = ", ".join(str(r) for r in range(1, self._here.hosts) if r not in self._others)
                raise HostError(
                    f"the hosts {missing} of this island have not come to {self._here.address} in {seconds:g} s",
                    "Start all of them, or raise --wait-seconds.",
                    code="hosts.missing",
                )
            time.sleep(POLL_SECONDS / 4)

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and not self._is_over:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(sock,), name="hosts-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        """Let another process in, or tell it why not. A stranger learns nothing."""
        try:
            sock.settimeout(HELLO_SECONDS)
            connection = Connection(sock)
            challenge = secrets.token_hex(32)
            connection.send(Frame("challenge", (challenge,)))
            hello = connection.receive(HELLO_SECONDS)
            rank, about, own = hello.number(0), hello.text(1), hello.text(2)
            try:
                require_proof(hello.text(3), self._key, self._here.address, challenge, str(rank), about, own)
                with self._lock:  # of two that come at once with one rank, one is let in
                    self.require_fit(rank, json.loads(about))
                    connection.send(Frame("welcome", (proof(self._key, own),)))
                    self._enter(rank, connection)
            except ConfigError as refusal:
                connection.send(Frame("refused", (refusal.what, refusal.remedy, refusal.code)))
                connection.close()
                if refusal.code == "hosts.disagree":
                    self._fault = refusal
        except (OSError, ValueError, WireError) as error:
            log.debug("a process that came to the leader has left: %s", error)
            sock.close()

    def require_fit(self, rank: int, about: Mapping[str, str]) -> None:
        """Raise ConfigError unless a process that knows the key may be let in. The caller holds the lock."""
        for what, own in self._about.items():
            if own != about.get(what, "none"):
                raise disagreement(what, own, rank, about.get(what, "none"))
        if not 0 <= rank < self._here.hosts:
            raise flag_error(f"this island has no host {rank}", f"Give a --host-rank below {self._here.hosts}.")
        if rank == 0 or rank in self._others:
            raise flag_error(
                f"another process is host {rank} of this island already",
                "Give each process another --host-rank, and end those of earlier starts.",
            )

    def _enter(self, rank: int, connection: Connection) -> None:
        self._others[rank] = other = _OtherHost(rank, connection)
        for target in (self._send, self._hear):
            threading.Thread(target=target, args=(other,), name=f"host-{rank}", daemon=True).start()
        log.info("host %s of %s has come", rank, self._here.hosts)

    def assemble(self, manifest: Manifest, seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait for the others as `gather` does, and connect JAX. Raises its errors."""
        self.gather(seconds, stopped)
        self._coordinator = start_coordinator(self._here)
        self.tell("run", (json.dumps(manifest.to_fields()),))
        own = connect(self._here)
        for rank, said in self.ask_all("devices", DEVICES_SECONDS).items():
            if said.text(0) != own:
                raise disagreement("devices", own, rank, said.text(0))
        self.tell("go")

    # -- talking ------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, values: Sequence[Value] = (), arrays: Sequence[Any] = ()) -> None:
        """Tell the other processes what to do next. This never waits."""
        frame = Frame(kind, tuple(values), tuple(arrays))
        for other in self._others.values():
            other.frames.put(frame)

    def ask_all(self, kind: str, seconds: float) -> dict[int, Frame]:
        """Return what each of the others says next, by rank. Raises HostError (`hosts.missing`)."""
        found = {}
        deadline = time.monotonic() + seconds
        for rank, other in sorted(self._others.items()):
            try:
                found[rank] = other.said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise HostError(
                    f"host {rank} of this island has not said its {kind} in {seconds:g} s",
                    "Look at the log of that host, and start all of them again.",
                    code="hosts.missing",
                ) from None
        return found

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has stopped one of the other processes. All of them then leave together."""
        return any(other.is_stopping for other in self._others.values())

    def _send(self, other: _OtherHost) -> None:
        try:
            while True:
                try:
                    frame = other.frames.get(timeout=BEAT_SECONDS)
                except queue.Empty:
                    frame = Frame("beat")
                if frame is None:
                    return
                other.connection.send(frame)
        except OSError as error:
            self._lost(other, f"is lost ({in_words(error)})", LOST_STATUS)

    def _hear(self, other: _OtherHost) -> None:
        try:
            while True:
                frame = other.connection.receive(SILENCE_SECONDS)
                if frame.kind == "stopping":
                    other.is_stopping = True
                elif frame.kind == "ended":
                    other.has_ended = True
                elif frame.kind == "failed":  # a restart would find the same mistake again
                    status = frame.number(1) if 0 < frame.number(1) < 256 else USER_ERROR
                    self._lost(other, f"has ended: {frame.text(0)[:2000]}", status)
                elif frame.kind != "beat":
                    other.said.put(frame)
        except (OSError, WireError) as error:
            self._lost(other, f"is lost ({in_words(error)})", LOST_STATUS)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _lost(self, other: _OtherHost, what: str, status: int) -> None:
        """Tell the other hosts, let the island announce its departure, and end this process."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        other.has_ended = True
        if not is_first:
            return
        self._departing = threading.current_thread()
        other.connection.close()
        sentence = f"host {other.rank} of this island {what}"
        for each in self._others.values():
            with suppress(OSError):
                each.connection.send(Frame("end", (sentence, status)))
        say_lost(sentence, status)
        if self.island is not None:
            with suppress(Exception):
                self.island.give_up("left", sentence)
        self._exits(status)

    def end(self, status: int = 0, error: BaseException | None = None) -> None:
        """End the island in all processes: tell the others, and why if it is an error, and wait until they know."""
        if self._departing is not None:  # it has said why, and ends this process with the right status
            self._departing.join(DEPARTURE_SECONDS)
        self._is_over, sentence = True, ""
        if error is not None:
            what = error.what if isinstance(error, ArchipelagoError) else type(error).__name__
            sentence, status = f"the leader of this island has ended: {what}"[:2000], _status(error)
        self.tell("end", (sentence, status))
        for other in self._others.values():
            other.frames.put(None)
        deadline = time.monotonic() + 5.0
        while not all(each.has_ended for each in self._others.values()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        for other in self._others.values():
            other.connection.close()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would hold the port otherwise
            self._listener.close()
        if self._coordinator is not None:
            (leave if error is None else forget_others)()
            assert self._coordinator.stdin is not None  # noqa: S101 - it was started with a pipe
            self._coordinator.stdin.close()  # it ends some seconds later


def disagreement(what: str, own: str, rank: int, other: str) -> ConfigError:
    """Return the error of hosts that have not the same."""
    return ConfigError(
        f"the hosts of this island disagree: host 0 has {what} {own}, and host {rank} has {other}",
        "Install the same versions, and start all hosts with the same flags and as many devices.",
        code="hosts.disagree",
    )


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return supervised_status(error) if isinstance(error, ArchipelagoError) else 1
