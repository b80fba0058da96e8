"""The connections between the leader of an island and its other processes, and what happens when one is lost.

The leader waits at its address until all others have come. Both sides prove that they know the address of the run's
Redis, and they compare what must be the same. Then the leader says what all processes do, in order, and the others do
it. Each side sends a sign of life each second. When one process is lost, all of them end: no computation over several
hosts can go on.
"""

from __future__ import annotations

import hmac
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
from archipelago.broker.process import OUTAGE, USER_ERROR
from archipelago.islands.hosts.frames import Connection, Frame, Value
from archipelago.islands.hosts.membership import Membership

#: A process that has been silent for this long is lost. One that ends closes its connection, which is noticed at once.
SILENCE_SECONDS = 15.0
BEAT_SECONDS = 1.0
#: A process that has just connected says who it is within this time.
HELLO_SECONDS = 10.0
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)

#: Called once, in any thread, with the sentence that says which process was lost, and the exit status.
OnLost = Callable[[str, int], None]
#: The exit status of all processes of an island that has lost one.
LOST_STATUS = OUTAGE


def proof(key: bytes, *parts: str) -> str:
    """Return what only a process can compute that knows the key."""
    return hmac.new(key, "\0".join(parts).encode(), "sha256").hexdigest()


def _matches(found: str, expected: str) -> bool:
    return hmac.compare_digest(found.encode(), expected.encode())


