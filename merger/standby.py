"""A standby: a merger that waits for the lease. It says who serves the run, and is listed in `status`.

A merger's name says where it runs. So a merger on the same machine sees when that process has ended, and takes the
lease at once. Mergers elsewhere wait until it expires.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.machine import has_ended
from archipelago.broker.transport import STANDBY_SECONDS, MergerStatus, MergerTransport

ANNOUNCE_SECONDS = STANDBY_SECONDS / 5
HOST_MAX = 40
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NAME = re.compile(r".*-(?P<pid>[0-9]{1,10})-(?P<numbering>[0-9a-f]{8})-[0-9a-f]{6}")

log = logging.getLogger(__name__)


def merger_name() -> str:
    """Return a name for the lease that tells people where this process runs, and that no other process has."""
    host = re.sub(r"[^A-Za-z0-9]+", "-", platform.node().partition(".")[0]).strip("-")[:HOST_MAX]
    return "-".join([host or "merger", str(os.getpid()), *filter(None, [numbering()]), uuid.uuid4().hex[:6]])


def has_ended_here(name: str) -> bool:
    """Return whether the merger of that name was a process of this machine and has ended. Unknown names are False."""
    found = _NAME.fullmatch(name)
    return found is not None and found["numbering"] == numbering() and has_ended(int(found["pid"]))


@cache
def numbering() -> str:
    """Return eight digits for what numbers the processes here: a start of the machine, and in it a container or none.

    Host names would not do, because containers and copied machines share them. Empty where the system does not tell.
    """
    try:
        parts = _BOOT.read_text(encoding="ascii"), str(_NAMESPACE.readlink())
    except (OSError, ValueError):
        return ""
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


class Standing:
    """One merger's time as a standby. Call `wait` while another merger holds the lease, and `end` afterwards.

    Args:
        transport: The connection to the run.
        name: The name under which this merger takes the lease.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, transport: MergerTransport, name: str, clock: Callable[[], float]) -> None:
        self._transport, self._name, self._clock = transport, name, clock
        self._announced_at = float("-inf")
        #: The merger that served when we looked last; None while this merger is no standby.
        self._serving: str | None = None

    def wait(self) -> None:
        """Tell the run and the log that this merger waits. Raises UnreachableError."""
        if self._clock() - self._announced_at < ANNOUNCE_SECONDS:
            return
        self._announced_at = self._clock()
        try:
            status = self._transport.reader.merger_status() or MergerStatus()
            if self._serving is None or (status.holder and status.holder != self._serving):
                known = f"{status.holder} serves this run with epoch {status.epoch}"
                who = known if status.holder else "another one serves"
                log.info("standing by as %s: %s. This merger takes over when that one ends", self._name, who)
                self._serving = status.holder
            self._transport.merger.stand_by(self._name)
        except UnreachableError:
            raise
        except BrokerError as error:  # a full server, for example, refuses the sign of life; the lease still counts
            log.debug("cannot register as a standby: %s", error.what)

    def take_over(self) -> None:
        """Log that this merger has the lease now, if it was a standby."""
        if self._serving is not None:
            log.info("taking over: %s no longer serves", self._serving or "the other merger")
        self.end()

    def end(self) -> None:
        """Remove this merger from the standbys of the run."""
        if self._serving is None:
            return
        self._serving, self._announced_at = None, float("-inf")
        try:
            self._transport.merger.stand_down(self._name)
        except BrokerError as error:
            log.debug("cannot leave the list of standbys, whose entries expire: %s", error.what)
