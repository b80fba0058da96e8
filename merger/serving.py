"""The loop of a merger process: it stands by, serves, and continues after outages and damage.

A merger's name says where it runs. So a standby on the same machine sees when the process that served has ended, and
takes the lease at once. Standbys elsewhere wait until it expires.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

from archipelago.broker.errors import (
    ArchipelagoError,
    BrokerError,
    FencedError,
    UnknownRunError,
    UnreachableError,
    WireError,
    WithdrawnError,
    is_outage,
)
from archipelago.broker.machine import has_ended
from archipelago.broker.observe.progress import progress
from archipelago.broker.transport import STANDBY_SECONDS
from archipelago.merger.service import Merger

RETRY_SECONDS = 0.5
#: How often a merger loads the run again, without closing a round in between, because of an error that is no outage.
FAULTS_MAX = 10

log = logging.getLogger(__name__)


def serve(
    merger: Merger,
    stopped: Callable[[], bool],
    pause: Callable[[float], None] = time.sleep,
    may_take: Callable[[], bool] = lambda: True,
    is_to_hand_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve until `stopped` or the end of the run, through outages, and as a standby while another merger serves.

    Args:
        merger: The merger. It has neither acquired the lease nor loaded.
        may_take: Whether to take the lease if it is free. A process that serves several shards may leave it to others.
        is_to_hand_over: Whether to release the lease now, for another process. A finished run stays: that process may
            have served it to its end already.

    Returns:
        Whether the run is finished, and everything that islands sent is merged and in a checkpoint.

    Raises:
        UnknownRunError: The run was deleted.
        ConfigError: The run has lost what nothing can restore.
        BrokerError: The same fault came back after FAULTS_MAX repairs.
    """
    merger.rules.warm_up()  # before it takes the lease, so that a standby is ready when it is needed
    standing = Standing(merger)
    is_over, troubles, outage = False, Troubles(), ""
    try:
        while not is_over and not stopped():
            try:
                if merger.epoch and not merger.is_finished and is_to_hand_over():
                    last = merger.manifest.described(merger.state.closed)
                    log.info("handing over after %s: another process serves fewer shards", last)
                    _release(merger, "another process serves fewer shards, and takes this one")
                if not merger.epoch:
                    is_free, outage = may_take() and merger.acquire(), ""
                    if not is_free:
                        standing.wait()
                        pause(min(RETRY_SECONDS, merger.lease_seconds / 4))
                        continue
                    standing.end(takes_over=True)
                    with progress("loading the run's state"):
                        merger.load()
                    closed = merger.state.closed
                    log.info("serving from round %s, epoch %s", closed, merger.epoch, extra={"round": closed})
                    troubles.served()
                if merger.turn():
                    troubles.end()
                is_over = merger.is_over()
            except UnknownRunError:
                raise
            except (BrokerError, WireError) as error:  # an outage, damage, or another merger that serves now
                # We cannot know which writes arrived. We load what Redis holds, in an epoch that fences writes in
                # flight.
                was_serving = bool(merger.epoch or outage)  # until the outage
                merger.epoch, outage = 0, error.what if was_serving and is_outage(error) else ""
                pause(troubles.seconds(error))
        if merger.epoch:
            last = merger.manifest.described(merger.state.closed)
            outage = _leave(merger, "the run is finished" if is_over else f"it was stopped after {last}", pause)
        if outage and merger.lacks_checkpoint():
            what = "leaves without a last checkpoint, so only Redis has the newest rounds: %s"
            log.warning(what, outage, extra={"code": "checkpoint.not-last"})
        return is_over
    finally:
        standing.end()


class Troubles:
    """Counts the errors since the last closed round, so that neither an outage nor damage makes a merger spin."""

    def __init__(self) -> None:
        self._last, self._faults = "", 0

    def seconds(self, error: ArchipelagoError) -> float:
        """Return how long to wait before the next try. The pauses grow, except in an outage, which ends by itself.

        Raises:
            ArchipelagoError: This error, because a fault that is no outage came back after FAULTS_MAX repairs.
        """
        if error.what != self._last:  # an outage is logged once, however long it lasts
            log.warning("%s", error, extra={"code": error.code})
        self._last = error.what
        if is_outage(error) or isinstance(error, WithdrawnError | FencedError):  # which end by themselves, too
            return RETRY_SECONDS
        self._faults += 1
        if self._faults > FAULTS_MAX:
            raise error
        return float(RETRY_SECONDS * min(1 << (self._faults - 1), 32))

    def served(self) -> None:
        """Let the next error be logged, even if it is the last one again, because the run was loaded in between."""
        self._last = ""

    def end(self) -> None:
        """Forget the errors, because a round has closed."""
        self._last, self._faults = "", 0


def _leave(merger: Merger, why: str, pause: Callable[[float], None]) -> str:
    """Take a last checkpoint and release the lease. Return the outage that kept it from that, if there was one."""
    try:
        merger.finish(pause)
        _release(merger, why)
    except BrokerError as error:
        log.info("cannot release the lease, which will expire: %s", error.what)
        return error.what if is_outage(error) else ""
    return ""


def _release(merger: Merger, why: str) -> None:
    merger.transport.merger.release(merger.epoch)
    merger.epoch = 0
    merger.controls.note("left", why)


ANNOUNCE_SECONDS = STANDBY_SECONDS / 5
HOST_MAX = 40
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NAME = re.compile(r".*-(?P<pid>[0-9]{1,10})-(?P<numbering>[0-9a-f]{8})-[0-9a-f]{6}")


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
    """One merger's time as a standby. Call `wait` while another merger holds the lease, and `end` afterwards."""

    def __init__(self, merger: Merger) -> None:
        self._merger = merger
        #: When this merger has registered last; None while it is no standby.
        self._registered_at: float | None = None

    def wait(self) -> None:
        """Tell the run and the log that this merger waits. Raises UnreachableError."""
        merger, now = self._merger, self._merger.clock()
        if self._registered_at is not None and now - self._registered_at < ANNOUNCE_SECONDS:
            return
        is_first, self._registered_at = self._registered_at is None, now
        try:
            if is_first:
                who = merger.transport.reader.merger_status().holder or "another one"
                text = "standing by as %s: %s serves this run. This merger takes over when that one ends"
                log.info(text, merger.holder, who)
            merger.transport.merger.stand_by(merger.holder)
        except UnreachableError:
            raise
        except BrokerError as error:  # a full server, for example, refuses the sign of life; the lease still counts
            log.debug("cannot register as a standby: %s", error.what)

    def end(self, *, takes_over: bool = False) -> None:
        """Remove this merger from the standbys of the run, if it is one. Log that it `takes_over`."""
        if self._registered_at is None:
            return
        self._registered_at = None
        if takes_over:
            log.info("taking over: the other merger no longer serves")
        try:
            self._merger.transport.merger.stand_down(self._merger.holder)
        except BrokerError as error:
            log.debug("cannot leave the list of standbys, whose entries expire: %s", error.what)
