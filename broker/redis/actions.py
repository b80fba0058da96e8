"""The streams of the islands' actions, which a merger records and deletes (`--record`)."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator
from itertools import islice

from archipelago.broker.entries import arrival, entry_name, position
from archipelago.broker.errors import WireError
from archipelago.broker.messages import Actions, from_fields
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.replies import next_id, text_fields
from archipelago.broker.redis.updates import UpdatesStreams
from archipelago.broker.signing import Raw
from archipelago.broker.transport import START

log = logging.getLogger(__name__)


class ActionsStreams:
    """Reads the streams of all islands as one, in the order of arrival."""

    def __init__(self, connection: RedisConnection, updates: UpdatesStreams) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._updates = updates

    def read(self, after: str, count: int) -> list[tuple[str, Actions]]:
        """Return the first `count` readable entries after `after`, with their names."""
        streams = [self._of(name, last) for name, last in self._positions(after).items()]
        return list(islice(heapq.merge(*streams, key=lambda named: arrival(named[0])), count))

    def minids(self, until: str) -> dict[str, str]:
        """Return the smallest id that stays in each stream when all entries up to `until` are deleted."""
        if until == START:
            return {}
        return {self._keys.actions(name): next_id(last) for name, last in self._positions(until).items()}

    def _positions(self, after: str) -> dict[str, str]:
        """Return the last id of each stream that is not after `after`."""
        names = self._updates.names()
        if after == START:
            return dict.fromkeys(names, START)
        return {name: position(name, after) for name in names}

    def _of(self, name: str, after: str) -> Iterator[tuple[str, Actions]]:
        pages = self._connection.pages(self._keys.actions(name), after)
        while True:
            with self._connection.forgiving(self._keys.actions(name), "a stream"):
                found = next(pages, None)
                if found is not None:
                    yield from self._readable(name, *found)
                    continue
            return

    def _readable(self, name: str, id_: str, raw: Raw) -> Iterator[tuple[str, Actions]]:
        try:
            self._connection.signing.verify("actions", name, raw)
            actions = from_fields(Actions, text_fields(raw))
            if actions.island != name:
                raise WireError(f"{name} sent them in the name of {actions.island}")
        except WireError as error:
            log.warning("actions %s cannot be read: %s", entry_name(name, id_), error.reason)
            return
        yield entry_name(name, id_), actions
