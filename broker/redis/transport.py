"""Connect to a run in Redis, Valkey or fakeredis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archipelago.broker.address import AddressError, redacted
from archipelago.broker.commits import Image
from archipelago.broker.control import fields_in
from archipelago.broker.errors import BadUrlError, BrokerError, RunExistsError
from archipelago.broker.failpoints import failpoint
from archipelago.broker.full_state import Compaction
from archipelago.broker.invitation import Invitation
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Contribution, Snapshot, to_fields
from archipelago.broker.redis.administration import MemberRecords
from archipelago.broker.redis.chunks import ORPHAN_SECONDS, ChunkStore
from archipelago.broker.redis.client import RedisClient, fake_client
from archipelago.broker.redis.connection import DisturbedError, RedisConnection
from archipelago.broker.redis.islands import RedisIsland, chunks_name
from archipelago.broker.redis.keys import REGISTRY
from archipelago.broker.redis.lease import epoch_in, epoch_mark
from archipelago.broker.redis.merger import RedisMerger
from archipelago.broker.redis.reader import RedisReader
from archipelago.broker.redis.servers import Servers, servers_at
from archipelago.broker.redis.stored_run import Compactions, StoredRun, state_fields
from archipelago.broker.redis.updates import EVALUATIONS_KEPT, IslandNames, UpdatesStreams
from archipelago.broker.signing import EPOCHS_SKIPPED, KnownMembers, signing_of


def connect(url: str, run: str, invitation: Invitation | None = None) -> RedisTransport:
    """Connect to one run, which need not exist yet.

    Args:
        url: The address (see `broker.address`) or, for a fake server within this process, `fakeredis://NAME`.
        invitation: The join file that holds this URL, if one does. Its certificate authority is then the only one that
            is trusted, and its keys sign and check messages.

    Raises:
        BadUrlError, UnreachableError, BrokerError (`broker.server-too-old`, `broker.address`)
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
        where: The servers' address without its password.
        invitation: The join file, if one was used.
        primary: The connection to the whole run, if this is one to a shard. The members are those of the run.
    """

    def __init__(
        self,
        at: Servers | RedisClient,
        run: str,
        where: str = "the Redis",
        invitation: Invitation | None = None,
        primary: RedisTransport | None = None,
        shard: int | None = None,
    ) -> None:
        self.run = run
        self.invitation = invitation
        self.connection = RedisConnection(at, run, where, is_invited=invitation is not None, shard=shard)
        self.membership: MemberRecords = MemberRecords(self.connection) if primary is None else primary.membership
        self.members: KnownMembers = KnownMembers(run, self.membership.all) if primary is None else primary.members
        # What is signed in one shard proves nothing in another. A name cannot contain a colon.
        self.connection.signing = signing_of(invitation, f"{run}:s{shard}" if shard else run, self.members.key_of)
        self._keys, self._signing = self.connection.keys, self.connection.signing
        self._stored = stored = StoredRun(self.connection)
        self.chunks = chunks = ChunkStore(self.connection, stored.payload_max)
        self.names = IslandNames(self.connection, self.members.islands)
        self.updates = UpdatesStreams(self.connection, chunks, self.names.all)
        self.reader = RedisReader(self.connection, stored, chunks, self.updates)
        self.island = RedisIsland(self.reader, self.members)
        self.merger = RedisMerger(self.reader, self.members, self.names)
        self._compactions = Compactions(self.connection, chunks)

    def of_shard(self, shard: int) -> RedisTransport:
        """Return a connection to one shard of the run. It shares the clients of this one, which closes them."""
        servers, where = self.connection.servers, self.connection.where
        return RedisTransport(servers, self.run, where, self.invitation, primary=self, shard=shard)

    def create(self, manifest: Manifest, snapshots: Sequence[tuple[Snapshot, bytes]]) -> None:
        self._create(manifest, [Compaction(snapshot, payload) for snapshot, payload in snapshots])

    def restore(self, image: Image) -> None:
        self._create(image.manifest, [full.packed(image.manifest.config.wire) for full in image.fragments], image)
        failpoint("restore.done")

    def _create(self, manifest: Manifest, full: Sequence[Compaction], image: Image | None = None) -> None:
        try:
            with self.connection.watching(self._keys.manifest) as pipe:
                if pipe.exists(self._keys.manifest):
                    raise self._exists()
                self.connection.require_lasting()
                # Before the transaction, whose keys all share one hash tag. Names without a run are not listed.
                self.connection.registry.sadd(REGISTRY, self.connection.run)
                epoch = self._first_epoch(pipe, image)
                placed = [self._compactions.place(epoch, each, ORPHAN_SECONDS) for each in full]
                pending = self._uploaded(image.pending) if image else []
                # Keys remain if someone deleted only the manifest by hand.
                past = self._keys.of_the_past(manifest.own_fragments, self.updates.names())
                pipe.multi()
                pipe.delete(*past)
                for each in placed:
                    for command in self._compactions.first(epoch, each):
                        pipe.execute_command(*command)
                pipe.hset(self._keys.manifest, mapping=self._signing.signed("manifest", manifest.to_fields()))
                if epoch:
                    pipe.set(self._keys.epoch, epoch_mark(epoch))
                if image:
                    self._fill(pipe, image, pending)
                pipe.execute()
        except DisturbedError:
            raise self._exists() from None

    def _first_epoch(self, pipe: Any, image: Image | None) -> int:
        """Return the epoch with which a signed run begins again after its Redis was lost; 0 for any other run.

        Islands that still run accept no event of an earlier epoch than the newest that they know.
        """
        if image is None or not self._signing.is_on:
            return 0
        return max(epoch_in(pipe.get(self._keys.epoch)), *(entry.epoch for entry in image.tape), 0) + EPOCHS_SKIPPED

    def _uploaded(self, pending: Sequence[tuple[Contribution, bytes]]) -> list[tuple[str, dict[str, str | bytes]]]:
        """Upload contributions. Return the island of each, and the entry that points to it.

        The mergers sign in the place of its island, which signed it before.
        """
        out: list[tuple[str, dict[str, str | bytes]]] = []
        for c, payload in pending:
            signed = self._signing.signed("contribution", to_fields(c), payload=payload, sender=c.island)
            out.append((c.island, {**signed, **self.chunks.of(c.island).place(chunks_name(c), payload)}))
        failpoint("restore.placed")
        return out

    def _fill(self, pipe: Any, image: Image, pending: Sequence[tuple[str, dict[str, str | bytes]]]) -> None:
        """Write what a checkpoint holds besides its fragments."""
        for island, waiting in pending:
            pipe.sadd(self._keys.islands, island)
            pipe.xadd(self._keys.updates(island), waiting)
            self.chunks.of(island).settle(pipe, waiting)
        pipe.hset(self._keys.state, mapping=state_fields(self._signing, image.state))
        counts = {name: value for name, value in to_fields(image.counters).items() if not name.startswith("published")}
        if requests := fields_in(image.state):
            pipe.hset(self._keys.control, mapping=requests)
        commands = [*self.merger.derived(image.cursors, counts), *(self.merger.taped(e, needed=1) for e in image.tape)]
        for command in commands:
            pipe.execute_command(*command)
        for evaluation in image.evaluations:
            pipe.xadd(self._keys.evaluations, to_fields(evaluation), maxlen=EVALUATIONS_KEPT)

    def _exists(self) -> RunExistsError:
        return RunExistsError(
            f"a run {self.connection.run!r} is at {self.connection.where} already", "Choose another name with --run."
        )

    def close(self) -> None:
        self.connection.close()
