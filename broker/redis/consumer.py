"""A merger's reading of the updates streams through their consumer groups."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import redis

from archipelago.broker.entries import arrival, position
from archipelago.broker.errors import BrokerError, WireError
from archipelago.broker.redis.connection import RedisConnection, block_ms
from archipelago.broker.redis.failures import is_gone, is_wrong_kind
from archipelago.broker.redis.replies import GROUP, entries_by_stream, group_of
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import ISLANDS_MAX, UpdatesStreams
from archipelago.broker.transport import START, Delivery

#: How long one command waits for entries. Streams of islands that are new since then are read by the next command.
NEW_ISLANDS_SECONDS = 0.25
#: How often a run without any contribution is looked at.
EMPTY_POLL_SECONDS = 0.02
FAKE_POLL_SECONDS = 0.005


class UpdatesConsumer:
    """Reads all updates streams as the consumer group `merger`.

    It reads the streams of the islands in the set, and those that it has read before. A missing group is created. A
    group that someone deleted by hand then delivers all remaining entries of its stream again, because the new group
    does not know which of them were merged. The merger refuses those that were merged already as repeats.
    """

    def __init__(self, connection: RedisConnection, stored: StoredRun, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys
        self._stored, self._updates = stored, updates
        self._names: set[str] = set()  # the islands whose streams have a group

    def new(self, block_seconds: float, count: int) -> list[Delivery]:
        """Return entries that no merger has read yet, by arrival: at most `count` of each island.

        Waits at most `block_seconds` for the first one.
        """
        deadline = time.monotonic() + block_seconds
        while True:
            self._find_streams()
            left = deadline - time.monotonic()
            found = self._read(dict.fromkeys(self._names, ">"), count, min(left, NEW_ISLANDS_SECONDS))
            if found or time.monotonic() >= deadline:
                return found
            if not self._names:
                time.sleep(min(max(left, 0.0), EMPTY_POLL_SECONDS))  # no command waits without a stream
            elif not self._connection.has_info:
                time.sleep(FAKE_POLL_SECONDS)  # fakeredis returns too early

    def unacknowledged(self, after: str, count: int) -> list[Delivery]:
        """Return the first `count` entries after `after` that were read, but neither merged nor refused, by arrival."""
        self._find_streams()
        starts = {name: START if after == START else position(name, after) for name in self._names}
        return self._read(starts, count, 0)[:count]

    def _read(self, positions: Mapping[str, str], count: int, block_seconds: float) -> list[Delivery]:
        if not positions:
            return []
        streams = {self._keys.updates(name): position for name, position in positions.items()}
        senders = {self._keys.updates(name): name for name in positions}
        try:
            with self._connection.translated():
                found = self._redis.xreadgroup(GROUP, GROUP, streams, count=count, block=block_ms(block_seconds))
        except BrokerError as error:
            if not is_gone(error) and not is_wrong_kind(error):
                raise
            self._stored.require()
            self._names.clear()  # the next call finds out which streams can be read
            return []
        entries = [self._updates.delivery(senders[key], id_, raw) for key, id_, raw in entries_by_stream(found)]
        return sorted(entries, key=lambda delivery: arrival(delivery.entry))

    def _find_streams(self) -> None:
        """Make sure that the stream of every island has a group. A key that is no stream is skipped.

        Streams that were read before are read again even if someone removed their islands from the set.
        """
        new = [name for name in self._updates.names() if name not in self._names][: ISLANDS_MAX - len(self._names)]
        if not new:
            return
        with self._connection.translated():
            found = self._answers(*(("xinfo_groups", self._keys.updates(name)) for name in new))
            missing = []
            for name, groups in zip(new, found, strict=True):
                if isinstance(groups, Exception) and "WRONGTYPE" in str(groups):
                    self._connection.warn_once(self._keys.updates(name), WireError("it is not a stream"))
                elif isinstance(groups, Exception) or not group_of(groups):
                    missing.append(name)
                else:
                    self._names.add(name)
            if not missing:
                return
            # Without MKSTREAM, because streams of islands that never send would take memory and time.
            create = [("xgroup_create", self._keys.updates(name), GROUP, "0") for name in missing]
            for name, answer in zip(missing, self._answers(*create), strict=True):
                if not isinstance(answer, Exception) or "BUSYGROUP" in str(answer):
                    self._names.add(name)

    def _answers(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the answers to commands. Answers of the server that are errors are returned, not raised."""
        with self._redis.pipeline(transaction=False) as pipe:
            for name, *arguments in commands:
                getattr(pipe, name)(*arguments)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, redis.ResponseError):
                raise answer
        return answers
