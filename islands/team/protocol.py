"""What the processes of one island say to each other. Only the leader, the first of them, talks to Redis.

All processes run the same program, each on its own part of the arrays. The leader decides at each step boundary: it
says what all do next, one piece of work after the other, until its turn ends. Each message is a sum over all processes,
to which the others add whether they have to stop. Losing a process means losing the island.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import CODECS
from archipelago.broker.errors import ArchipelagoError, ConfigError, DivergedError, HostError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import FAILED, OUTAGE

#: The code of the error that another process cannot train.
OTHER_FAILED = "hosts.failed"
#: The leader says so when the others do not come to it for this long, as where only the leader calls `sync`.
LONG_WAIT_SECONDS = 60.0

log = logging.getLogger(__name__)


class Work(IntEnum):
    """What all processes do together, when the leader says so. What it is about is in `Said`."""

    RUN = 1  #: take the manifest
    BEGIN = 2  #: begin from the parameters of all fragments
    TRY = 3  #: compile inner steps
    STEP = 4  #: make inner steps
    MEASURE = 5  #: measure a fragment
    ADOPT = 6  #: adopt a fragment
    GIVE_STATE = 7  #: gather the optimiser's state in the leader
    TAKE_STATE = 8  #: replace the optimiser's state by the leader's
    GIVE_TENSOR = 9  #: gather a tensor in the leader
    WARM_UP = 10  #: compile what syncs run
    WAIT = 11  #: nothing, while the leader waits for the end of the run
    EVALUATE = 12  #: evaluate the merged parameters


class Said(NamedTuple):
    """What the leader says, in numbers.

    Attributes:
        has_left: The exit status of a leader that has left because of an error; else 0.
        finished: Why to stop, as a place in `sync.script.REASONS`; 0 to go on.
        stopping: Whether SIGTERM has arrived in any of the processes. They then all stop at the same step.
        work: What all processes do together before the turn of the leader goes on; 0 if the turn has ended.
        about: What the work is about: the number of a fragment or a tensor, or the size of a manifest.
        codec: The place of a codec in the table of all (`codec_name`).
    """

    has_left: int = 0
    finished: int = 0
    stopping: int = 0
    step: int = 0
    steps: int = 0
    work: int = 0
    about: int = 0
    codec: int = 0

    @property
    def codec_name(self) -> str:
        return list(CODECS)[self.codec]


class Team(ABC):
    """The processes of one island. A framework carries the numbers and the bytes.

    Attributes:
        rank: The number of this process. The first one leads.
        size: How many processes there are.
        leaves_together: Whether the leader needs the others to measure the newest progress when the island leaves.
        is_alone: Whether the others do not listen now, so that the leader tells them nothing.
    """

    rank: int
    size: int
    leaves_together = True
    is_alone = False
    _told = Said()

    # -- what a framework adds ----------------------------------------------------------------------------------------

    @abstractmethod
    def _sum(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the sums of these numbers and those of all other processes."""

    @abstractmethod
    def share_bytes(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes of the leader. The others give as many."""

    def meet(self, seconds: float) -> None:  # noqa: B027 - JAX has no such limit
        """Wait until all processes call this, for so long, where a framework can limit it. Raises `scripts.GONE`."""

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.rank == 0

    def is_same(self, text: str) -> bool:
        """Return whether all processes call this with the same text."""
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:3])
        with self.waiting():
            numbers = self._sum([number if rank == self.rank else 0 for rank in range(self.size)])
        return set(numbers) == {number}

    def require_together(self, call: str) -> None:
        """Raise ConfigError (`loop.not-together`) unless all processes make this call."""
        if not self.is_same(call):
            raise ConfigError(
                f"this process calls `{call}`, and another process of this island calls something else",
                "Call `join` in every process and, if the model is split, `create` too, in the same order.",
                code="loop.not-together",
            )

    def exchange(self, said: Said) -> Said:
        """Return what the leader gives to this call. The others give nothing but whether they have to stop."""
        heard = self._sums(said)
        return heard._replace(finished=heard.finished or bool(heard.stopping))  # 1 is `signalled`

    def tell(self, work: Work, about: int = 0, codec: str = "", /, **numbers: int) -> None:
        """Say what all processes do now, if this one leads."""
        if self.leads and not self.is_alone:
            place = list(CODECS).index(codec) if codec else 0
            self._told = self._sums(Said(work=work, about=about, codec=place, **numbers))

    def _sums(self, said: Said) -> Said:
        with self.waiting():
            return Said(*self._sum(said))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say so in the log if the others keep the leader waiting."""
        late = threading.Timer(LONG_WAIT_SECONDS, _tell_of_others)
        late.daemon = True
        if self.leads:
            late.start()
        try:
            yield
        finally:
            late.cancel()

    @property
    def is_stopping(self) -> bool:
        """Whether SIGTERM had arrived in one of the others when the leader told them something last."""
        return bool(self._told.stopping)

    def hear(self, do: Callable[[Said], object], is_stopping: Callable[[], bool] = lambda: False) -> Said:
        """Do what the leader says until its turn ends, and return how. Tell it whether SIGTERM has arrived here."""
        while (said := self.exchange(Said(stopping=is_stopping()))).work:
            do(said)
        return said

    def agree(self, status: int = 0) -> None:
        """Compare with the others whether they can train.

        Args:
            status: The exit status of this process if it cannot. It then raises an error of its own.

        Raises:
            ConfigError, HostError: Another process cannot train (`hosts.failed`).
        """
        found = self.exchange(Said(has_left=status)).has_left
        if found and not status:
            raise process_left("another process of this island cannot train", status=found, code=OTHER_FAILED)

    def share_manifest(self, manifest: Manifest | None, size: int = 0) -> Manifest:
        """Return the leader's manifest. The others give the size of its message."""
        data = json.dumps(manifest.to_fields()).encode() if manifest is not None else bytes(size)
        if manifest is not None:
            self.tell(Work.RUN, len(data))
        shared = self.share_bytes(np.frombuffer(data, np.uint8))
        return manifest or Manifest.from_fields(json.loads(shared.tobytes()))


def _tell_of_others() -> None:
    log.warning(
        "rank 0 has waited %g s for the other processes of this island. All of them must call `join` and `sync`, at "
        "the same steps, and `create` if the model is split", LONG_WAIT_SECONDS, extra={"code": "loop.waits"},
    )  # fmt: skip


def process_left(what: str, *, code: str, status: int = 0) -> ArchipelagoError:
    """Return the error of a process that another one has left with that exit status. This one ends with the same."""
    kind = {OUTAGE: HostError, FAILED: DivergedError}.get(status, ConfigError)
    return kind(what, "See the error of that process, and start the island again.", code=code)


def leader_left(status: int = 0) -> ArchipelagoError:
    """Return the error of a process whose leader has left with that exit status."""
    what = "the leader of this island (rank 0) has left the run, or could not create it or read its end"
    return process_left(what, status=status, code="loop.leader-left")
