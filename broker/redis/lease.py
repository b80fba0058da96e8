"""The lease that lets one merger write, and the fence around each of its writes.

Every write watches the epoch's key and is one transaction, so Redis itself refuses writes of an older epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archipelago.broker.errors import BrokerError, FencedError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.redis.failures import is_full
from archipelago.broker.redis.stored_run import StoredRun

OVERTAKEN, EXPIRED = -1, 0
_EXTEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
return redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""


class Lease:
    """The lease of one merger on the run.

    The object remembers its last epoch. A server that lost data may offer the same number again, but this merger must
    not take it, because writes that it sent in that epoch may still arrive.
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
        try:
            with self.fenced(epoch) as pipe:
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
        except BrokerError as error:
            if not is_full(error):
                raise
            self._renew_when_full(error, epoch, seconds)
        failpoint("renew.done")

    def _renew_when_full(self, full: BrokerError, epoch: int, seconds: float) -> None:
        """Renew by a script: a server at its memory limit refuses every transaction, but only a merger can free it."""
        with self._connection.translated():
            milliseconds = int(seconds * 1000)
            found = self._redis.eval(_EXTEND, 2, self._keys.epoch, self._keys.lease, self.mark(epoch), milliseconds)
        if found == OVERTAKEN:
            raise self.overtaken(epoch)
        if found == EXPIRED:
            raise full

    def release(self, epoch: int) -> None:
        failpoint("release.before")
        with self.fenced(epoch) as pipe:
            pipe.delete(self._keys.lease)
        failpoint("release.done")

    def mark(self, epoch: int) -> bytes:
        """Return the value of the epoch's key while this merger holds the lease.

        The number alone is not enough: a server that loses its newest writes would give one number to two mergers.
        """
        return f"{epoch} {self._holder}".encode()

    @contextmanager
    def fenced(self, epoch: int, after_round: int | None = None) -> Iterator[Any]:
        """Yield a transaction that Redis accepts only in this epoch, and only while `after_round` is the last round.

        Raises:
            FencedError: A newer epoch exists.
            BrokerError: Another round was closed last (code `broker.other-round`).
        """
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
                f"{self._connection.where} holds round {int(stored or 0)} although round {expected} was closed last",
                "It restarted without its newest writes; the merger continues from what is there.",
                code="broker.other-round",
            )

    def overtaken(self, epoch: int) -> FencedError:
        """Return the error of a write in an older epoch."""
        return FencedError(
            f"another merger took the lease after epoch {epoch}", "It serves this run now; this merger leaves."
        )
