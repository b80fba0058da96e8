"""The members of a run, as operators have registered them in Redis, and how one member signs and checks messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from archipelago.broker.errors import ConfigError
from archipelago.broker.invitation import Invitation, Members, raw_key
from archipelago.broker.signing import MERGER, Signing, SigningOff, SigningOn

#: The members are read again when they are older than this, so a revoked key is refused within this time.
FRESH_SECONDS = 1.0


class KnownMembers:
    """The members of a run as one process knows them. Threads may share it.

    Args:
        run: The name of the run.
        stored: Reads the members from Redis.
        clock: Monotonic seconds.
        wall: The wall clock in seconds, by which memberships end.
    """

    def __init__(
        self,
        run: str,
        stored: Callable[[], Members],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._stored = run, stored
        self._clock, self._wall = clock, wall
        self._lock = threading.Lock()
        self._members = Members()
        self._keys: dict[str, bytes] = {}
        self._read_at = float("-inf")

    def read(self) -> Members:
        """Return the members, at most FRESH_SECONDS old."""
        with self._lock:
            if self._clock() - self._read_at >= FRESH_SECONDS:
                self._members = self._stored()
                self._keys = {name: raw_key(m.key) for name, m in self._members.by_name.items() if m.key}
                self._read_at = self._clock()
            return self._members

    def key_of(self, island: str) -> bytes | None:
        """Return the public key of an island; None for others, and after the end of its membership."""
        member = self.read().by_name.get(island)
        if member is None or member.role != "island" or member.has_expired(self._wall()):
            return None
        return self._keys.get(island)

    def require_unsigned(self) -> None:
        """Raise ConfigError if the members of the run sign what they send. This process has no key to do so."""
        if self.read().merger_key:
            raise ConfigError(
                f"the members of the run {self._run!r} sign what they send, and this process has no key",
                "Start it with a join file, which `archipelago invite` makes, in place of the URL.",
                code="signature.no-key",
            )


def signing_of(invitation: Invitation | None, run: str, key_of: Callable[[str], bytes | None]) -> Signing:
    """Return how a process signs and checks messages.

    A process without a join file signs and checks nothing. One with a join file always does if that pins the key of
    the run's mergers: nothing in Redis can turn it off. Administrators sign as mergers when they create a run.
    """
    if invitation is None or not invitation.merger_key:
        return SigningOff()
    name = MERGER if invitation.role in ("merger", "admin") else invitation.name
    private = raw_key(invitation.private_key) if invitation.private_key else None
    return SigningOn(run, name, private, raw_key(invitation.merger_key), key_of)
