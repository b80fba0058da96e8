"""A process that serves several shards of a run, and shares them with the other merger processes.

There is no coordinator. Every process reads from Redis who serves each shard and who stands by, and follows one rule.
Of S shards and n processes,

- a process takes a free shard while it serves fewer than ⌈S / n⌉, or when the shard has stayed free for two leases;
- it hands its last shard over while it serves more than ⌈S / n⌉, or while it serves more than ⌊S / n⌋ and another
  one serves fewer than that.

Each shard has a thread of its own, so one that cannot be served keeps no other one waiting. It is tried again from time
to time, as a process that serves one shard is started again by its supervisor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from archipelago.broker.errors import ArchipelagoError, BrokerError, UnknownRunError
from archipelago.broker.observe.logs import SHARD_THREAD
from archipelago.broker.shards.reader import on_a_thread
from archipelago.broker.transport import MergerTransport
from archipelago.merger.service import Clock, Merger
from archipelago.merger.serving import serve

#: How often a process reads who serves and who stands by.
LOOK_SECONDS = 1.0
#: How many leases a shard may stay free before any process takes it.
FREE_LEASES = 2.0
#: A shard that could not be served is tried again after this long, while the process serves others.
AGAIN_SECONDS = 30.0

log = logging.getLogger(__name__)


def share(serving: Mapping[str, int], shards: int) -> int:
    """Return the most shards that a process may serve, given how many each one serves."""
    return -(-shards // len(serving))


def is_above_share(name: str, serving: Mapping[str, int], shards: int) -> bool:
    """Return whether the process of that name should hand a shard over."""
    own, least = serving[name], shards // len(serving)
    others = (count for other, count in serving.items() if other != name)
    return own > share(serving, shards) or (own > least and min(others, default=least) < least)


def seen(
    transports: Sequence[MergerTransport], name: str, silent_seconds: float
) -> tuple[dict[str, int], frozenset[int]]:
    """Return how many shards each process serves, standbys 0, and which shards are free.

    Shards that are away, and standbys that are silent for longer, are not counted.
    """
    serving, free = {name: 0}, set()
    for shard, transport in enumerate(transports):
        try:
            status = transport.reader.merger_status()
            standbys = transport.reader.standbys()
        except BrokerError:
            continue
        for standby in standbys:
            if standby.age_seconds < silent_seconds:
                serving.setdefault(standby.name, 0)
        if status.holder:
            serving[status.holder] = serving.get(status.holder, 0) + 1
        else:
            free.add(shard)
    return serving, frozenset(free)


class Sharing:
    """The shards that this process serves. Only `look` talks to Redis. All `mergers` have one holder's name."""

    def __init__(self, mergers: Sequence[Merger], clock: Clock = time.monotonic) -> None:
        self._mergers, self._clock = mergers, clock
        self._name, self._lease_seconds = mergers[0].holder, mergers[0].lease_seconds
        #: How many shards each process serves; None before the first look, and after a shard was handed over.
        self._serving: Mapping[str, int] | None = None
        self._free_since: dict[int, float] = {}

    def look(self) -> None:
        """Read who serves the run."""
        serving, free = seen([merger.transport for merger in self._mergers], self._name, self._lease_seconds)
        now = self._clock()
        self._free_since = {shard: self._free_since.get(shard, now) for shard in free}
        self._serving = serving

    @property
    def served(self) -> list[int]:
        return [shard for shard, merger in enumerate(self._mergers) if merger.epoch]

    def may_take(self, shard: int) -> bool:
        """Return whether to take that shard if it is free."""
        if self._serving is None:
            return False
        free_seconds = self._clock() - self._free_since.get(shard, self._clock())
        is_left = free_seconds > FREE_LEASES * self._lease_seconds
        return is_left or len(self.served) < share(self._serving, len(self._mergers))

    def is_to_hand_over(self, shard: int) -> bool:
        """Return whether to hand that shard over. One shard is handed over at a time, and none while one is free."""
        serving, served = self._serving, self.served
        if serving is None or self._free_since or shard != served[-1]:
            return False
        if not is_above_share(self._name, {**serving, self._name: len(served)}, len(self._mergers)):
            return False
        self._serving = None
        return True


def _serve_shard(merger: Merger, shard: int, sharing: Sharing, stopped: Callable[[], bool]) -> bool:
    """Serve one shard of several until the run is finished or `stopped`. Return whether it is finished (`serve`)."""
    may_take, is_to_hand_over = (partial(rule, shard) for rule in (sharing.may_take, sharing.is_to_hand_over))
    try:
        return serve(merger, stopped, may_take=may_take, is_to_hand_over=is_to_hand_over)
    except ArchipelagoError as error:
        log.error("this process cannot serve its shard: %s", error, extra={"code": error.code})
        merger.epoch = 0
        raise


def serve_shards(
    mergers: Sequence[Merger],
    stopped: Callable[[], bool],
    look_seconds: float = LOOK_SECONDS,
    again_seconds: float = AGAIN_SECONDS,
) -> bool:
    """Serve the shards of a run until `stopped` or the end of the run, and share them with other processes.

    Args:
        mergers: The merger of each shard. None has acquired a lease.
        look_seconds: How often to read who serves and who stands by.
        again_seconds: When to try a shard again that could not be served.

    Returns:
        Whether the run is finished (`serve`).

    Raises:
        UnknownRunError: The run has lost a shard.
        ArchipelagoError: No shard can be served any more; this is the error of the first one that could not.
    """
    if len(mergers) == 1:
        return serve(mergers[0], stopped)
    sharing, is_over = Sharing(mergers), threading.Event()

    def begun(shard: int) -> Future[bool]:
        """Begin to serve a shard on a thread of its own, whose name is in the log."""
        work = partial(_serve_shard, mergers[shard], shard, sharing, lambda: is_over.is_set() or stopped())
        return on_a_thread(work, name=f"{SHARD_THREAD}{shard}")

    shards = [begun(shard) for shard in range(len(mergers))]
    again_at: dict[int, float] = {}  # of the shards that could not be served
    while alive := [each for each in shards if not each.done()]:
        sharing.look()
        wait(alive, look_seconds, FIRST_COMPLETED)
        now, errors = time.monotonic(), _errors(shards)
        if any(map(_ends_all, errors.values())):
            is_over.set()
            continue
        again_at = {shard: again_at.get(shard, now + again_seconds) for shard in errors}
        for shard in [shard for shard, at in again_at.items() if now >= at]:
            del again_at[shard]
            shards[shard] = begun(shard)
    if errors := _errors(shards):
        raise max(errors.values(), key=_ends_all)
    return all(each.result() for each in shards)


def _errors(shards: Sequence[Future[bool]]) -> dict[int, BaseException]:
    """Return the error of each shard that could not be served, by its number."""
    return {shard: error for shard, each in enumerate(shards) if each.done() and (error := each.exception())}


def _ends_all(error: BaseException) -> bool:
    """Return whether the whole process ends: the run lost a shard, and all go back together, or our code is wrong."""
    return isinstance(error, UnknownRunError) or not isinstance(error, ArchipelagoError)
