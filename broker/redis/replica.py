"""Read the chunks of snapshots from a replica of the run's Redis, so that its own link carries fewer bytes.

Only chunks that mergers wrote are read there. Their names are never used twice, and what points to them comes from the
primary. So a replica can only be late, away or wrong, and never old: a chunk that it lacks, or whose payload has
another digest, is read from the primary. Everything else is read from the primary and written to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis

from archipelago.broker.address import redacted, require_address
from archipelago.broker.errors import BadUrlError
from archipelago.broker.redis.bulk import read_joined
from archipelago.broker.redis.client import RedisClient, client_at
from archipelago.broker.redis.failures import tls_fault
from archipelago.broker.signing import Raw
from archipelago.broker.transport import Arrived
from archipelago.broker.wire import digest

#: A replica that does not answer within this time is passed by.
ANSWER_SECONDS = 5.0
#: A replica that did not answer is asked again after this time.
PAUSE_SECONDS = 10.0
#: The same kind of trouble is logged once in this time.
REMIND_SECONDS = 60.0

log = logging.getLogger(__name__)


class Replica:
    """A replica that holds the same chunks as the primary, or fewer.

    Args:
        client: The client of the replica.
        where: Its address without a password.
        clock: Monotonic seconds.
    """

    def __init__(self, client: RedisClient, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._where, self._clock = client, where, clock
        self._asked_after = float("-inf")
        self._told: dict[str, float] = {}
        #: Bytes that were read here and not from the primary.
        self.bytes = 0

    def read(
        self, raw: Raw, commands: Sequence[tuple[Any, ...]], sizes: Sequence[int], ahead: int, arrived: Arrived
    ) -> bytes | None:
        """Return the answers to reading commands, joined; None if the primary must be asked.

        Args:
            raw: The fields that point to the chunks, which hold the digest of the payload where it is known.
            commands: One for each chunk.
            sizes: Bytes of each chunk.
            ahead: See `read_joined`.
            arrived: See `read_joined`.
        """
        if self._clock() < self._asked_after:
            return None
        try:
            payload = read_joined(self._client, commands, sizes, ahead, arrived)
        except (redis.RedisError, OSError) as error:
            self._asked_after = self._clock() + PAUSE_SECONDS
            self._tell("it does not answer", tls_fault(error) or error)
            return None
        if payload is None:
            self._tell("it lacks a payload, or refuses this user")
            return None
        if b"digest" in raw and digest(payload).encode() != raw[b"digest"]:
            self._tell("it holds another payload than the primary")
            return None
        self.bytes += len(payload)
        return payload

    def _tell(self, why: str, error: Exception | None = None) -> None:
        now = self._clock()
        if now - self._told.get(why, float("-inf")) >= REMIND_SECONDS:
            detail = f" ({type(error).__name__})" if error else ""
            text = "reading from the primary in place of the replica at %s: %s%s"
            log.warning(text, self._where, why, detail, extra={"code": "replica.passed-by"})
            self._told[why] = now

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def replica_at(url: str, authority: str = "") -> Replica:
    """Return the replica at that address, not yet connected. `authority` is as in `client_at`.

    Raises:
        BadUrlError: The address cannot be used.
    """
    try:
        require_address(url)
        client = client_at(url, authority)
    except (ValueError, TypeError):  # the message may quote a part of a password
        raise BadUrlError(
            f"--read-from {redacted(url)!r} cannot be read as the address of a Redis",
            "Write redis://HOST:PORT or rediss://USER:PASSWORD@HOST:PORT of a replica of the run's Redis.",
        ) from None
    client.connection_pool.connection_kwargs |= {"socket_timeout": ANSWER_SECONDS, "redis_connect_func": _read_only}
    return Replica(client, redacted(url))


def _read_only(connection: Any) -> None:
    """Log in to a server, and let a replica in a cluster answer; it would name its primary (MOVED) otherwise."""
    connection.on_connect()
    connection.send_command("READONLY")
    with suppress(redis.ResponseError):  # the server is no node of a cluster, or forbids the command to this user
        connection.read_response()
