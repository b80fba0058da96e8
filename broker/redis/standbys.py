"""The standbys of a run at its Redis: a hash of their names, each with the server's time of its last sign of life."""

from __future__ import annotations

import re
from collections.abc import Iterator

from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.keys import is_name
from archipelago.broker.signing import Raw
from archipelago.broker.transport import STANDBY_SECONDS, Standby

#: The hash expires this long after its last change, because standbys that were killed remove nothing.
KEY_SECONDS = 60
#: More standbys than this are not listed. Any member with the role of a merger can write the hash.
LISTED_MAX = 64


class Standbys:
    """Registers mergers that wait for the lease, and lists them."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._key = connection.redis, connection.keys.standbys

    def announce(self, name: str) -> None:
        """Write that `name` waits now, and remove the standbys that have fallen silent."""
        now_ms = self._now_ms()
        known = [each for each in self._known(now_ms) if each.name != name]
        silent = [each.name for each in known if each.age_seconds >= STANDBY_SECONDS]
        with self._connection.translated(), self._redis.pipeline(transaction=False) as pipe:
            if silent:
                pipe.hdel(self._key, *silent)
            pipe.hset(self._key, name, now_ms)
            pipe.expire(self._key, KEY_SECONDS)
            pipe.execute()

    def withdraw(self, name: str) -> None:
        """Remove a standby."""
        with self._connection.translated():
            self._redis.hdel(self._key, name)

    def all(self) -> list[Standby]:
        """Return the standbys that gave a sign of life lately, by name."""
        known = (each for each in self._known(self._now_ms()) if each.age_seconds < STANDBY_SECONDS)
        return sorted(known, key=lambda standby: standby.name)[:LISTED_MAX]

    def _known(self, now_ms: int) -> Iterator[Standby]:
        found: Raw = {}
        with self._connection.forgiving(self._key, "a hash"):
            found = self._redis.hgetall(self._key)
        for raw_name, raw_ms in found.items():
            name, text = raw_name.decode("utf-8", "replace"), raw_ms.decode("utf-8", "replace")
            if is_name(name) and re.fullmatch("[0-9]{1,16}", text, re.ASCII):
                yield Standby(name, max(0.0, (now_ms - int(text)) / 1e3))

    def _now_ms(self) -> int:
        """Return the server's time in milliseconds."""
        with self._connection.translated():
            seconds, microseconds = self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000
