"""Heartbeats of an island: what it tells the mergers of all shards each second, and what it looks for before.

It looks whether a newer process has its name, whether another run has the name of its run, what the operator asks for,
and whether a merger serves.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from archipelago.broker import machine
from archipelago.broker.control import DRAIN, EXPEL, island_field, require_welcome, run_steps
from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import NOTE_MAX, Note
from archipelago.broker.presence import Heartbeat, NameClaim
from archipelago.broker.transport import IslandTransport, ReaderClient, refusal
from archipelago.islands.sync.connection.downloads import require_same_run
from archipelago.islands.sync.connection.inbox import Inbox
from archipelago.islands.sync.connection.outbox import Outbox
from archipelago.islands.sync.measures import Uplink

#: What a heartbeat says may be this old when it is sent. So an island of short steps need not describe itself at each.
FRESH_SECONDS = 0.05
#: The largest total that an island takes over from its last heartbeat.
TOTAL_MAX = 1 << 60
#: How often the warning is repeated while no merger serves.
REMIND_SECONDS = 60.0
#: After an outage, a merger renews its lease, which may have expired, within this time.
RENEWAL_SECONDS = 3.0

log = logging.getLogger(__name__)


class Serving:
    """What one island knows of its run's merger. `is_served` is None before the first look."""

    def __init__(self, reader: ReaderClient, run: str, clock: Callable[[], float]) -> None:
        self._reader, self._run, self._clock = reader, run, clock
        self.is_served: bool | None = None
        self._unserved_since: float | None = None
        self._warned_at: float | None = None

    @property
    def away_seconds(self) -> float:
        """For how long no merger has served; 0 while one does."""
        since = self._unserved_since
        return 0.0 if since is None else self._clock() - since

    def heard(self, *, is_served: bool, is_over: bool) -> None:
        """Note whether a merger serves the run. One that is over needs none. Raises BrokerError."""
        is_first, self.is_served = self.is_served is None, is_served
        if is_served:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = self._clock()
        if not is_served and not is_over and (is_first or self.away_seconds >= RENEWAL_SECONDS):
            self._warn()
        elif is_served and self._warned_at is not None:
            log.info("a merger serves the run %r", self._run)
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
            "window wait here, and become one contribution. It leaves once it has made as many steps as the whole run "
            "has, but not within a minute. Start a merger: `archipelago merger --run %s`, with $ARCHIPELAGO_URL set or "
            "with a merger's join file.",
            self._run,
            self._run,
            extra={"code": "island.no-merger"},
        )


class Channel(NamedTuple):
    """What one island sends to one shard, and what it gets from there."""

    shard: int
    transport: IslandTransport
    outbox: Outbox
    inbox: Inbox


