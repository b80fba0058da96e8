"""The connection of another process of an island to its leader, and what happens when the leader is lost."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from archipelago.broker.errors import HostError, WireError
from archipelago.islands.hosts.frames import Connection, Frame, Value
from archipelago.islands.hosts.greeting import HELLO_SECONDS, greet
from archipelago.islands.hosts.loss import BEAT_SECONDS, LOST_STATUS, SILENCE_SECONDS, OnLost, in_words
from archipelago.islands.hosts.membership import Membership

#: How often a process looks for a signal, and tries to reach a leader that is not there yet.
POLL_SECONDS = 0.2


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

    def fail(self, what: str, status: int) -> None:
        """Tell the leader that this process ends because of a mistake, so that it does not take it for lost."""
        self._is_over = True
        self.say("failed", what, status)

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
                    has_failed, self._is_over = self._is_over, True
                    self.say("ended")
                    if (sentence := frame.text(0)) and not has_failed:  # otherwise this process says its own mistake
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
        greet(connection, place, about, key)
    except BaseException:
        connection.close()
        raise
    return Seat(connection)
