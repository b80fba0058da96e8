"""Which merger may write: the lease, and the fence around each of its writes.

Fencing is WATCH on the epoch and one MULTI for each write: Redis itself refuses the older epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipelago.broker.errors import BrokerError, FencedError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.redis.connection import Client, DisturbedError
from archipelago.broker.redis.reader import RedisReader


class RedisLease(RedisReader):
    """One merger's hold on the run."""

    def __init__(self, client: Client, run: str, where: str = "the Redis") -> None:
        super().__init__(client, run, where)
        self._holder = ""
        self._epoch = 0
        """the last that this merger had: a server that forgets it must not give it to us again, since what we sent in
        it may still be on its way"""

    def acquire(self, holder: str, seconds: float) -> int | None:
        self._require_run()
        try:
            with self._watching(self._keys.lease, self._keys.epoch) as pipe:
                owner = pipe.get(self._keys.lease)
                if owner is not None and owner != holder.encode():
                    return None
                epoch = max(self._epoch, int((pipe.get(self._keys.epoch) or b"0").split()[0])) + 1
                failpoint("acquire.before")
                self._holder = holder
                pipe.multi()
                pipe.set(self._keys.epoch, self._mark(epoch))
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
                pipe.execute()
        except DisturbedError:
            return None
        self._epoch = epoch
        failpoint("acquire.done")
        return epoch

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        with self._translated():
            kept = self._redis.pexpire(self._keys.lease, int(seconds * 1000))  # works at maxmemory, where SET does not
            current = self._redis.get(self._keys.epoch) == self._mark(epoch)
        if not current or not kept:
            with self._fenced(epoch) as pipe:
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
        failpoint("renew.done")

    def release(self, epoch: int) -> None:
        failpoint("release.before")
        with self._fenced(epoch) as pipe:
            pipe.delete(self._keys.lease)
        failpoint("release.done")

    def _mark(self, epoch: int) -> bytes:
        """What the epoch's key holds while it is ours. The number alone is not enough: a server that dies may forget
        the newest, and would give it to two.
        """
        return f"{epoch} {self._holder}".encode()

    @contextmanager
    def _fenced(self, epoch: int, after_round: int | None = None) -> Iterator[Any]:
        """A transaction that Redis refuses when a newer epoch exists, or another round than that was closed last."""
        try:
            with self._watching(self._keys.epoch) as pipe:
                if pipe.get(self._keys.epoch) != self._mark(epoch):
                    raise DisturbedError
                if after_round is not None:
                    self._require_round(pipe.hget(self._keys.books, "round"), after_round)
                pipe.multi()
                yield pipe
                pipe.execute()
        except DisturbedError:
            raise self._overtaken(epoch) from None

    def _require_round(self, stored: bytes | None, expected: int) -> None:
        if int(stored or 0) != expected:
            raise BrokerError(
                f"{self._where} holds round {int(stored or 0)} where round {expected} was closed last",
                "It was started again without its newest writes; the merger goes back to what is there.",
            )

    def _overtaken(self, epoch: int) -> FencedError:
        return FencedError(
            f"this merger's epoch {epoch} was overtaken", "Another merger serves this run; this one leaves."
        )
