"""What an island watches for: another run that has taken the name of its run, and a run that no merger serves.

A run that continues from a checkpoint is the same run, and its islands go back to that checkpoint. A new run under the
old name has other weights, and an island of the old one must neither take them nor send to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from archipelago.broker.errors import ConfigError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import ReaderClient, Transport, refusal

log = logging.getLogger(__name__)


def require_same_run(reader: ReaderClient, manifest: Manifest) -> None:
    """Raise ConfigError (`island.other-run`) if another run has the name of this one.

    A manifest that is lost or damaged says nothing: the run's merger writes it again.

    Args:
        reader: The connection to the run of that name.
        manifest: The run that the island joined.
    """
    if reader.uid() in (None, manifest.uid):
        return
    try:
        is_other = reader.manifest().uid != manifest.uid
    except (UnknownRunError, ConfigError):
        return
    if is_other:
        raise ConfigError(
            f"another run has taken the name {manifest.run!r}: it was created again while this island trained",
            "This island leaves, because its weights are not those of that run. Start it again to join the run of that "
            "name. `archipelago merger --resume` puts an earlier one back, from its checkpoints, if nothing was merged "
            "in the new one.",
            code="island.other-run",
        )


def require_no_islands(transport: Transport) -> None:
    """Raise ConfigError if islands of a run of this name, which the Redis does not have, are alive."""
    live = sorted(presence.heartbeat.island for presence in transport.reader.presences() if presence.is_live)
    if live:
        raise ConfigError(
            f"{len(live)} islands of a run {transport.run!r} that this Redis has lost are alive, such as {live[0]}",
            "A new run would begin from new weights. To continue theirs, run `archipelago init --resume FOLDER` with "
            "the folder of its merger. To give it up, stop them and wait 10 s, or repeat this with --replace.",
            code="init.islands-live",
        )


#: How often the warning is repeated while no merger serves.
REMIND_SECONDS = 60.0


class MergerWatch:
    """What one island knows about the merger of its run.

    Attributes:
        is_served: Whether a merger serves the run; None before the first look.
    """

    def __init__(self, reader: ReaderClient, run: str, clock: Callable[[], float]) -> None:
        self._reader, self._run, self._clock = reader, run, clock
        self.is_served: bool | None = None
        self._unserved_since: float | None = None
        self._warned_at: float | None = None

    @property
    def in_words(self) -> str:
        """What to show while no merger serves; otherwise empty."""
        return "no merger serves the run" if self.is_served is False else ""

    @property
    def away_seconds(self) -> float:
        """For how long no merger has served; 0 while one does."""
        since = self._unserved_since
        return 0.0 if since is None else self._clock() - since

    def look(self, *, is_over: bool) -> None:
        """Look whether a merger serves the run. One that is over needs none. Raises BrokerError."""
        self.is_served = self._reader.is_served()
        if self.is_served:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = self._clock()
        if not self.is_served and not is_over:
            self._warn()
        elif self._warned_at is not None:
            log.info("a merger serves the run %r again", self._run)
            self._warned_at = None

    def _warn(self) -> None:
        now = self._clock()
        if self._warned_at is not None and now - self._warned_at < REMIND_SECONDS:
            return
        self._warned_at = now
        if why := refusal(self._reader):  # asked as seldom as this is said: all islands call this at each heartbeat
            log.warning("no merger serves the run %r: %s", self._run, why, extra={"code": "island.no-merger"})
            return
        log.warning(
            "no merger serves the run %r. This island trains on, but the run does not advance, and steps beyond the "
            "window wait here, and become one contribution. After as many steps as the whole run has, the island "
            "leaves. Start a merger: `archipelago merger --run %s`, with $ARCHIPELAGO_URL set or "
            "with a merger's join file.",
            self._run,
            self._run,
            extra={"code": "island.no-merger"},
        )
