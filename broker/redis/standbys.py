"""The standbys of a run at its Redis: a hash of their names, each with the server's time of its last sign of life."""

from __future__ import annotations

import re
from typing import Any

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
        silent = [standby.name for standby in self.all(silent=True) if standby.age_seconds >= STANDBY_SECONDS]
        with self._connection.translated():
            now_ms = _milliseconds(self._redis.time())
            with self._redis.pipeline(transaction=False) as pipe:
                if gone := [each for each in silent if each != name]:
                    pipe.hdel(self._key, *gone)
                pipe.hset(self._key, name, now_ms)
                pipe.expire(self._key, KEY_SECONDS)
                pipe.execute()

    def withdraw(self, name: str) -> None:
        """Remove a standby."""
        with self._connection.translated():
            self._redis.hdel(self._key, name)

    def all(self, *, silent: bool = False) -> list[Standby]:
        """Return the standbys by name; with `silent`, also those that have given no sign of life for too long."""
        found: Raw = {}
        with self._connection.forgiving(self._key, "a hash"):
            found = self._redis.hgetall(self._key)
        if not found:
            return []
        with self._connection.translated():
            now_ms = _milliseconds(self._redis.time())
        out = []
        for raw_name, raw_ms in found.items():
            name, text = raw_name.decode("utf-8", "replace"), raw_ms.decode("utf-8", "replace")
            if is_name(name) and re.fullmatch("[0-9]{1,16}", text, re.ASCII):
                age_seconds = max(0.0, (now_ms - int(text)) / 1e3)
                if silent or age_seconds < STANDBY_SECONDS:
                    out.append(Standby(name, age_seconds))
        return sorted(out, key=lambda standby: standby.name)[:LISTED_MAX]


def _milliseconds(time: Any) -> int:
    seconds, microseconds = time
    return int(seconds) * 1000 + int(microseconds) // 1000
