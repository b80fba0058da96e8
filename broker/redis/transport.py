"""Connect to a run in Redis, Valkey or fakeredis."""

from __future__ import annotations

from collections.abc import Sequence

from archipelago.broker.address import AddressError, redacted
from archipelago.broker.commits import Image
from archipelago.broker.errors import BadUrlError, BrokerError
from archipelago.broker.invitation import Invitation
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.bulk import replica_at
from archipelago.broker.redis.chunks import ChunkStore
from archipelago.broker.redis.client import RedisClient, fake_client
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.creation import Creation, sign_stored
from archipelago.broker.redis.islands import RedisIsland
from archipelago.broker.redis.membership import KnownMembers, Membership, signing_of
from archipelago.broker.redis.merger import RedisMerger
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.servers import Servers, servers_at
from archipelago.broker.redis.stored_run import StoredRun
from archipelago.broker.redis.updates import UpdatesStreams


def connect(url: str, run: str, invitation: Invitation | None = None) -> RedisTransport:
    """Connect to one run, which need not exist yet.

    Args:
        url: The address (see `broker.address`) or, for a fake server within this process, `fakeredis://NAME`.
        run: The name of the run.
        invitation: The join file that holds this URL, if one does. Its certificate authority is then the only one that
            is trusted, and its keys sign and check messages.

    Raises:
        BadUrlError, UnreachableError, ServerTooOldError
    """
    if url.startswith("fakeredis://"):
        return RedisTransport(fake_client(url.removeprefix("fakeredis://") or "default"), run, invitation=invitation)
    try:
        authority = invitation.ca_certificate if invitation else ""
        transport = RedisTransport(servers_at(url, authority), run, redacted(url), invitation)
        try:
            transport.connection.require_kind()
        except BrokerError:
            transport.close()
            raise
        return transport
    except (ValueError, TypeError) as error:  # the client raises these for options that it does not know
        secret = redacted(url) != url  # the client's message may quote a part of the password
        why = "" if secret and not isinstance(error, AddressError) else f" ({error})"
        raise BadUrlError(
            f"{redacted(url)!r} cannot be read as the address of a Redis{why}",
            "Write redis://HOST:PORT, rediss://:PASSWORD@HOST:PORT, unix:///PATH, redis+cluster://HOST:PORT,HOST:PORT "
            "or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"
            + (", and in a password %2F for '/', %3F for '?', %23 for '#'." if secret else "."),
        ) from None


class RedisTransport:
    """See `broker.transport.Transport`. Threads may share it, because each call takes a connection from a pool.

    Args:
        at: The servers.
        run: The name of the run.
        where: The servers' address without its password.
        invitation: The join file, if one was used.
        home: The connection to the whole run, if this is one to a shard. The members are those of the run.
        shard: The number of the shard.
    """

    def __init__(
        self,
        at: Servers | RedisClient,
        run: str,
        where: str = "the Redis",
        invitation: Invitation | None = None,
        home: RedisTransport | None = None,
        shard: int | None = None,
    ) -> None:
        self.run = run
        self.invitation = invitation
        self.connection = RedisConnection(at, run, where, is_invited=invitation is not None, shard=shard)
        self.membership: Membership = Membership(self.connection) if home is None else home.membership
        self.members: KnownMembers = KnownMembers(run, self.membership.all) if home is None else home.members
        # What is signed in one shard proves nothing in another. A name cannot contain a colon.
        self.connection.signing = signing_of(invitation, f"{run}:s{shard}" if shard else run, self.members.key_of)
        stored = StoredRun(self.connection)
        self.chunks = chunks = ChunkStore(self.connection, stored.payload_max)
        self.updates = UpdatesStreams(self.connection, chunks)
        self.reader = RedisReader(self.connection, stored, chunks, self.updates)
        self.island = RedisIsland(self.connection, stored, chunks, self.updates, self.reader, self.members)
        self.merger = RedisMerger(self.connection, stored, chunks, self.updates, self.reader, self.members)
        self.creation = Creation(self.connection, stored, chunks, self.updates)

    def of_shard(self, shard: int) -> RedisTransport:
        """Return a connection to one shard of the run. It shares the clients of this one, which closes them."""
        own = RedisTransport(
            self.connection.servers, self.run, self.connection.where, self.invitation, home=self, shard=shard
        )
        own.chunks.replica = self.chunks.replica
        return own

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self.creation.create(manifest, snapshots)

    def restore(self, image: Image) -> None:
        self.creation.restore(image)

    def mend_manifest(self, manifest: Manifest) -> bool:
        return self.creation.mend_manifest(manifest)

    def sign(self, key: bytes) -> None:
        """Sign what Redis holds of the run with the private key of its mergers, unless it is signed."""
        sign_stored(self.connection, self.chunks, self.merger.lease, key)

    def read_from(self, url: str) -> None:
        """Read the payloads of snapshots and differences from a replica of this Redis first (`redis.replica`).

        Raises BadUrlError.
        """
        self.chunks.replica = replica_at(url, self.invitation.ca_certificate if self.invitation else "")

    def close(self) -> None:
        if self.chunks.replica is not None:
            self.chunks.replica.close()
        self.connection.close()
