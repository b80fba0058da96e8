"""Delete all keys of one shard of a run from a Redis, and none of another run whose name begins alike."""

from __future__ import annotations

import re
from collections.abc import Iterator

from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.membership import Membership

#: Keys that one command deletes, and keys that one step of a scan looks at.
BATCH, SCANNED = 500, 1000


def shards_with_keys(connection: RedisConnection) -> set[int]:
    """Return the shards of a run of which its servers hold keys. It needs no manifest."""
    tag = re.compile(rb"\{%s:s([0-9]{1,3})\}:" % re.escape(connection.run.encode()))
    found = set()
    with connection.translated():
        for node in connection.servers.nodes():
            keys = node.scan_iter(match=f"{{{connection.run}:s*", count=SCANNED)
            found |= {int(match[1]) for key in keys if (match := tag.match(key))}
    return found


class Deletion:
    """Deletes one shard of a run, by its connection. Only an administrator may do that.

    A run of several shards is deleted from its last to its first, which says that the run exists.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys

    def found(self) -> int:
        """Return the number of keys of the shard. A run whose deletion was interrupted has keys, but no manifest."""
        return sum(map(len, self._batches()))

    def delete(self) -> int:
        """Delete the shard, and return the number of its keys.

        What says that the run exists goes first and at once, so that no merger repairs a run that is half deleted: its
        epoch has ended, and it finds no run. The name goes last, so that an interrupted deletion can be repeated.
        """
        keys = self._keys
        first = [keys.manifest, keys.state, keys.fragment(0), keys.epoch, keys.lease]
        with self._connection.translated():
            count = int(self._redis.unlink(*first))
            for batch in self._batches():
                count += int(self._redis.unlink(*batch))
            if not self._connection.shard:
                self._connection.registry.srem(REGISTRY, self._connection.run)
        return count

    def delete_users(self) -> list[str]:
        """Delete the Redis users of the run's members, and return their names. Call this before `delete`."""
        membership = Membership(self._connection)
        users = [member.user for member in membership.all().by_name.values() if member.user]
        return [user for user in users if membership.remove_user(user)]

    def _batches(self) -> Iterator[list[bytes]]:
        """Yield the shard's keys. No name of a run contains a character that patterns or the prefix use."""
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
