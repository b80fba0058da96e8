"""Delete all keys of one run from a Redis, and none of another run whose name begins alike."""

from __future__ import annotations

from collections.abc import Iterator

from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.membership import Membership

#: Keys that one command deletes, and keys that one step of a scan looks at.
BATCH, SCANNED = 500, 1000


class Deletion:
    """Deletes the run of one connection. Only an administrator may do that."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys

    def found(self) -> int:
        """Return the number of keys of the run. A run whose deletion was interrupted has keys, but no manifest."""
        return sum(map(len, self._batches()))

    def delete(self) -> int:
        """Delete the run, and return the number of its keys.

        What says that the run exists goes first and at once, so that no merger repairs a run that is half deleted: its
        epoch has ended, and it finds no run. The name goes last, so that an interrupted deletion can be repeated.
        """
        keys = self._keys
        first = [keys.manifest, keys.state, keys.fragment(0), keys.epoch, keys.lease]
        with self._connection.translated():
            count = int(self._redis.unlink(*first))
            for batch in self._batches():
                count += int(self._redis.unlink(*batch))
            self._connection.registry.srem(REGISTRY, self._connection.run)
        return count

    def delete_users(self) -> list[str]:
        """Delete the Redis users of the run's members, and return their names. Call this before `delete`."""
        membership = Membership(self._connection)
        users = [member.user for member in membership.all().by_name.values() if member.user]
        return [user for user in users if membership.remove_user(user)]

    def _batches(self) -> Iterator[list[bytes]]:
        """Yield the run's keys. No name of a run contains a character that patterns or the prefix use."""
        prefix = f"{self._keys.tag}:"
        batch: list[bytes] = []
        with self._connection.translated():
            for key in self._redis.scan_iter(match=f"{prefix}*", count=SCANNED):
                if not key.startswith(prefix.encode()):
                    continue
                batch.append(key)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        if batch:
            yield batch
