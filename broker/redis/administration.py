"""What administrators do at the Redis of a run: invite and remove members, sign the run, and delete it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import redis

from archipelago.broker.commits import DIFFERENCES_KEPT
from archipelago.broker.errors import BrokerError, UnreachableError, WireError
from archipelago.broker.invitation import MERGER_KEY, Member, Members
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import text_fields
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.failures import version_of
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.lease import Lease
from archipelago.broker.redis.stored_run import count_in, state_fields, state_in
from archipelago.broker.signing import MERGER, SIGNATURE, WITH_PAYLOAD, Kind, Signing, covered, public_key
from archipelago.broker.wire import payload_bytes_max

#: Keys that one command deletes, and keys that one step of a scan looks at.
BATCH, SCANNED = 500, 1000
#: Where a server keeps its users over a restart. `nowhere`: it forgets them.
Kept = Literal["aclfile", "config", "nowhere"]
#: The server's answers to a command of an administrator that it does not know, or does not permit.
_NO_ADMIN = "unknown command|unknown subcommand|NOPERM|no permissions|disabled|not allowed|not supported"


def sign_stored(connection: RedisConnection, chunks: ChunkStore, lease: Lease, key: bytes) -> None:
    """Sign the manifest, the fragments, the tape and the state of a run, unless its manifest is signed.

    Contributions that were merged need no signature: what they give is compared with digests of the signed tape. A
    merger that serves the run without a key can write no more, so it cannot add what is not signed. The manifest is
    signed last, so that an interrupted call can be repeated. The connection is that of an administrator to a shard, and
    `key` is the private key of the run's mergers.
    """
    redis, keys, stamps = connection.redis, connection.keys, connection.stamps
    context = f"{connection.run}:s{connection.shard}" if connection.shard else connection.run
    signing = Signing(context, MERGER, key, public_key(key), lambda _: None)

    def sign(kind: Kind, key: str, about: str, limit: int | None = None, stamp: str = "") -> int:
        """Sign the hash of that key, and return its version."""
        if not (raw := redis.hgetall(key)):
            return 0
        payload = None
        if kind in WITH_PAYLOAD:
            try:
                payload = chunks.fetch(raw, count_in(raw.get(b"bytes")), limit)
            except WireError as error:  # the merger restores it, and signs it then
                connection.warn_once(key, error)
                return 0
        fields = text_fields(covered(raw))
        redis.hset(key, mapping=signing.signed(kind, fields, about=about, payload=payload, stamp=stamp))
        return count_in(raw.get(b"version"))

    with connection.translated():
        manifest = redis.hgetall(keys.manifest)
        if not manifest or SIGNATURE.encode() in manifest:
            return
        lease.fence()
        own = Manifest.from_fields(text_fields(manifest)).of_shard(connection.shard or 0)
        for p in own.own_fragments:
            limit = payload_bytes_max(own.sizes[p])
            first = sign("fragment", keys.fragment(p), f"{p}", limit, stamps.next())
            last = sign("head", keys.head(p), f"{p}", stamp=stamps.next())
            for version in range(first + 1, min(last, first + DIFFERENCES_KEPT) + 1):
                sign("difference", keys.difference(p, version), f"{p}/{version}", limit)
            sign("outer", keys.outer(p), f"{p}")
        entries = list(connection.pages(keys.tape))
        with connection.transaction() as pipe:
            pipe.delete(keys.tape)
            for id_, raw in entries:
                pipe.xadd(keys.tape, signing.signed("tape", text_fields(covered(raw))), id=id_)
        if state := state_in(Signing(), redis.hgetall(keys.state)):
            redis.hset(keys.state, mapping=state_fields(signing, state))
        redis.hset(keys.manifest, mapping=signing.signed("manifest", text_fields(manifest)))


def shards_with_keys(connection: RedisConnection) -> set[int]:
    """Return the shards of a run of which its servers hold keys. It needs no manifest."""
    tag = re.compile(rb"\{%s:s([0-9]{1,3})\}:" % re.escape(connection.run.encode()))
    found = set()
    with connection.translated():
        for node in connection.servers.nodes():
            keys = node.scan_iter(match=f"{{{connection.run}:s*", count=SCANNED)
            found |= {int(match[1]) for key in keys if (match := tag.match(key))}
    return found


def has_keys(connection: RedisConnection) -> bool:
    """Return whether a shard has keys. A run whose deletion was interrupted has some, but no manifest."""
    return any(_batches(connection))


def delete_shard(connection: RedisConnection) -> int:
    """Delete a shard of a run, and return the number of its keys. A run is deleted from its last shard to its first.

    What says that the run exists goes first and at once, so that no merger repairs a run that is half deleted: its
    epoch has ended, and it finds no run. The name goes last, so that an interrupted deletion can be repeated.
    """
    redis, keys = connection.redis, connection.keys
    with connection.translated():
        count = int(redis.unlink(keys.manifest, keys.state, keys.epoch, keys.lease))
        count += sum(int(redis.unlink(*batch)) for batch in _batches(connection))
        if not connection.shard:
            connection.registry.srem(REGISTRY, connection.run)
    return count


def delete_users(connection: RedisConnection) -> list[str]:
    """Delete the Redis users of the run's members, and return their names. Their records go with shard 0."""
    membership = MemberRecords(connection)
    users = [member.user for member in membership.all().by_name.values() if member.user]
    return [user for user in users if membership.remove_user(user)]


