"""Connections of measured processes that sign what they send, and count the time that this takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from archipelago.broker.invitation import Invitation, key_text
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.signing import MERGER, Kind, Payload, Raw, Signing

#: A URL, or an invitation with the URL.
Address = str | Invitation
#: The private and the public key of each island and of MERGER.
KeyPairs = dict[str, tuple[bytes, bytes]]


def invitation(url: str, run: str, name: str, keys: KeyPairs) -> Invitation | None:
    """Return the invitation of an island, or of the mergers for the name MERGER; None without keys."""
    if not keys:
        return None
    private, merger_key = key_text(keys[name][0]), key_text(keys[MERGER][1])
    if name == MERGER:
        return Invitation(url, run, "merger", "merger", private, merger_key)
    return Invitation(url, run, name, "island", private, merger_key)


def connected(address: Address, run: str) -> RedisTransport:
    """Connect with a URL, or with an invitation; then `signing` also counts the time that signatures take."""
    if isinstance(address, str):
        return connect(address, run)
    transport = connect(address.url, run, address)
    transport.connection.signing = TimedSigning(transport.connection.signing)
    return transport


class TimedSigning:
    """A Signing that counts the seconds of processor time that it takes."""

    def __init__(self, inner: Signing) -> None:
        self._inner = inner
        self.is_on = inner.is_on
        self.seconds = 0.0

    def signed(
        self,
        kind: Kind,
        fields: Mapping[str, str],
        *,
        about: str = "",
        payload: Payload | None = None,
        stamp: str = "",
        sender: str = "",
    ) -> dict[str, str]:
        with self._counted():
            return self._inner.signed(kind, fields, about=about, payload=payload, stamp=stamp, sender=sender)

    def hashing(self, payload: bytes) -> Payload:
        return self._inner.hashing(payload)

    def verify(self, kind: Kind, sender: str, raw: Raw, *, about: str = "") -> None:
        with self._counted():
            self._inner.verify(kind, sender, raw, about=about)

    def verify_payload(self, raw: Raw, payload: bytes) -> None:
        with self._counted():
            self._inner.verify_payload(raw, payload)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds += time.thread_time() - began


def signing_seconds(transport: object) -> float:
    """Return the seconds that a connection has spent on signatures."""
    signing = transport.connection.signing if isinstance(transport, RedisTransport) else None
    return signing.seconds if isinstance(signing, TimedSigning) else 0.0