def _no_arrays() -> int:
    """Return the most bytes of the arrays of a greeting, or of what another process says to the leader."""
    return 0


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

    # -- coming together ----------------------------------------------------------------------------------------------

    def gather(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until all others have come.

        Raises:
            ConfigError: The port cannot be used (`hosts.port`), or a process does not agree (`hosts.disagree`).
            HostError: Some processes have not come in time (`hosts.missing`).
            KeyboardInterrupt: A signal has arrived.
        """
        self._listener = self._listening()
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

    def _listening(self) -> socket.socket:
        try:
            listener = socket.create_server(("", self.place.port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):
            try:
                listener = socket.create_server(("", self.place.port))
            except OSError as error:
                raise ConfigError(
                    f"the leader of this island cannot listen on port {self.place.port} ({error.strerror or error})",
                    "Choose another port for --coordinator, or end the process that has this one.",
                    code="hosts.port",
                ) from None
        return listener

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
            hello = connection.receive(_no_arrays, HELLO_SECONDS)
            rank, hosts, about, own = hello.number(0), hello.number(1), hello.text(2), hello.text(3)
            if not _matches(hello.text(4), proof(self._key, challenge, str(rank), str(hosts), about, own)):
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
            self._lost(follower, error)

    def _hear(self, follower: _Follower) -> None:
        try:
            while True:
                frame = follower.connection.receive(_no_arrays, SILENCE_SECONDS)
                if frame.kind == "stopping":
                    follower.is_stopping = True
                elif frame.kind == "ended":
                    follower.has_ended = True
                elif frame.kind != "beat":
                    follower.said.put(frame)
        except (OSError, WireError) as error:
            self._lost(follower, error)

    def _lost(self, follower: _Follower, error: Exception) -> None:
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        follower.has_ended = True
        if not is_first:
            return
        follower.connection.close()
        sentence = f"host {follower.rank} of this island is lost ({in_words(error)})"
        for other in self._followers.values():
            with suppress(OSError):
                other.connection.send(Frame("end", (sentence, LOST_STATUS)))
        self._on_lost(sentence, LOST_STATUS)


class Seat:
    """The connection of another process to the leader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._is_over = False
        self._on_lost: OnLost = lambda sentence, status: None
        self._stopped: Callable[[], bool] = lambda: False
        #: The most bytes of a message. The manifest says how many there can be.
        self.most = 0

    def start(self, on_lost: OnLost, stopped: Callable[[], bool]) -> None:
        """Receive what the leader says, in a thread, and send signs of life.

        Args:
            on_lost: Called if the leader is lost, or ends with an error.
            stopped: Whether a signal has arrived, which the leader must know.
        """
        self._on_lost, self._stopped = on_lost, stopped
        for target in (self._hear, self._beat):
            threading.Thread(target=target, name="leader", daemon=True).start()

    def say(self, kind: str, *values: Value) -> None:
        """Tell the leader something."""
        with suppress(OSError):  # the thread that receives notices that the leader is lost
            self._connection.send(Frame(kind, values))

    def next(self) -> Frame:
        """Wait for the next message."""
        return self._frames.get()

    def expect(self, kind: str) -> Frame:
        """Wait for the next message, which must be of that kind. Raises WireError (`hosts.message`)."""
        frame = self.next()
        if frame.kind != kind:
            raise WireError(f"the leader says {frame.kind[:40]!r} in the place of {kind!r}", code="hosts.message")
        return frame

    def _hear(self) -> None:
        try:
            while True:
                frame = self._connection.receive(lambda: self.most, SILENCE_SECONDS)
                if frame.kind == "end":
                    self._is_over = True
                    self.say("ended")
                    if sentence := frame.text(0):
                        self._on_lost(sentence, frame.number(1))
                if frame.kind != "beat":
                    self._frames.put(frame)
        except (OSError, WireError) as error:
            if self._is_over:
                self._connection.close()
            else:
                self._is_over = True
                self._connection.close()
                self._on_lost(f"the leader of this island is lost ({in_words(error)})", LOST_STATUS)

    def _beat(self) -> None:
        has_told = False
        while not self._is_over:
            is_stopping = self._stopped() and not has_told
            self.say("stopping" if is_stopping else "beat")
            has_told |= is_stopping
            time.sleep(POLL_SECONDS if not has_told else BEAT_SECONDS)


def joined(
    place: Membership,
    about: Mapping[str, str],
    key: bytes,
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Seat:
    """Come to the leader, and return the connection.

    Args:
        place: The place of this process.
        about: What all processes must have alike, by its name in words.
        key: What strangers do not know.
        seconds: How long to wait for the leader.
        stopped: Whether a signal has arrived.

    Raises:
        HostError: The leader is not there (`hosts.away`).
        ConfigError: The leader refuses this process; the code is the leader's. Or it is no leader (`hosts.stranger`).
        KeyboardInterrupt: A signal has arrived.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _greeted(place, about, key)
        except (OSError, WireError) as error:
            if stopped():
                raise KeyboardInterrupt from error
            if time.monotonic() >= deadline:
                raise HostError(
                    f"the leader of this island does not answer at {place.address} ({in_words(error)})",
                    "Start host 0 there, or check --coordinator. Its port and the next one must be open to all hosts.",
                    code="hosts.away",
                ) from None
        time.sleep(POLL_SECONDS)


def _greeted(place: Membership, about: Mapping[str, str], key: bytes) -> Seat:
    connection = Connection(socket.create_connection((place.host, place.port), timeout=HELLO_SECONDS))
    try:
        _greet(connection, place, about, key)
    except BaseException:
        connection.close()
        raise
    return Seat(connection)


def _greet(connection: Connection, place: Membership, about: Mapping[str, str], key: bytes) -> None:
    challenge = connection.receive(_no_arrays, HELLO_SECONDS).text(0)
    own, text = secrets.token_hex(32), json.dumps(dict(about))
    rank, hosts = place.rank, place.hosts
    connection.send(
        Frame("hello", (rank, hosts, text, own, proof(key, challenge, str(rank), str(hosts), text, own)))
    )  # fmt: skip
    answer = connection.receive(_no_arrays, HELLO_SECONDS)
    if answer.kind == "refused":
        raise ConfigError(answer.text(0), answer.text(1), code=answer.text(2))
    if answer.kind != "welcome" or not _matches(answer.text(0), proof(key, own)):
        raise ConfigError(
            f"what answers at {place.address} is not the leader of this island",
            "Check --coordinator, and give all hosts of an island the same Redis URL or join file.",
            code="hosts.stranger",
        )


def disagreement(what: str, own: str, rank: int, other: str) -> ConfigError:
    """Return the error of hosts that have not the same."""
    return ConfigError(
        f"the hosts of this island disagree: host 0 has {what} {own}, and host {rank} has {other}",
        "Install the same versions, and start all hosts with the same flags and as many devices.",
        code="hosts.disagree",
    )


def in_words(error: Exception) -> str:
    """Return the reason of a lost connection."""
    if isinstance(error, TimeoutError):
        return f"silent for {SILENCE_SECONDS:g} s"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error)