def delete_island(connection: RedisConnection, name: str) -> None:
    """Delete what an island has written, as far as it is not merged: mergers keep that under keys of their own."""
    redis, keys = connection.redis, connection.keys
    with connection.translated():
        redis.unlink(keys.name(name), *keys.of_island(name))
        for batch in _batches(connection, keys.chunk_prefix(name)):
            redis.unlink(*batch)
        redis.srem(keys.islands, name)


def _batches(connection: RedisConnection, prefix: str = "") -> Iterator[list[bytes]]:
    """Yield the keys of a shard that begin so. No name of a run contains a character that patterns or the tag use."""
    prefix = prefix or f"{connection.keys.tag}:"
    keys = connection.redis.scan_iter(match=f"{prefix}*", count=SCANNED)
    with connection.translated():
        while batch := list(islice(keys, BATCH)):
            yield batch


class MemberRecords:
    """Reads the records of a run's members. With an administrator's connection, it also changes them."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis, self._keys = connection.redis, connection.keys

    def all(self) -> Members:
        return Members.of(text_fields(self._connection.hash_at(self._keys.members)))

    def version(self) -> tuple[int, ...]:
        """Return the version of the server, as Redis counts it, in two numbers."""
        return version_of(self._connection.info("server"))

    # -- records ------------------------------------------------------------------------------------------------------

    def put(self, members: Mapping[str, Member], merger_key: str = "") -> None:
        """Add members at once, or replace their records, and the public key of the run's mergers unless it is empty."""
        fields = {name: member.to_json() for name, member in members.items()}
        with self._connection.translated():
            self._redis.hset(self._keys.members, mapping=fields | ({MERGER_KEY: merger_key} if merger_key else {}))

    def remove(self, name: str) -> bool:
        """Remove a member's record. Return whether there was one."""
        with self._connection.translated():
            return bool(self._redis.hdel(self._keys.members, name))

    def offer_merger_key(self, key: str) -> str:
        """Set the public key of the run's mergers unless there is one, and return the one that holds."""
        with self._connection.translated():
            self._redis.hsetnx(self._keys.members, MERGER_KEY, key)
            found: bytes = self._redis.hget(self._keys.members, MERGER_KEY)
        return found.decode("utf-8", "replace")

    # -- users --------------------------------------------------------------------------------------------------------

    def set_user(self, user: str, password: str, rules: Sequence[str]) -> bool:
        """Create or replace a user. Its present connections end. Return False if a server does not permit that."""
        begin, *rest = rules  # `reset` removes passwords, so it comes first
        if None in self._everywhere("ACL", "SETUSER", user, begin, f">{password}", *rest):
            return False
        self._everywhere("CLIENT", "KILL", "USER", user)
        return True

    def users(self) -> frozenset[str] | None:
        """Return the names of all users; None if the server does not let this connection look."""
        found = self._administer("ACL", "USERS")
        return None if found is None else frozenset(user.decode("utf-8", "replace") for user in found)

    def remove_user(self, user: str) -> bool | None:
        """Delete a user, and so its connections. Return whether there was one; None if a server does not permit it."""
        gone = self._everywhere("ACL", "DELUSER", user)
        return None if None in gone else any(gone)

    def needs_password(self) -> bool | None:
        """Try to connect without a password, and return whether the server rejects that; None if it is unreachable."""
        pool = self._redis.connection_pool
        options = {k: v for k, v in pool.connection_kwargs.items() if k not in ("username", "password")}
        stranger = pool.connection_class(**options)
        try:
            with self._connection.translated():
                stranger.connect()
                stranger.send_command("PING")
                stranger.read_response()
            return False
        except UnreachableError:
            return None
        except BrokerError:
            return True
        finally:
            stranger.disconnect()

    def keep(self) -> Kept:
        """Let the servers write their users to their disks, and return where they are."""
        if None not in self._everywhere("ACL", "SAVE"):
            return "aclfile"
        return "config" if None not in self._everywhere("CONFIG", "REWRITE") else "nowhere"

    def _everywhere(self, *command: str) -> list[Any]:
        """Return the answers of all servers. Each has users of its own: a replica does not take those of its primary.

        A replica without them would refuse every member once it is promoted.
        """
        with self._connection.translated():
            return [self._administer(*command, node=node) for node in self._connection.servers.nodes()]

    def _administer(self, *command: str, node: Any = None) -> Any:
        """Return the answer to a command of an administrator; None if the server does not know or permit it."""
        try:
            with self._connection.translated():
                return (node or self._redis).execute_command(*command)
        except BrokerError as error:
            cause = error.__cause__
            denied = isinstance(cause, redis.exceptions.NoPermissionError) or re.search(
                _NO_ADMIN, str(cause), re.IGNORECASE
            )
            no_file = command[1] in ("SAVE", "REWRITE") and isinstance(cause, redis.ResponseError)
            if denied or no_file:
                return None
            raise
