"""Signatures of messages: Ed25519 over canonical bytes. A signed header names the SHA-256 digest of its payload.

Every member of a run has a key pair. An island signs its contributions, heartbeats and handovers. The mergers
of a run share one key pair, and sign the manifest, events, snapshots, differences, the tape and their own state. The
requests of operators are not signed. Only the rules of the Redis protect them.

A signature covers this version of the format, the run, the kind of message, its sender and its fields. So a signed
message proves nothing in another run, place or role.

Stamps order the signed messages of one signer, so that readers recognise a message that was replayed. A stamp is
`EPOCH-NUMBER`. The epoch is that of the merger's lease, and 0 for islands. The number grows with each message, also
over restarts, because it starts at the wall clock in microseconds. Where a clock was set back, a newer epoch or another
incarnation decides.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from archipelago.broker.errors import ConfigError, UnreachableError, WireError
from archipelago.broker.invitation import Invitation, Members, raw_key
from archipelago.broker.presence import Presence
from archipelago.broker.shards.reader import Bounded
from archipelago.broker.wire import SIGNED_DIGITS, digest, signed_digest

Kind = Literal[
    "contribution",
    "heartbeat",
    "handover",
    "manifest",
    "event",
    "fragment",
    "outer",
    "head",
    "difference",
    "tape",
    "state",
]
CONTEXT: Final = b"archipelago signature 1"
#: The sender of everything that the mergers of a run sign. No island can have this name.
MERGER: Final = "@merger"
SIGNATURE, DIGEST, STAMP, SIGNER = "signature", "digest", "stamp", "signer"
#: The kinds of messages that have a payload, and so a digest of it.
WITH_PAYLOAD: Final = frozenset({"contribution", "handover", "fragment", "outer", "difference"})
#: Fields that a signature does not cover. The payload is covered by its digest, and its chunks may move.
NOT_COVERED: Final = frozenset(
    {b"signature", b"payload", b"chunks", b"chunks_name", b"previous_chunks", b"previous_chunks_name"}
)
SIGNATURE_DIGITS: Final = 128

#: The fields of an entry or hash as the server returns them.
Raw = Mapping[bytes, bytes]
Stamp = tuple[int, int]
#: The stamp that is earlier than every other one.
FIRST: Stamp = (-1, 0)
#: A restored run begins this many epochs later, so that no epoch that was lost with the server is used again.
EPOCHS_SKIPPED = 1000
#: How many incarnations of each island are remembered.
INCARNATIONS = 8
#: The members are read again when they are older than this, so a revoked key is refused within this time.
FRESH_SECONDS = 1.0
#: While their server is away, the members that were known last count for this long, and are asked for this often.
KNOWN_SECONDS, RETRY_SECONDS = 600.0, 5.0
_STAMP = re.compile(rb"([0-9]{1,19})-([0-9]{1,19})")


class SignatureError(WireError):
    """A message is not signed by the member that should have signed it. It is ignored or refused."""

    code = "signature"

    @property
    def reason(self) -> str:
        return f"{self.what} ({self.code})"


# -- keys ----------------------------------------------------------------------------------------------------------


def generate() -> tuple[bytes, bytes]:
    """Return a new private key and its public key, each as 32 raw bytes."""
    private = Ed25519PrivateKey.generate().private_bytes_raw()
    return private, public_key(private)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key, each as 32 raw bytes."""
    public = Ed25519PrivateKey.from_private_bytes(private).public_key()
    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


# -- canonical bytes -----------------------------------------------------------------------------------------------


def canonical(run: str, kind: Kind, sender: str, about: str, fields: Raw) -> bytes:
    """Return the bytes that a signature signs. Different arguments never give the same bytes.

    Args:
        sender: The island that signs, or MERGER.
        about: The place of the message where its fields do not name it, such as the fragment and version of a
            difference; empty otherwise.
        fields: All fields of the message that the signature covers.
    """
    head = (CONTEXT, run.encode(), kind.encode(), sender.encode(), about.encode())
    parts = [*head, *(part for name in sorted(fields) for part in (name, fields[name]))]
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def covered(raw: Raw) -> Raw:
    return {name: value for name, value in raw.items() if name not in NOT_COVERED}


