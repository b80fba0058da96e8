"""A host of an island that follows the leader: its connection, and what happens when the leader is lost."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError, WireError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import keep_compiled, supervised_status
from archipelago.islands.options import IslandOptions, own_task, require_valid
from archipelago.islands.team.coordinator import connect, leave
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
    unfit,
)
from archipelago.islands.team.ranks import HostRank, alike, key_of

#: Batches, and the optimiser's state, may have this many bytes in addition to those of the model's copies.
SPARE_BYTES = 1 << 30
#: The bytes of one element of the optimiser's state of the largest optimisers, and of parameters and references.
ELEMENT_BYTES = 32

log = logging.getLogger(__name__)


class HostFollower:
    """The connection of another process to the leader."""

    def __init__(self, connection: Connection, exits: Callable[[int], None] = exit_now) -> None:
        """Note the connection, and what ends this process if the leader is lost, or ends with an error."""
        self._connection, self._exits = connection, exits
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._is_over = False
        #: The most bytes of a message. The manifest says how many there can be.
        self.most = 0

    def start(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Receive what the leader says, in a thread, and send signs of life, and whether a signal has arrived."""
        threading.Thread(target=self._hear, name="leader-hear", daemon=True).start()
        threading.Thread(target=self._beat, args=(stopped,), name="leader-beat", daemon=True).start()

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
            raise unfit(f"the leader says {frame.kind!r} in the place of {kind!r}")
        return frame

    def _hear(self) -> None:
        try:
            while True:
                frame = self._connection.receive(SILENCE_SECONDS, lambda: self.most)
                if frame.kind == "end":
                    has_failed, self._is_over = self._is_over, True
                    self.say("ended")
                    if (sentence := frame.text(0)) and not has_failed:  # otherwise this process says its own mistake
                        self._end_lost(sentence, frame.number(1))
                if frame.kind != "beat":
                    self._frames.put(frame)
        except (OSError, WireError) as error:
            is_lost, self._is_over = not self._is_over, True
            self._connection.close()
            if is_lost:
                self._end_lost(f"the leader of this island is lost ({in_words(error)})", LOST_STATUS)

    def _end_lost(self, sentence: str, status: int) -> None:
        say_lost(sentence, status)
        self._exits(status)

    def _beat(self, stopped: Callable[[], bool]) -> None:
        has_told = False
        while not self._is_over:
            is_stopping = stopped() and not has_told
            self.say("stopping" if is_stopping else "beat")
            has_told |= is_stopping
            time.sleep(POLL_SECONDS if not has_told else BEAT_SECONDS)

    def connect_devices(self, here: HostRank) -> Manifest:
        """Connect JAX, and return the run."""
        manifest = Manifest.from_fields(json.loads(self.expect("run").text(0)))
        self.most = SPARE_BYTES + ELEMENT_BYTES * manifest.parameters
        keep_compiled()
        self.say("devices", connect(here))
        self.expect("go")
        return manifest


def joined(
    here: HostRank,
    about: Mapping[str, str],
    key: bytes,
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    exits: Callable[[int], None] = exit_now,
) -> HostFollower:
    """Come to the leader, and return the connection.

    Args:
        here: The rank of this process.
        about: What all processes must have alike, by its name in words.
        key: What strangers do not know.
        seconds: How long to wait for the leader.
        stopped: Whether a signal has arrived.
        exits: Ends this process if the leader is lost.

    Raises:
        HostError: The leader is not there (`hosts.missing`).
        ConfigError: The leader refuses this process; the code is the leader's. Or it is no leader (`hosts.stranger`).
        KeyboardInterrupt: A signal has arrived.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return HostFollower(_greeted(here, about, key), exits)
        except (OSError, WireError) as error:
            if stopped():
                raise KeyboardInterrupt from error
            if time.monotonic() >= deadline:
                raise HostError(
                    f"the leader of this island does not answer at {here.address} ({in_words(error)})",
                    "Start host 0 there, or check --coordinator. Its port and the next one must be open to all hosts.",
                    code="hosts.missing",
                ) from None
        time.sleep(POLL_SECONDS)


def _greeted(here: HostRank, about: Mapping[str, str], key: bytes) -> Connection:
    """Return a connection on which both sides have proved that they know the key."""
    connection = Connection(socket.create_connection((here.host, here.port), timeout=HELLO_SECONDS))
    try:
        challenge = connection.receive(HELLO_SECONDS).text(0)
        own, text = secrets.token_hex(32), json.dumps(dict(about))
        connection.send(Frame("hello", (here.rank, text, own, proof(key, challenge, str(here.rank), text, own))))
        answer = connection.receive(HELLO_SECONDS)
        if answer.kind == "refused":
            raise ConfigError(answer.text(0), answer.text(1), code=answer.text(2))
        require_proof(answer.text(0), key, here.address, own)
    except BaseException:
        connection.close()
        raise
    return connection


def follow_leader(options: IslandOptions, here: HostRank, stopped: Callable[[], bool]) -> int:
    """Do what the leader of the hosts says until the island ends."""
    options.log_as(f"host-{here.rank}", options.run)
    require_valid(options)
    log.info("host %s of %s comes to the leader at %s", here.rank, here.hosts, here.address)
    about, key = alike(options, here.hosts), key_of(options.url)
    leader = joined(here, about, key, options.patience(stopped).seconds, stopped)
    leader.start(stopped)
    try:
        manifest = leader.connect_devices(here)
        task = own_task(options, manifest)

        from archipelago.islands.prepared import prepared_for
        from archipelago.islands.running import end_of_imports
        from archipelago.islands.team.computing import SharedComputation, follow

        end_of_imports()
        prepared = prepared_for(options, manifest, task)
        work, sample = prepared.workload, prepared.sample()
        computation = SharedComputation(manifest, work.steps, work.begin, prepared.placement)
    except ArchipelagoError as error:
        leader.fail(error.what, supervised_status(error))
        raise
    status = follow(leader.next, computation, sample)
    leave()
    return status
