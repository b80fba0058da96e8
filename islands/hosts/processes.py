"""The start and the end of the processes of one island: who comes, what they must have alike, and how they end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.manifest import Manifest, installed_versions
from archipelago.broker.observe import logs
from archipelago.broker.process import INTERRUPTED, USER_ERROR, keep_compiled, supervised_status
from archipelago.islands.hosts.greeting import disagreement
from archipelago.islands.hosts.loss import LOST_STATUS
from archipelago.islands.hosts.membership import Membership
from archipelago.islands.hosts.seat import Seat, joined
from archipelago.islands.hosts.team import Team

if TYPE_CHECKING:
    from archipelago.islands.worker import Island

#: How long a process takes to find its devices. On a loaded machine, JAX alone loads for many seconds.
DEVICES_SECONDS = 300.0
#: Batches, and the optimiser's state, may have this many bytes in addition to those of the model's copies.
SPARE_BYTES = 1 << 30
#: The bytes of one element of the optimiser's state of the largest optimisers, and of parameters and references.
ELEMENT_BYTES = 32
#: The most seconds in which a leader that has lost a host announces its departure and ends.
DEPARTURE_SECONDS = 15.0
REMEDY = "All its processes end with status 75. Start all of them again."

log = logging.getLogger(__name__)


def alike(flags: Mapping[str, object]) -> dict[str, str]:
    """Return what all processes of an island must have alike: flags, and versions of packages."""
    given = {flag: str(value) for flag, value in flags.items() if value}
    return {"Python": platform.python_version(), **installed_versions(), **given}


def key_of(address: str) -> bytes:
    """Return what the processes of an island know and strangers do not: the Redis URL, or the content of a join file.

    A Redis without a password has no secrets, so anybody who knows its address can take part.
    """
    try:
        content = Path(address).read_bytes() if address and Path(address).is_file() else address.encode()
    except OSError:
        content = address.encode()
    return hashlib.sha256(b"archipelago hosts\0" + content).digest()


class Leading:
    """The leader's side of an island over several hosts."""

    def __init__(self, place: Membership, about: Mapping[str, str], key: bytes) -> None:
        self.place = place
        self.team = Team(place, about, key)
        self.island: Island | None = None
        #: The memory of the smallest device of all hosts in bytes; 0 if it is not known.
        self.device_bytes = 0
        self._has_jax = False
        self._departing: threading.Thread | None = None

    def assemble(self, manifest: Manifest, seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait for the others, and connect JAX. Raises ConfigError and HostError, as `Team.gather` does."""
        from archipelago.islands.hosts.coordinator import Coordinator, connect

        log.info("waiting at %s for the %s other hosts of this island", self.place.address, self.place.hosts - 1)
        self.team.gather(seconds, stopped)
        self.team.watch(self._lost)
        self._coordinator = Coordinator(self.place)
        self.team.tell("run", (json.dumps(manifest.to_fields()),))
        self._has_jax = True
        connect(self.place)
        own, memory, _ = devices_here()
        for rank, said in self.team.ask_all("devices", DEVICES_SECONDS).items():
            if said.text(0) != own:
                raise disagreement("devices", own, rank, said.text(0))
            memory = min(memory, said.number(1))
            self.team.processes[rank] = said.number(2)
        self.device_bytes = memory  # all hosts choose the same mesh by it
        self.team.tell("go", (memory,))

    def _lost(self, sentence: str, status: int) -> None:
        """End this process at once. Computations over several hosts would wait for ever, or fail."""
        self._departing = threading.current_thread()
        _say_lost(sentence, status)
        if self.island is not None:
            with suppress(Exception):
                self.island.give_up("left", sentence)
        _exit(status)

    def end(self, status: int = 0, error: BaseException | None = None) -> None:
        """End the island in all processes."""
        from archipelago.islands.hosts.coordinator import forget_others, leave

        if self._departing is not None:  # it has said why, and ends this process with the right status
            self._departing.join(DEPARTURE_SECONDS)
        if error is None:
            self.team.end("", status)
        else:
            sentence = error.what if isinstance(error, ArchipelagoError) else f"{type(error).__name__}"
            self.team.end(f"the leader of this island has ended: {sentence}", _status(error))
        if self._has_jax:
            (leave if error is None else forget_others)()
            self._coordinator.close()


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return supervised_status(error) if isinstance(error, ArchipelagoError) else 1


def _say_lost(sentence: str, status: int) -> None:
    logs.say_error(f"{sentence}. {REMEDY}" if status == LOST_STATUS else sentence, "hosts.lost")


def come(place: Membership, about: Mapping[str, str], key: bytes, seconds: float, stopped: Callable[[], bool]) -> Seat:
    """Come to the leader as one of the other processes. Raises ConfigError and HostError, as `joined` does."""
    log.info("host %s of %s comes to the leader at %s", place.rank, place.hosts, place.address)
    seat = joined(place, about, key, seconds, stopped)

    def lost(sentence: str, status: int) -> None:
        _say_lost(sentence, status)
        _exit(status)

    seat.start(lost, stopped)
    return seat


def connect_devices(place: Membership, seat: Seat) -> tuple[Manifest, int]:
    """Connect JAX. Afterwards `jax.devices()` are those of all processes.

    Returns:
        The run, and the memory of the smallest device of all hosts in bytes; 0 if it is not known.
    """
    from archipelago.islands.hosts.coordinator import connect

    manifest = Manifest.from_fields(json.loads(seat.expect("run").text(0)))
    seat.most = most_bytes(manifest)
    keep_compiled()
    connect(place)
    seat.say("devices", *devices_here())
    return manifest, seat.expect("go").number(0)


def most_bytes(manifest: Manifest) -> int:
    """Return the most bytes of a message."""
    return SPARE_BYTES + ELEMENT_BYTES * manifest.parameters


def devices_here() -> tuple[str, int, int]:
    """Return the number and kind of this process's devices, the memory of one, and JAX's number of the process."""
    import jax

    from archipelago.islands.mesh.placement import device_memory

    devices = jax.local_devices()
    return f"{len(devices)} of {devices[0].device_kind}", device_memory(), jax.process_index()


def _exit(status: int) -> None:
    """End this process, although its main thread may wait for another host."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if status else USER_ERROR)
