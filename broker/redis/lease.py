"""Which merger may write: the lease, and the fence around each of its writes.

Fencing is WATCH on the epoch and one MULTI for each write: Redis itself refuses the older epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipelago.broker.errors import BrokerError, FencedError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.redis.stored_run import StoredRun


class Lease:
    """The hold of one merger on the run.

    Attributes:
        holder: The name of this merger.
        epoch: The last epoch that this merger had. A server that forgets it must not give it to us again, because
            writes that we sent in it may still be on their way.
    """

    def __init__(self, connection: RedisConnection, stored: StoredRun) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored = stored
        self._holder = ""
        self._epoch = 0

    def acquire(self, holder: str, seconds: float) -> int | None:
        self._stored.require()
        try:
            with self._connection.watching(self._keys.lease, self._keys.epoch) as pipe:
                owner = pipe.get(self._keys.lease)
                if owner is not None and owner != holder.encode():
                    return None
                epoch = max(self._epoch, int((pipe.get(self._keys.epoch) or b"0").split()[0])) + 1
                failpoint("acquire.before")
                self._holder = holder
                pipe.multi()
                pipe.set(self._keys.epoch, self.mark(epoch))
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
                pipe.execute()
        except DisturbedError:
            return None
        self._epoch = epoch
        failpoint("acquire.done")
        return epoch

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        with self._connection.translated():
            kept = self._redis.pexpire(self._keys.lease, int(seconds * 1000))  # works at maxmemory, where SET does not
            current = self._redis.get(self._keys.epoch) == self.mark(epoch)
        if not current or not kept:
            with self.fenced(epoch) as pipe:
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
        failpoint("renew.done")

    def release(self, epoch: int) -> None:
        failpoint("release.before")
        with self.fenced(epoch) as pipe:
            pipe.delete(self._keys.lease)
        failpoint("release.done")

    def mark(self, epoch: int) -> bytes:
        """What the epoch's key holds while it is ours. The number alone is not enough: a server that dies may forget
        the newest, and would give it to two.
        """
        return f"{epoch} {self._holder}".encode()

    @contextmanager
    def fenced(self, epoch: int, after_round: int | None = None) -> Iterator[Any]:
        """A transaction that Redis refuses when a newer epoch exists, or another round than that was closed last."""
        try:
            with self._connection.watching(self._keys.epoch) as pipe:
                if pipe.get(self._keys.epoch) != self.mark(epoch):
                    raise DisturbedError
                if after_round is not None:
                    self._require_round(pipe.hget(self._keys.books, "round"), after_round)
                pipe.multi()
                yield pipe
                pipe.execute()
        except DisturbedError:
            raise self.overtaken(epoch) from None

    def _require_round(self, stored: bytes | None, expected: int) -> None:
        if int(stored or 0) != expected:
            raise BrokerError(
                f"{self._connection.where} holds round {int(stored or 0)} where round {expected} was closed last",
                "It was started again without its newest writes; the merger goes back to what is there.",
            )

    def overtaken(self, epoch: int) -> FencedError:
        return FencedError(
            f"this merger's epoch {epoch} was overtaken", "Another merger serves this run; this one leaves."
        )
