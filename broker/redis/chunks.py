"""Store payloads in Redis: small ones inline, large ones as chunks of about 1 MiB under separate keys.

One large value would stall all other clients while the server copies it. Chunks are written first and the pointer to
them last, so readers never see an incomplete upload. Chunks expire unless a pointer keeps them.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import redis

from archipelago.broker.errors import WireError
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.signing import Raw

#: Payloads up to this size lie inline in the entry or hash.
INLINE_BYTES = 16 << 10
CHUNK_BYTES = (1 << 20) - 64  # exactly 1 MiB takes 1.25 times its size under jemalloc
CHUNKS_MAX = 1 << 20
#: Chunks sent before their answers are read.
SENT_AHEAD = 16
#: Chunks requested before the first one has arrived. A small number keeps the server's output buffers small.
READ_AHEAD = 3
#: Time to live of chunks of a run that is being created.
ORPHAN_SECONDS = 24 * 3600
#: Time to live of an island's chunks until their entry is there. A retry within this time sends only the rest.
UPLOAD_SECONDS = 600
#: How long readers can finish with a payload that was replaced, unless it is replaced once more.
PREVIOUS_SECONDS = 600
#: How many islands' stores a process keeps.
STORES_KEPT = 256
PAYLOAD, CHUNKS, NAME = "payload", "chunks", "chunks_name"
#: What TTL answers about a chunk that a pointer keeps, and about one that is not there.
KEPT, MISSING = -1, -2
_CHUNKS_NAME = re.compile(r"[A-Za-z0-9._-]{1,256}")


class ChunkStore:
    """The payloads of one run that the mergers, or one island, have stored.

    Args:
        payload_max: Returns the size in bytes of the largest payload that the run's manifest allows.
        prefix: What the keys of the chunks begin with; by default those of the mergers.
    """

    def __init__(self, connection: RedisConnection, payload_max: Callable[[], int], prefix: str = "") -> None:
        self._connection = connection
        #: What the keys of these chunks begin with. Their name and their number follow.
        self.prefix = prefix or connection.keys.chunk_prefix()
        self._redis = connection.redis
        self._keys = connection.keys
        self.payload_max = payload_max
        #: Returns the store of one island's chunks. A pointer in an entry of an island leads only to chunks of that
        #: island, whatever the pointer says. So no island can make a merger read, keep or delete the chunks of others.
        self.of = lru_cache(maxsize=STORES_KEPT)(self._of)

    def _of(self, owner: str) -> ChunkStore:
        return ChunkStore(self._connection, self.payload_max, self._keys.chunk_prefix(owner))

    def kept_of(self, owner: str) -> ChunkStore:
        """Return the store of the chunks of one island that mergers keep, and that it can no longer change."""
        return ChunkStore(self._connection, self.payload_max, self._keys.kept_prefix(owner))

    def most(self) -> int:
        """Return the most chunks that an honest payload has."""
        return -(-self.payload_max() // CHUNK_BYTES)

    def _chunk(self, name: str, index: int) -> str:
        return f"{self.prefix}{name}:{index}"

    def place(self, name: str, payload: bytes, seconds: int = ORPHAN_SECONDS) -> dict[str, str | bytes]:
        """Upload a large payload as chunks that expire unless they are kept.

        Chunks of two such uploads never share a name, so a repeated upload neither overwrites nor later deletes the
        chunks of the first.

        Returns:
            The fields that point to the chunks, or that hold a small payload.
        """
        if len(payload) <= INLINE_BYTES:
            return {PAYLOAD: payload}
        where = _pointing(f"{name}.{secrets.token_hex(4)}", payload)
        with self._connection.translated():
            self._send(where, payload, range(int(where[CHUNKS])), seconds)
        return where

    def upload(self, name: str, payload: bytes) -> tuple[dict[str, str | bytes], list[str]]:
        """Upload the payload of an entry, or what is not there yet if an earlier attempt broke off.

        The name must tell the content. Chunks that an entry keeps are left alone, because the merger deletes them with
        that entry: a copy of it gets chunks of its own.

        Returns:
            The fields as from `place`, and the chunks that `require_whole` must check before an entry keeps them.
        """
        if len(payload) <= INLINE_BYTES:
            return {PAYLOAD: payload}, []
        began = time.monotonic()
        where, found = self._begun(name, payload)
        wanted = zip(found[::2], _sizes(len(payload)), strict=True)
        missing = [i for i, (length, size) in enumerate(wanted) if length != size]
        with self._connection.translated():
            self._send(where, payload, missing, UPLOAD_SECONDS)
        is_certain = set(found[1::2]) == {MISSING} and time.monotonic() < began + UPLOAD_SECONDS / 4
        return where, [] if is_certain else self.placed(where)

    def _begun(self, name: str, payload: bytes) -> tuple[dict[str, str | bytes], list[Any]]:
        """Return where to upload the payload of an entry, and each chunk's length and time to live, in turn."""
        copy = 0
        while True:
            where = _pointing(f"{name}.{copy}", payload)
            found = self._found(self.placed(where))
            if KEPT not in found[1::2]:
                return where, found
            copy += 1

    def _found(self, chunks: Sequence[str]) -> list[Any]:
        """Return the length and the time to live of each chunk, in turn."""
        return self._connection.tolerant(*((command, chunk) for chunk in chunks for command in ("strlen", "ttl")))

    def require_whole(self, chunks: Sequence[str], size: int) -> None:
        """Raise DisturbedError unless all chunks of an upload are there, and none is kept. The caller watches them.

        They may have expired. Or the entry of an attempt whose connection broke has arrived after all, and keeps them.
        """
        found = self._found(chunks)
        if found[::2] != _sizes(size) or KEPT in found[1::2]:
            raise DisturbedError

    def _send(self, where: Mapping[str, str | bytes], payload: bytes, indexes: Collection[int], seconds: int) -> None:
        """Upload some chunks of a payload. Meanwhile the others do not expire, however slow the link is."""
        view, chunks, waiting = memoryview(payload), self.placed(where), list(indexes)
        renewed = time.monotonic() if len(waiting) == len(chunks) else -math.inf
        try:
            while waiting:
                with self._redis.pipeline(transaction=False) as pipe:
                    if time.monotonic() > renewed + seconds / 4:
                        renewed = time.monotonic()
                        for chunk in chunks:
                            pipe.expire(chunk, seconds, xx=True)  # not a chunk that an entry keeps
                    for index in waiting[:SENT_AHEAD]:
                        start = index * CHUNK_BYTES
                        pipe.set(chunks[index], view[start : start + CHUNK_BYTES], ex=seconds)
                    pipe.execute()
                del waiting[:SENT_AHEAD]
        except redis.ResponseError:  # such as a full memory, which must not fill up with parts of uploads
            with suppress(redis.RedisError):
                self._redis.unlink(*chunks)
            raise

    def settle(self, pipe: Any, where: Mapping[str, str | bytes]) -> None:
        """Keep a placed payload for as long as the entry or hash that points to it, by a pipeline or a fenced write."""
        for chunk in self.placed(where):
            pipe.persist(chunk)

    def placed(self, where: Mapping[str, str | bytes]) -> list[str]:
        """Return the chunks that `place` has uploaded."""
        return [self._chunk(str(where[NAME]), index) for index in range(int(where.get(CHUNKS, 0)))]

    def fetch(self, raw: Raw, size: int, limit: int | None = None) -> bytes:
        """Return the payload that `place` stored. Raises WireError when a chunk is missing.

        Args:
            raw: The fields of the entry or hash that points to it.
            size: Its size in bytes.
            limit: The largest size that is accepted; the default is that of an honest contribution or snapshot.
        """
        if PAYLOAD.encode() in raw:
            return raw[PAYLOAD.encode()]
        name, count = _pointer(raw)
        most = self.payload_max() if limit is None else limit
        if size > most or count != -(-size // CHUNK_BYTES):
            raise WireError(f"{count} chunks for a payload of {size} bytes", code="wire.payload")
        sizes = _sizes(size)
        # One byte more than the size shows a chunk that is longer, and no server sends more of it.
        commands = [("getrange", self._chunk(name, index), 0, length) for index, length in enumerate(sizes)]
        with self._connection.translated():
            return _read_joined(self._redis, commands, sizes)

    def found_keys(self, raw: Raw, limit: int) -> list[str]:
        """Return the chunks to which a hash points.

        There are none for a pointer that cannot be read, or that leads to more than `limit` bytes.
        """
        try:
            name, count = _pointer(raw)
        except WireError:
            return []
        if count > -(-limit // CHUNK_BYTES):
            return []  # forged: not worth a command of that size
        return [self._chunk(name, index) for index in range(count)]


def digests_of(payload: bytes) -> str:
    """Return the SHA-1 digests of a payload's chunks, joined: the digest that scripts of Redis can compute."""
    parts = (payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES))
    return "".join(hashlib.sha1(part, usedforsecurity=False).hexdigest() for part in parts)


def _sizes(size: int) -> list[int]:
    return [min(CHUNK_BYTES, size - start) for start in range(0, size, CHUNK_BYTES)]


def _pointing(name: str, payload: bytes) -> dict[str, str | bytes]:
    return {CHUNKS: str(len(_sizes(len(payload)))), NAME: name}


def _read_joined(client: Any, commands: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> bytes:
    """Return the answers to reading commands, joined.

    Args:
        client: The redis-py client whose pool lends the connection.
        commands: One command for each answer. READ_AHEAD further ones are sent before an answer is read.
        sizes: Bytes of each answer.

    Raises:
        WireError: They are not strings of exactly these sizes.
    """
    whole = io.BytesIO(bytes(sum(sizes)))  # filled in place; getvalue() then needs no copy
    pool = client.connection_pool
    connection = pool.get_connection()
    is_complete, sent, start = False, 0, 0
    try:
        for index, size in enumerate(sizes):
            for command in commands[sent : index + 1 + READ_AHEAD]:
                connection.send_command(*command)
                sent += 1
            answer = connection.read_response()
            if not isinstance(answer, bytes) or len(answer) != size:
                raise _missing(sizes)
            whole.getbuffer()[start : start + size] = answer
            start += size
        is_complete = True
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise  # the server is in trouble, and no contribution is refused for that
        raise _missing(sizes) from None
    finally:
        if not is_complete:
            connection.disconnect()  # more answers may be on their way to it
        pool.release(connection)
    return whole.getvalue()


def _missing(sizes: Sequence[int]) -> WireError:
    what = f"a chunk of the payload is missing, or they are not {sum(sizes)} bytes in all"
    return WireError(what, code="wire.payload")


def _pointer(raw: Raw) -> tuple[str, int]:
    try:
        count = int(raw[CHUNKS.encode()])
        name = raw[NAME.encode()].decode()
    except (KeyError, ValueError):
        raise WireError("neither a payload nor a pointer to one", code="wire.payload") from None
    if not 0 < count <= CHUNKS_MAX:
        raise WireError(f"{count} chunks", code="wire.payload")
    if not _CHUNKS_NAME.fullmatch(name):
        raise WireError(f"{name[:40]!r} is not the name of chunks", code="wire.payload")
    return name, count