@lru_cache(maxsize=256)
def _public(raw: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw)


def is_signed(public: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of that public key has made the signature (hexadecimal digits) of the message."""
    if len(signature) != SIGNATURE_DIGITS:
        return False
    try:
        _public(public).verify(bytes.fromhex(signature.decode("ascii")), message)
    except (InvalidSignature, ValueError):
        return False
    return True


# -- signing in a run ----------------------------------------------------------------------------------------------


class Signing:
    """How one process signs what it writes and checks what it reads.

    In a run whose members are not invited, nothing is signed, and everything is accepted.

    Args:
        name: The member's name, or MERGER for all mergers.
        private: The private key; None for a member that only reads.
        merger_key: The public key of the run's mergers, from the join file; None if the members do not sign.
        key_of: Returns the public key of an island of that name; None if it is no member.

    Attributes:
        is_on: Whether messages must be signed.
    """

    def __init__(
        self,
        run: str = "",
        name: str = "",
        private: bytes | None = None,
        merger_key: bytes | None = None,
        key_of: Callable[[str], bytes | None] = lambda island: None,
    ) -> None:
        self._run, self._name, self._merger_key, self._key_of = run, name, merger_key, key_of
        self._private = None if private is None else Ed25519PrivateKey.from_private_bytes(private)
        self.is_on = merger_key is not None

    def signed(
        self,
        kind: Kind,
        fields: Mapping[str, str],
        *,
        about: str = "",
        payload: bytes | None = None,
        stamp: str = "",
        sender: str = "",
    ) -> dict[str, str]:
        """Return the fields of a message with the digest of its payload and the fields that sign it.

        Args:
            fields: All its fields, without its payload. If they have a digest, only a signature replaces it.
            stamp: Its stamp, if a replay must be recognised.
            sender: The island that sent the message first, if a merger signs in its place.

        Raises:
            ConfigError: This process has no key to sign with (`signature.no-key`).
        """
        if not self.is_on:
            return dict(fields) if payload is None or DIGEST in fields else {**fields, DIGEST: digest(payload)}
        if self._private is None:
            raise ConfigError(
                f"{self._name} has no key to sign with, and the run {self._run!r} requires signatures",
                "Use the join file of an island or of a merger.",
                code="signature.no-key",
            )
        out = {**fields, **({STAMP: stamp} if stamp else {})}
        if payload is not None:
            out[DIGEST] = signed_digest(payload)
        if sender and sender != self._name:
            out[SIGNER] = self._name
        raw = {name.encode(): value.encode() for name, value in out.items()}
        message = canonical(self._run, kind, sender or self._name, about, covered(raw))
        return {**out, SIGNATURE: self._private.sign(message).hex()}

    def verify(self, kind: Kind, sender: str, raw: Raw, *, about: str = "") -> None:
        """Raise SignatureError unless `sender` has signed the fields. Nothing else may look at them before.

        They name the digest of the payload, with which its reader compares it (`wire.is_digest`).
        """
        if self._merger_key is None:
            return
        signature = raw.get(SIGNATURE.encode())
        if signature is None:
            raise SignatureError(f"{sender} did not sign it", code="signature.wrong")
        by_merger = sender == MERGER or raw.get(SIGNER.encode()) == MERGER.encode()
        key = self._merger_key if by_merger else self._key_of(sender)
        if key is None:
            raise SignatureError(f"{sender} is not an island that was invited", code="signature.wrong")
        if not is_signed(key, canonical(self._run, kind, sender, about, covered(raw)), signature):
            raise SignatureError(f"the signature is not one of {sender}", code="signature.wrong")
        if kind in WITH_PAYLOAD and len(raw.get(DIGEST.encode(), b"")) != SIGNED_DIGITS:
            raise SignatureError("it does not name the SHA-256 of its payload", code="signature.wrong")


class Stamps:
    """Makes the stamps of one process, by a wall clock in seconds."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._number = 0

    def next(self, epoch: int = 0) -> str:
        """Return a stamp that is greater than all earlier ones of this epoch."""
        self._number = max(self._number + 1, int(self._wall() * 1e6))
        return f"{epoch}-{self._number}"


def stamp_of(raw: Raw) -> Stamp:
    """Return the stamp of a message. Raises SignatureError."""
    found = _STAMP.fullmatch(raw.get(STAMP.encode(), b""))
    if not found:
        raise SignatureError("it has no stamp", code="signature.wrong")
    return int(found[1]), int(found[2])


class HeartbeatOrder:
    """The newest heartbeat of each island, and when this process saw it first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, tuple[Stamp, float]]] = {}
        self._newest: dict[str, tuple[Presence, float]] = {}

    def accept(self, presence: Presence, stamp: Stamp) -> Presence:
        """Return the presence with an age that no one else can lower. Raises SignatureError for a replayed heartbeat.

        The age that Redis reports follows from the key's time to live, which others may extend.
        """
        beat, now = presence.heartbeat, self._clock()
        incarnations = self._seen.setdefault(beat.island, {})
        newest, since = incarnations.pop(beat.incarnation, (FIRST, now))
        if stamp > newest:
            newest, since = stamp, now
        incarnations[beat.incarnation] = newest, since
        while len(incarnations) > INCARNATIONS:
            del incarnations[next(iter(incarnations))]
        if stamp < newest:
            raise SignatureError(f"the heartbeat of {beat.island} is older than before", code="signature.replayed")
        accepted = Presence(beat, max(presence.age_seconds, now - since))
        self._newest[beat.island] = accepted, now
        return accepted

    def newest(self, island: str) -> Presence | None:
        """Return the last accepted heartbeat, for use when someone has overwritten it."""
        if island not in self._newest:
            return None
        presence, at = self._newest[island]
        return Presence(presence.heartbeat, presence.age_seconds + self._clock() - at)


# -- the members of a run ------------------------------------------------------------------------------------------


class KnownMembers:
    """The members of a run as one process knows them. Threads may share it, and those of all shards do.

    Shard 0 has the records. While it is away or hangs, the other shards go on with those that were known last.

    `stored` reads them from Redis. Once members are known, it runs on another thread, and a call waits a second for it.
    """

    def __init__(self, run: str, stored: Callable[[], Members], clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._stored, self._clock = run, stored, clock
        self._lock = threading.Lock()  # held for a second at most once members are known
        self._bounded = Bounded()
        self._members = Members()
        self._keys: dict[str, bytes] = {}
        self._read_at = self._asked_at = float("-inf")

    def read(self) -> Members:
        """Return the members, at most FRESH_SECONDS old, or KNOWN_SECONDS while their server is away."""
        with self._lock:
            age = (now := self._clock()) - self._read_at
            is_known, has_failed = age < KNOWN_SECONDS, self._asked_at > self._read_at
            if age < FRESH_SECONDS or (is_known and has_failed and now - self._asked_at < RETRY_SECONDS):
                return self._members
            self._asked_at = now
            with suppress(UnreachableError) if is_known else nullcontext():
                self._members = self._bounded(self._stored, "members") if is_known else self._stored()
                self._read_at = now
                self._keys = {name: raw_key(m.key) for name, m in self._members.by_name.items() if m.key}
            return self._members

    def key_of(self, island: str) -> bytes | None:
        """Return the public key of an island; None for others."""
        member = self.read().by_name.get(island)
        if member is None or member.role != "island":
            return None
        return self._keys.get(island)

    def islands(self) -> list[str] | None:
        """Return the names of the invited islands; None in a run without invitations, in which anyone may join."""
        members = self.read()
        if not members.merger_key:
            return None
        return [name for name, member in members.by_name.items() if member.role == "island"]

    def require_unsigned(self, *, afresh: bool = False) -> None:
        """Raise ConfigError if the members of the run sign what they send. This process has no key to do so.

        With `afresh`, they are read now: the first invitation ends the lease of a merger, which asks at once again.
        """
        if (self._stored() if afresh else self.read()).merger_key:
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
        return Signing()
    name = MERGER if invitation.role in ("merger", "admin") else invitation.name
    private = raw_key(invitation.private_key) if invitation.private_key else None
    return Signing(run, name, private, raw_key(invitation.merger_key), key_of)
