"""The lease that lets one merger write, and the fence around each of its writes.

Every write watches the epoch's key and is one transaction, so Redis itself refuses writes of an older epoch.

A failover may forget the newest writes, even those of the lease and the epoch. Each history (the writes that one
primary has, in their order) is still written by one merger at a time:

- The epoch's key holds the number and the merger that took it. If the forgotten takeover gave merger A the number 5,
  the next merger B may be given 5 again, but the key then says `5 B`, and Redis refuses what A writes as `5 A`.
- If a takeover by B is forgotten, the key names A again, which may go on. Redis refuses what B writes.
- Replication keeps the order of writes. A replica that has a commit has the epoch in which it was made.
- A primary that is cut off may take writes of its merger until it learns of its successor. These writes belong to a
  history that ends: the old primary drops them when it follows the new one.
- A merger whose own writes were forgotten notices it with its next commit or compaction: that names the round that
  must be the last one, and the server's instance is another one (`RedisConnection.instance`) than the one at which the
  merger took the lease. It then loads the run again. The round alone does not suffice: the contributions that a commit
  merges, the chunks that it points to, or the compaction that lets it delete entries may be forgotten, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import redis

from archipelago.broker.commits import never_gone
from archipelago.broker.errors import BrokerError, FencedError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.redis.bulk import asked_together
from archipelago.broker.redis.connection import INSTANCE, DisturbedError, RedisConnection, instance_in
from archipelago.broker.redis.failures import is_full
from archipelago.broker.redis.replies import epoch_in, epoch_mark, info_in
from archipelago.broker.redis.stored_run import StoredRun

#: No merger takes a lease for longer. A lease without an end, or with a later one, was not written by a merger.
LEASE_SECONDS_MAX = 24 * 3600
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
        self._instance = ""

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        self._stored.require()
        try:
            with self._connection.watching(self._keys.lease, self._keys.epoch) as pipe:
                if self._is_held_by_another(pipe, holder, is_gone):
                    return None
                epoch = self._next_epoch(pipe)
                failpoint("acquire.before")
                self._holder, self._instance = holder, self._connection.instance(pipe)
                pipe.multi()
                pipe.set(self._keys.epoch, self.mark(epoch))
                pipe.set(self._keys.lease, holder, px=int(seconds * 1000))
                pipe.execute()
        except DisturbedError:
            return None
        self._epoch = epoch
        failpoint("acquire.done")
        return epoch

    def _is_held_by_another(self, pipe: Any, holder: str, is_gone: Callable[[str], bool]) -> bool:
        owner = _read(lambda: pipe.get(self._keys.lease))
        if owner is None or owner == holder.encode() or is_gone(owner.decode("utf-8", "replace")):
            return False
        return 0 <= int(pipe.pttl(self._keys.lease)) <= LEASE_SECONDS_MAX * 1000

    def _next_epoch(self, pipe: Any) -> int:
        """Return an epoch after all known ones. The tape knows the last one if the epoch's key was lost or damaged."""
        stored = epoch_in(_read(lambda: pipe.get(self._keys.epoch)))
        newest = _read(lambda: pipe.xrevrange(self._keys.tape, count=1))
        taped = epoch_in(newest[0][1].get(b"epoch")) if newest else 0
        return max(self._epoch, stored, taped) + 1

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

    def fence(self) -> None:
        """End the present epoch, so that Redis refuses the next write of the merger that serves now."""
        with self._connection.watching(self._keys.epoch) as pipe:
            epoch = self._next_epoch(pipe)
            pipe.multi()
            pipe.set(self._keys.epoch, epoch_mark(epoch))
            pipe.execute()

    def mark(self, epoch: int) -> bytes:
        """Return the value of the epoch's key while this merger holds the lease.

        The number alone is not enough: a server that loses its newest writes would give one number to two mergers.
        """
        return epoch_mark(epoch, self._holder)

    @contextmanager
    def fenced(self, epoch: int, after_round: int | None = None, needed: Sequence[str] = ()) -> Iterator[Any]:
        """Yield the transaction of `fenced_reading`, which reads nothing more."""
        with self.fenced_reading((), epoch, after_round, needed) as (pipe, _):
            yield pipe

    @contextmanager
    def fenced_reading(
        self,
        reads: Sequence[tuple[Any, ...]],
        epoch: int,
        after_round: int | None = None,
        needed: Sequence[str] = (),
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Yield a transaction that Redis accepts only in this epoch, and only while `after_round` is the last round.

        The reads are answered within the fence. Together with its own checks, they take one round trip.

        With a round or needed keys, the server must be the instance at which the lease was taken. Another one may have
        forgotten a part of what this merger has read and written there, though it has the epoch and the round.

        Args:
            reads: Commands whose raw answers are yielded, too.
            epoch: The epoch of this merger.
            after_round: The round; None checks only the epoch.
            needed: Keys that must exist.

        Raises:
            FencedError: A newer epoch exists.
            BrokerError: Another round was closed last, or the server has lost something (code `broker.other-round`).
        """
        try:
            with self._connection.watching(self._keys.epoch) as pipe:
                answers = self._checked(pipe.connection, reads, epoch, after_round, needed)
                pipe.multi()
                yield pipe, answers
                pipe.execute()
        except DisturbedError:
            raise self.overtaken(epoch) from None

    def _checked(
        self,
        connection: Any,
        reads: Sequence[tuple[Any, ...]],
        epoch: int,
        after_round: int | None,
        needed: Sequence[str],
    ) -> list[Any]:
        """Return the answers to the reads, unless one of the conditions of `fenced_reading` does not hold."""
        rounds = [] if after_round is None else [("HGET", self._keys.head(self._fragment_of(after_round)), "round")]
        names_instance = bool(rounds or needed) and self._connection.has_info
        info = [("INFO", section) for section in INSTANCE if names_instance]
        there = [("EXISTS", *needed)] if needed else []
        checks = [("GET", self._keys.epoch), *rounds, *info, *there]
        found = asked_together(connection, [*checks, *reads])
        answers = iter([_value(answer) for answer in found[: len(checks)]])
        if next(answers) != self.mark(epoch):
            raise DisturbedError
        if after_round is not None:
            self._require_round(after_round, next(answers))
        if rounds or needed:
            self._require_same_instance(islice(answers, len(info)))
        if needed and next(answers) < len(needed):
            raise self._forgotten("a part of what was uploaded is gone from {}")
        for answer in found[len(checks) :]:
            if isinstance(answer, redis.ResponseError):
                raise answer
        return found[len(checks) :]

    def _fragment_of(self, number: int) -> int:
        return (number - 1) % len(self._stored.sizes())

    def _require_round(self, expected: int, stored: bytes | None) -> None:
        """Raise BrokerError unless `expected` is the last round of its fragment."""
        if stored != str(expected).encode():
            found, fragment = (stored or b"no").decode("utf-8", "replace")[:20], self._fragment_of(expected)
            raise self._forgotten(
                f"{{}} holds {found} round of fragment {fragment} although round {expected} was closed last"
            )

    def _require_same_instance(self, sections: Iterable[bytes]) -> None:
        server, replication = [info_in(raw) for raw in sections] or [{}, {}]
        if instance_in(server, replication) != self._instance:
            raise self._forgotten("{} is another instance than the one at which this merger took the lease")

    def _forgotten(self, what: str) -> BrokerError:
        return BrokerError(
            what.format(self._connection.where),
            "It was restarted without its newest writes, or they were damaged; the merger loads the run again.",
            code="broker.other-round",
        )

    def overtaken(self, epoch: int) -> FencedError:
        """Return the error of a write in an older epoch."""
        return FencedError(
            f"epoch {epoch} of this merger has ended: another merger took the lease, or the epoch's key was changed",
            "This merger takes the lease again unless another one holds it.",
        )


def _value(answer: Any) -> Any:
    """Return a raw answer; None if the key holds another type of value. Raises what else the server refused."""
    if isinstance(answer, redis.ResponseError):
        if "WRONGTYPE" not in str(answer):
            raise answer
        return None
    return answer


def _read(get: Callable[[], Any]) -> Any:
    """Return what the call returns, or None if the key holds another type of value."""
    try:
        return get()
    except redis.ResponseError as error:
        return _value(error)
