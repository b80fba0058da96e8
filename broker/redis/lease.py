"""The lease that lets one merger write, and the fence around each of its writes (`broker.redis.script`).

A failover may forget the newest writes, even those of the lease and the epoch. Each history (the writes that one
primary has, in their order) is still written by one merger at a time:

- The epoch's key holds the number and the merger that took it. If the forgotten takeover gave merger A the number 5,
  the next merger B may be given 5 again, but the key then says `5 B`, and Redis refuses what A writes as `5 A`.
- If a takeover by B is forgotten, the key names A again, which may go on. Redis refuses what B writes.
- Replication keeps the order of writes. A replica that has a commit has the epoch in which it was made.
- A primary that is cut off may take writes of its merger until it learns of its successor. These writes belong to a
  history that ends: the old primary drops them when it follows the new one.
- A merger whose own writes were forgotten notices it with its next write: the server's instance is another one
  (`RedisConnection.instance`) than the one at which the merger took the lease, or the round that a commit or compaction
  names is not the last one. It then loads the run again. The round alone does not suffice: the contributions that
  a commit merges, the chunks that it points to, or the compaction that lets it delete entries may be forgotten, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from archipelago.broker.commits import Renewal, never_gone
from archipelago.broker.errors import BrokerError, FencedError, UnknownRunError, WithdrawnError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.script import ACQUIRE, FENCED, Value, Write, texts
from archipelago.broker.redis.stored_run import StoredRun

#: No merger takes a lease for longer. A lease without an end, or with a later one, was not written by a merger.
LEASE_SECONDS_MAX = 24 * 3600
#: A larger epoch is damage. Every take-over counts one.
EPOCH_MAX = 1 << 53


class ChangedError(BrokerError):
    """A hash of the run does not have the value that this merger has written last."""


class Lease:
    """The lease of one merger on the run, and its fenced writes.

    The object remembers its last epoch. A server that lost data may offer the same number again, but this merger must
    not take it, because writes that it sent in that epoch may still arrive. It remembers the uid of the run, too: a run
    that was created again under its name is another one, whatever its epoch says.
    """

    def __init__(self, connection: RedisConnection, stored: StoredRun) -> None:
        self._connection, self._stored = connection, stored
        self._redis, self._keys = connection.redis, connection.keys
        self._holder, self._epoch, self._instance = "", 0, ""
        self._uid: str | None = None

    def acquire(self, holder: str, seconds: float, is_gone: Callable[[str], bool] = never_gone) -> int | None:
        """See `MergerClient.acquire`."""
        failpoint("acquire.before")
        answer = self._asked(holder, seconds)
        if answer[0] == "held" and is_gone(answer[2]):
            answer = self._asked(holder, seconds, gone=answer[2])
        if answer[0] == "gone":
            raise self._gone()
        self._uid = answer[1] if self._uid is None else self._uid
        if answer[1] != self._uid:
            raise self._gone()
        if answer[0] == "held":
            return None
        self._holder, self._epoch, self._instance = holder, int(answer[2]), answer[3]
        failpoint("acquire.done")
        return self._epoch

    def _asked(self, holder: str, seconds: float, gone: str = "") -> list[str]:
        keys, milliseconds = self._keys, int(seconds * 1000)
        words: list[Value] = [holder, gone, self._epoch, milliseconds, LEASE_SECONDS_MAX * 1000]
        return self._run(ACQUIRE, [keys.manifest, keys.epoch, keys.lease, keys.tape], words)

    def _run(self, script: str, keys: Sequence[str], arguments: Sequence[Value]) -> list[str]:
        with self._connection.translated():
            return texts(self._redis.eval(script, len(keys), *keys, *arguments))

    def renew(self, epoch: int, holder: str, seconds: float) -> None:
        """See `MergerClient.renew`."""
        self._renewed(self._run(FENCED, *self._renewal(Renewal(epoch, holder, seconds))), epoch)

    def release(self, epoch: int) -> None:
        """See `MergerClient.release`."""
        failpoint("release.before")
        self.write(epoch, Write(("DEL", self._keys.lease)))
        failpoint("release.done")

    def fence(self) -> None:
        """End the present epoch, so that Redis refuses the next write of the merger that serves now."""
        with self._connection.translated():
            epoch = epoch_in(self._redis.get(self._keys.epoch))
            self._redis.set(self._keys.epoch, epoch_mark(epoch + 1))

    def write(self, epoch: int, write: Write, after_round: int | None = None) -> None:
        """Make a write that Redis accepts only in this epoch, and only while `after_round` is the last round.

        The server must be the instance at which the lease was taken. Another one may have forgotten a part of what this
        merger has read and written there, though it has the epoch and the round.

        Raises:
            FencedError: A newer epoch exists.
            ChangedError: A field does not have the expected value.
            WithdrawnError: An entry that the write merges is gone.
            UnknownRunError: The run was deleted (`broker.unknown-run`), or created again (`broker.other-run`).
            BrokerError: Another round was closed last, the server has lost something (`broker.other-round`), or a key
                was damaged and is written anew (`broker.damaged`). The merger must load the run again.
        """
        self._require_done(self._run(FENCED, *self._request(epoch, write, after_round)), epoch, after_round)

    def ask(self, pipe: Any, renewal: Renewal) -> None:
        """Queue a renewal, whose answer `answered` takes."""
        keys, arguments = self._renewal(renewal)
        pipe.eval(FENCED, len(keys), *keys, *arguments)

    def answered(self, answer: Any, renewal: Renewal) -> None:
        """Take the answer to a renewal that `ask` has queued. It raises what `renew` raises."""
        if isinstance(answer, Exception):
            raise answer
        self._renewed(texts(answer), renewal.epoch)

    def _renewal(self, renewal: Renewal) -> tuple[list[str], list[Value]]:
        write = Write(("lease", self._keys.lease, renewal.holder, int(renewal.seconds * 1000)))
        return self._request(renewal.epoch, write, None)

    def _renewed(self, answer: Sequence[str], epoch: int) -> None:
        self._require_done(answer, epoch, None)
        failpoint("renew.done")

    def _request(self, epoch: int, write: Write, after_round: int | None) -> tuple[list[str], list[Value]]:
        keys, words = write.request()
        head = self._keys.manifest  # not read
        if after_round is not None:
            shape = self._stored.shape()
            head = self._keys.head(shape.fragment_of(after_round) if after_round else shape.own_fragments[0])
        arguments: list[Value] = [
            self._uid or "",
            epoch_mark(epoch, self._holder),
            "" if after_round is None else after_round,
            self._instance,
            *words,
        ]
        return [self._keys.manifest, self._keys.epoch, head, *keys], arguments

    def _require_done(self, answer: Sequence[str], epoch: int, after_round: int | None) -> None:
        code, *found = answer
        if code == "overtaken":
            raise FencedError(
                f"epoch {epoch} of this merger has ended: another one took the lease, or the epoch's key was changed",
                "This merger takes the lease again unless another one holds it.",
            )
        if code == "gone":
            raise self._gone()
        if code == "round":
            raise self._forgotten(f"holds {found[0][:20] or 'no'} round although round {after_round} was closed last")
        if code == "instance":
            raise self._forgotten("is another instance than the one at which this merger took the lease")
        if code == "withdrawn":
            raise WithdrawnError(self._keys.short(found[0]).removeprefix("updates:"))
        if code == "changed":
            raise ChangedError(f"{self._connection.where} holds another {self._keys.short(found[0])}")
        if code == "missing":
            raise self._forgotten(f"has lost {self._keys.short(found[0])}, which this merger has written or read")
        if found:
            raise BrokerError(
                f"{self._connection.where} held damaged values, which were deleted: "
                f"{', '.join(map(self._keys.short, found))}",
                "The merger loads the run again, and writes what it can restore.",
                code="broker.damaged",
            )

    def _forgotten(self, what: str) -> BrokerError:
        return BrokerError(
            f"{self._connection.where} {what}",
            "It was restarted without its newest writes, or they were damaged; the merger loads the run again.",
            code="broker.other-round",
        )

    def _gone(self) -> UnknownRunError:
        """Return the error of a merger whose run is no longer there. Raises ConfigError for a damaged manifest."""
        if (uid := self._stored.uid()) is None:
            self._stored.manifest()
        if uid is None or uid == self._uid:
            return self._stored.unknown()
        return UnknownRunError(
            f"another run has taken the name {self._connection.run!r} at {self._connection.where}",
            "Start this merger again to serve that one.",
            code="broker.other-run",
        )


def epoch_mark(epoch: int, holder: str = "none") -> bytes:
    """Return the value of the epoch's key. The holder is the merger that serves, or `none` before the first one."""
    return f"{epoch} {holder}".encode()


def epoch_in(mark: bytes | None) -> int:
    """Return the number with which the epoch's key begins; 0 if there is none, or no merger can have written it."""
    try:
        epoch = int((mark or b"0").split()[0])
    except (ValueError, IndexError):
        return 0
    return epoch if 0 <= epoch <= EPOCH_MAX else 0