class Heartbeats:
    """The heartbeats and notes of one island.

    Attributes:
        first: The first heartbeat. Its fields about the process and the machine do not change. Its totals are those of
            the incarnation before.
        alive_at: When the loop said last that it goes on.
        stall_seconds: A loop has stalled if it asks for no heartbeat for this long. No peer waits for it then.
        is_replaced: Whether a newer process has taken this island's name over. The island leaves, and sends nothing
            more.
        request: The operator's request to this island: `drain`, `expel`, or empty.
        run_steps: The length of the run in steps, which an operator can change.
    """

    def __init__(
        self,
        transport: IslandTransport,
        channels: Sequence[Channel],
        manifest: Manifest,
        who: str,
        uplink: Uplink,
        clock: Callable[[], float],
        wall: Callable[[], float],
        changed: threading.Condition,
    ) -> None:
        """Start without a claim to the name.

        Args:
            channels: What it sends to each shard, and what it gets from there.
            who: The island and its incarnation, `NAME/INCARNATION`.
            clock, wall: Monotonic seconds, and those of the wall clock for notes.
            changed: Notified each time a shard was told.
        """
        self._transport, self._channels, self._manifest = transport, channels, manifest
        self._uplink, self._clock, self._wall, self._changed = uplink, clock, wall, changed
        self.name, _, incarnation = who.partition("/")
        host, pid = platform.node()[:200], os.getpid()
        self.first = Heartbeat(self.name, incarnation, "joining", host, pid, "", machine=machine.describe())
        self.newest: Heartbeat | None = None
        self.alive_at = self._beat_at = 0.0
        self.stall_seconds, self.is_stalled = math.inf, False
        self.is_replaced, self.request, self._own_field = False, "", island_field(self.name)
        self.run_steps = manifest.config.inner.steps
        self.serving = Serving(transport.reader, manifest.run, clock)
        self._requests: Mapping[str, str] = {}
        self._claim: NameClaim | None = None
        self._told: list[Heartbeat | None] = [None] * len(channels)
        self._served = [False] * len(channels)
        self._notes: deque[Note] = deque()

    # -- the training thread's side -----------------------------------------------------------------------------------

    def wants(self, state: str) -> bool:
        """Note that the loop goes on, in that state, and return whether to replace the next heartbeat."""
        self.alive_at = self._clock()
        is_fresh = self.alive_at - self._beat_at < FRESH_SECONDS
        return self.newest is None or self.newest.state != state or not is_fresh

    def replace(self, heartbeat: Heartbeat) -> bool:
        """Replace the next heartbeat. Return whether it has another state, so that it is sent at once."""
        changed = self.newest is None or self.newest.state != heartbeat.state
        self.newest, self._beat_at = heartbeat, self.alive_at
        return changed

    def note(self, kind: str, text: str) -> None:
        """Queue a note about the island. It is sent with the next heartbeat."""
        self._notes.append(Note(self._wall(), self.name, kind, text[:NOTE_MAX]))

    @property
    def is_heard(self) -> bool:
        """Whether the island has its name, and is joining or training."""
        is_here = self.newest is not None and self.newest.state in ("joining", "training")
        return is_here and not (self.is_replaced or self.is_stalled)

    @property
    def is_told(self) -> bool:
        """Whether each shard was told the newest heartbeat, or has missed it."""
        return all(beat is self.newest for beat in self._told)

    # -- joining ------------------------------------------------------------------------------------------------------

    def claim_name(self) -> None:
        """Claim the name of the island. Raises ConfigError if the operator has excluded it."""
        requests = self._transport.reader.control()
        require_welcome(requests, self.name, self._manifest.run)
        self._set_run_steps(requests)
        if self.name:  # a rehearsal has none
            self._claim = self._transport.island.claim_name(self.name, self.first.incarnation)
            beats = [presence.heartbeat for presence in self._transport.reader.presences()]
            for beat in (beat for beat in beats if beat.island == self.name):
                # Anyone may have written this heartbeat. Larger totals could not be reported any more.
                fields = ("steps", "tokens", "bytes_up", "bytes_down")
                self.first = replace(self.first, **{name: min(getattr(beat, name), TOTAL_MAX) for name in fields})

    def begin(self) -> None:
        """Note whether the run is served when the island has joined it."""
        if self.name:
            is_served = self._transport.reader.is_served()
            self._served = [is_served] * len(self._channels)
            self.serving.heard(is_served=is_served, is_over=self._is_over)

    def tell_unreadable(self, unreadable: str) -> None:
        """Tell the mergers which fragments this island cannot read while it joins, so that they write them again."""
        for channel in self._channels if self.name else ():
            channel.transport.island.heartbeat(replace(self.first, unreadable=unreadable))

    # -- sending ------------------------------------------------------------------------------------------------------

    def tell(self, shard: int) -> None:
        """Tell the merger of a further shard that this island lives. A shard that is away misses it."""
        beat = self.newest
        if beat is not None and not (self.is_replaced or self.is_stalled):
            try:
                self._served[shard] = self._channels[shard].transport.island.heartbeat(beat)
            except BrokerError as error:
                self._served[shard] = False
                log.debug("shard %s did not take the heartbeat: %s", shard, error.what)
        self._note_told(shard, beat)

    def beat(self) -> None:
        """Look around, and send shard 0 the heartbeat and the notes.

        Raises:
            ConfigError: Another run has taken the name of this one (`island.other-run`).
            BrokerError: Redis cannot be reached.
        """
        beat = self.newest
        if beat is None:
            return
        found = self._transport.island.look_around(self.name, self._claim)
        self.is_replaced = self.is_replaced or found.claim != self._claim
        if self.is_replaced:  # nothing else may be written under the name
            for channel in self._channels:
                channel.outbox.is_closed = True
            self._send_notes()
            self._note_told(0, beat)
            return
        if found.uid not in (None, self._manifest.uid):
            require_same_run(self._transport.reader, self._manifest)
        began = self._clock()
        if self._has_stalled(beat, began):
            return
        self._served[0] = self._transport.island.heartbeat(beat)
        self._uplink.answered(self._clock() - began)
        if found.uid is not None and found.requests != self._requests:  # a Redis without the run has no requests either
            self._set_run_steps(found.requests)
        self.serving.heard(is_served=any(self._served), is_over=self._is_over or beat.state == "leaving")
        request = found.requests.get(self._own_field, "")
        if request in (DRAIN, EXPEL):  # this request is final: the island leaves even if it is withdrawn
            self.request = request
        self._send_notes()
        self._note_told(0, beat)

    def _has_stalled(self, beat: Heartbeat, now: float) -> bool:
        """Return whether the loop has stopped preparing heartbeats, and say so once."""
        silent = now - self.alive_at
        was_stalled, self.is_stalled = self.is_stalled, beat.state == "training" and silent > self.stall_seconds
        if self.is_stalled and not was_stalled:
            log.warning(
                "the training loop has not synced for %.0f s, so the run goes on without this island until it does",
                silent, extra={"code": "island.stalled"},
            )  # fmt: skip
            self.note("stalled", f"its training loop has not synced for {silent:.0f} s")
            self._send_notes()
        return self.is_stalled

    @property
    def _is_over(self) -> bool:
        """Whether all steps of the run are made, as far as this island knows."""
        return max(channel.inbox.step for channel in self._channels) >= self.run_steps

    def _set_run_steps(self, requests: Mapping[str, str]) -> None:
        self._requests = requests
        self.run_steps = run_steps(self._manifest.config, requests, self.run_steps)
        for channel in self._channels:
            channel.inbox.run_steps = self.run_steps

    def _note_told(self, shard: int, beat: Heartbeat | None) -> None:
        with self._changed:
            self._told[shard] = beat
            self._changed.notify_all()

    def _send_notes(self) -> None:
        """Write the queued notes. A note that the broker refuses is dropped, so that it does not block other work."""
        while self._notes:
            try:
                self._transport.reader.note(self._notes[0])
            except UnreachableError:
                raise  # the note stays queued until the outage is over
            except BrokerError as error:
                log.warning("a note is lost (%s): %s", error.what, self._notes[0].text)
            self._notes.popleft()
