"""The leader's connections to the other processes of its island, and what happens when one is lost.

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError, WireError
from archipelago.broker.process import USER_ERROR
from archipelago.islands.hosts.frames import Connection, Frame, Value
from archipelago.islands.hosts.greeting import HELLO_SECONDS, disagreement, matches, no_arrays, proof
from archipelago.islands.hosts.loss import BEAT_SECONDS, LOST_STATUS, SILENCE_SECONDS, OnLost, in_words
from archipelago.islands.hosts.membership import Membership
from archipelago.islands.hosts.ports import listening

POLL_SECONDS = 0.2

log = logging.getLogger(__name__)


class _Follower:
    """One of the other processes, as the leader sees it. Its frames are sent by a thread, so the leader never waits."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection
        self.frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.is_stopping = self.has_ended = False
        self.said: queue.SimpleQueue[Frame] = queue.SimpleQueue()


class Team:
    """The leader's connections to the other processes."""

    def __init__(self, place: Membership, about: Mapping[str, str], key: bytes) -> None:
        """Note what the others must agree with.

        Args:
            place: The place of this process.
            about: What all processes must have alike, by its name in words.
            key: What strangers do not know.
        """
        self.place, self._about, self._key = place, dict(about), key
        self._followers: dict[int, _Follower] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self._on_lost: OnLost = lambda sentence, status: None
        self._fault: ArchipelagoError | None = None
        self._listener: socket.socket | None = None
        #: JAX's numbers of the other processes by rank, which are the same unless a cluster numbers them itself.
        self.processes: dict[int, int] = {}

    # -- coming together ----------------------------------------------------------------------------------------------

    def gather(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until all others have come.

        Raises:
            ConfigError: The port cannot be used (`hosts.port`), or a process does not agree (`hosts.disagree`).
            HostError: Some processes have not come in time (`hosts.missing`).
            KeyboardInterrupt: A signal has arrived.
        """
        self._listener = listening(self.place.port)
        threading.Thread(target=self._accept, name="hosts-accept", daemon=True).start()
        deadline = time.monotonic() + seconds
        while len(self._followers) < self.place.hosts - 1:
            if self._fault is not None:
                self.end(str(self._fault), USER_ERROR)
                raise self._fault
            if stopped():
                raise KeyboardInterrupt
            if time.monotonic() >= deadline:
                missing = ", ".join(str(r) for r in range(1, self.place.hosts) if r not in self._followers)
                sentence = f"the hosts {missing} of this island have not come to {self.place.address} in {seconds:g} s"
                self.end(sentence, LOST_STATUS)
                raise HostError(sentence, "Start all of them, or raise --wait-seconds.", code="hosts.missing")
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
            hello = connection.receive(no_arrays, HELLO_SECONDS)
            rank, hosts, about, own = hello.number(0), hello.number(1), hello.text(2), hello.text(3)
            if not matches(hello.text(4), proof(self._key, challenge, str(rank), str(hosts), about, own)):
                connection.send(Frame("refused", (
                    f"the leader at {self.place.address} does not know this process",
                    "Give all hosts of an island the same Redis URL or join file.", "hosts.stranger",
                )))  # fmt: skip
                connection.close()
                return
            with self._lock:  # of two that come at once with one rank, one is let in
                refusal = self._refusal(rank, hosts, about)
                if refusal is None:
                    connection.send(Frame("welcome", (proof(self._key, own),)))
                    self._enter(rank, connection)
                    return
            connection.send(Frame("refused", (refusal.what, refusal.remedy, refusal.code)))
            connection.close()
            if refusal.code == "hosts.disagree":
                self._fault = refusal
        except (OSError, WireError) as error:
            log.debug("a process that came to the leader has left: %s", error)
            sock.close()

    def _refusal(self, rank: int, hosts: int, about: str) -> ArchipelagoError | None:
        """Return why a process is not let in; None if it is. The caller holds the lock until it has entered."""
        try:
            theirs = json.loads(about)
        except ValueError:
            theirs = None
        if not isinstance(theirs, dict):
            theirs = {}
        if hosts == self.place.hosts and rank in (0, *self._followers):
            return ConfigError(
                f"another process is host {rank} of this island already",
                "Give each process another --host-rank, and end those of earlier starts.",
                code="hosts.twice",
            )
        for what, own, other in [
            ("--hosts", str(self.place.hosts), str(hosts)),
            *((what, own, str(theirs.get(what, "none"))) for what, own in self._about.items()),
        ]:
            if own != other:
                return disagreement(what, own, rank, other)
        if not 0 < rank < hosts:
            return disagreement("a rank below", str(hosts), rank, str(rank))
        return None

    def _enter(self, rank: int, connection: Connection) -> None:
        follower = _Follower(rank, connection)
        self._followers[rank] = follower
        for target in (self._send, self._hear):
            threading.Thread(target=target, args=(follower,), name=f"host-{rank}", daemon=True).start()
        log.info("host %s of %s has come", rank, self.place.hosts)

    # -- talking ------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, values: Sequence[Value] = (), arrays: Sequence[Any] = ()) -> None:
        """Tell the other processes what to do next. This never waits."""
        frame = Frame(kind, tuple(values), tuple(arrays))
        for follower in self._followers.values():
            follower.frames.put(frame)

    def tell_each(self, frame: Callable[[int], Frame]) -> None:
        """Tell each of the other processes something else, by JAX's number of it. This never waits."""
        for rank, follower in self._followers.items():
            follower.frames.put(frame(self.processes.get(rank, rank)))

    def ask_all(self, kind: str, seconds: float) -> dict[int, Frame]:
        """Return what each of the others says next, by rank. Raises HostError (`hosts.missing`)."""
        found = {}
        deadline = time.monotonic() + seconds
        for rank, follower in sorted(self._followers.items()):
            try:
                found[rank] = follower.said.get(timeout=max(0.0, deadline - time.monotonic()))
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
        return any(follower.is_stopping for follower in self._followers.values())

    def watch(self, on_lost: OnLost) -> None:
        """Call `on_lost` if a process is lost from now on, or has been."""
        self._on_lost = on_lost

    def end(self, sentence: str = "", status: int = 0) -> None:
        """Tell the others that the island ends, and why if it is an error. Wait until they know."""
        self._is_over = True
        self.tell("end", (sentence[:2000], status))
        for follower in self._followers.values():
            follower.frames.put(None)
        deadline = time.monotonic() + 5.0
        while not all(each.has_ended for each in self._followers.values()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        for follower in self._followers.values():
            follower.connection.close()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would hold the port otherwise
            self._listener.close()

    def _send(self, follower: _Follower) -> None:
        try:
            while True:
                try:
                    frame = follower.frames.get(timeout=BEAT_SECONDS)
                except queue.Empty:
                    frame = Frame("beat")
                if frame is None:
                    return
                follower.connection.send(frame)
        except OSError as error:
            self._lost(follower, f"is lost ({in_words(error)})", LOST_STATUS)

    def _hear(self, follower: _Follower) -> None:
        try:
            while True:
                frame = follower.connection.receive(no_arrays, SILENCE_SECONDS)
                if frame.kind == "stopping":
                    follower.is_stopping = True
                elif frame.kind == "ended":
                    follower.has_ended = True
                elif frame.kind == "failed":
                    self._failed(follower, frame)
                elif frame.kind != "beat":
                    follower.said.put(frame)
        except (OSError, WireError) as error:
            self._lost(follower, f"is lost ({in_words(error)})", LOST_STATUS)

    def _failed(self, follower: _Follower, frame: Frame) -> None:
        """End the island as the process ended that has found a mistake. A restart would find it again."""
        status = frame.number(1)
        self._lost(follower, f"has ended: {frame.text(0)[:2000]}", status if 0 < status < 256 else USER_ERROR)

    def _lost(self, follower: _Follower, what: str, status: int) -> None:
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        follower.has_ended = True
        if not is_first:
            return
        follower.connection.close()
        sentence = f"host {follower.rank} of this island {what}"
        for other in self._followers.values():
            with suppress(OSError):
                other.connection.send(Frame("end", (sentence, status)))
        self._on_lost(sentence, status)
