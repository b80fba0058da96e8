"""The loop of a merger process: it stands by, serves, and continues after outages and damage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from archipelago.broker.errors import ArchipelagoError, BrokerError, FencedError, UnknownRunError, WireError, is_outage
from archipelago.broker.observe.progress import progress
from archipelago.merger.service import Merger
from archipelago.merger.standby import Standing

RETRY_SECONDS = 0.5
#: How often a merger loads the run again, without closing a round in between, because of an error that is no outage.
FAULTS_MAX = 10

log = logging.getLogger(__name__)


def serve(
    merger: Merger,
    stopped: Callable[[], bool],
    pause: Callable[[float], None] = time.sleep,
    share: Share | None = None,
) -> bool:
    """Serve until `stopped` or the end of the run, through outages, and as a standby while another merger serves.

    Args:
        merger: The merger. It has neither acquired the lease nor loaded.
        stopped: Whether to stop.
        pause: Waits that many seconds between two tries.
        share: Decides whether this process may serve the merger's shard, of several; by default it may.

    Returns:
        Whether the run is finished, and everything that islands sent is merged and in a checkpoint.

    Raises:
        UnknownRunError: The run was deleted.
        ConfigError: The run has lost what nothing can restore.
        BrokerError: The same fault came back after FAULTS_MAX repairs.
    """
    merger.warm_up()  # before it takes the lease, so that a standby is ready when it is needed
    standing = Standing(merger.transport, merger.holder, merger.clock)
    try:
        return _serve(merger, stopped, pause, standing, share or Share())
    finally:
        standing.end()


class Share:
    """What a process may serve of its run. A process that is alone with one shard may serve it always."""

    def may_take(self) -> bool:
        """Return whether to take the lease if it is free."""
        return True

    def is_to_hand_over(self) -> bool:
        """Return whether to release the lease now, for another process."""
        return False


def _serve(
    merger: Merger, stopped: Callable[[], bool], pause: Callable[[float], None], standing: Standing, share: Share
) -> bool:
    loaded, is_over, troubles = False, False, Troubles()
    while not is_over and not stopped():
        try:
            if merger.epoch and share.is_to_hand_over():
                _hand_over(merger)
                loaded = False
            if not merger.epoch and not (share.may_take() and merger.acquire()):
                standing.wait()
                pause(min(RETRY_SECONDS, merger.lease_seconds / 4))
                continue
            standing.take_over()
            if not loaded:
                with progress("loading the run's state"):
                    merger.load()
                loaded = True
                closed = merger.manifest.run_round(merger.state.closed)
                log.info("serving from round %s, epoch %s", closed, merger.epoch, extra={"round": closed})
            if merger.turn():
                troubles.end()
            is_over = merger.is_over()
        except FencedError as error:
            loaded, merger.epoch = False, 0
            if not _serves_again(merger, pause):
                log.warning("another merger holds the lease and serves this run; this one leaves (%s)", error.what)
                merger.controls.note("left", "another merger serves")
                return False
            log.warning("%s", error)
        except UnknownRunError:
            raise
        except (BrokerError, WireError) as error:  # an outage, full memory or damage, after which we can continue
            # We cannot know which writes arrived. We load what Redis holds, in an epoch that fences writes in flight.
            loaded, merger.epoch = False, 0
            pause(troubles.seconds(error))
    if merger.epoch:
        last = merger.manifest.described(merger.state.closed)
        why = "the run is finished" if is_over else f"it was stopped after {last}"
        _leave(merger, loaded, why, pause)
    return is_over


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
        if is_outage(error):
            return RETRY_SECONDS
        self._faults += 1
        if self._faults > FAULTS_MAX:
            raise error
        return float(RETRY_SECONDS * min(1 << (self._faults - 1), 32))

    def end(self) -> None:
        """Forget the errors, because a round has closed."""
        self._last, self._faults = "", 0


def _serves_again(merger: Merger, pause: Callable[[float], None]) -> bool:
    """Take the lease again after a write was fenced. This fails if another merger holds it."""
    for _ in range(2):  # once more, because another client may have disturbed the first attempt
        if merger.acquire():
            return True
        pause(0.0)
    return False


def _hand_over(merger: Merger) -> None:
    """Release the lease, so that another process takes it. It loads what this merger has committed."""
    last = merger.manifest.described(merger.state.closed)
    log.info("handing over after %s: another process serves fewer shards", last)
    merger.transport.merger.release(merger.epoch)
    merger.epoch = 0
    merger.controls.note("left", "another process serves fewer shards, and takes this one")


def _leave(merger: Merger, loaded: bool, why: str, pause: Callable[[float], None]) -> None:
    try:
        if loaded:
            merger.finish(pause)
        merger.transport.merger.release(merger.epoch)
        merger.controls.note("left", why)
    except BrokerError as error:
        log.info("cannot release the lease, which will expire: %s", error.what)
