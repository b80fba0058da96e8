"""The manifest of a run in Redis, and the names of all runs there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError
from archipelago.broker.manifest import FORMAT, OTHER_FORMAT, Manifest
from archipelago.broker.messages import text_fields
from archipelago.broker.redis.connection import RedisConnection
from archipelago.broker.redis.failures import is_wrong_kind
from archipelago.broker.redis.keys import REGISTRY, Keys
from archipelago.broker.redis.replies import names_in
from archipelago.broker.signing import MERGER, SignatureError
from archipelago.broker.wire import payload_bytes_max

_FORMAT = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")


class StoredRun:
    """The run of one connection. It need not exist yet."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._shape: Manifest | None = None

    def names(self) -> list[str]:
        """Return the names of all runs at the server that this user may read.

        A name is registered before its run is created.
        """
        names: list[str] = []
        with self._connection.forgiving(REGISTRY, "a set"):
            names = names_in(self._connection.registry.smembers(REGISTRY))
        asked: dict[Any, list[str]] = {}  # by client: in a cluster, runs lie on several nodes
        for name in names:
            asked.setdefault(self._connection.servers.client(Keys(name).manifest), []).append(name)
        found: set[str] = set()
        for client, some in asked.items():
            with self._connection.translated(), client.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.exists(Keys(name).manifest)
                exist = pipe.execute(raise_on_error=False)  # a member of one run may not look at others
            found.update(name for name, exists in zip(some, exist, strict=True) if isinstance(exists, int) and exists)
        return [name for name in names if name in found]

    def manifest(self) -> Manifest:
        """Return the manifest of the run, or of the shard.

        Raises:
            UnknownRunError: There is none.
            ConfigError: It is damaged (`config.manifest`), of another version (`config.format`), or not signed by the
                run's mergers (`signature.manifest`).
        """
        try:
            with self._connection.translated():
                raw = self._connection.redis.hgetall(self._connection.keys.manifest)
        except BrokerError as error:
            if not is_wrong_kind(error):
                raise
            raw = {b"run": b""}  # refused below, as any other damaged manifest
        if not raw:
            raise self.unknown()
        try:
            self._connection.signing.verify("manifest", MERGER, raw)
        except SignatureError as error:
            raise ConfigError(
                f"the manifest of the run {self._connection.run!r} is not the one of your join file ({error.reason})",
                "Someone has changed it, or created the run again without its key. Ask for a new join file; an "
                "administrator signs a new run with `archipelago invite`.",
                code="signature.manifest",
            ) from None
        self._require_format(text_fields(raw))
        manifest, shard = Manifest.from_fields(text_fields(raw)), self._connection.shard
        if shard is not None and shard >= manifest.shards:
            raise ConfigError(
                f"the run {self._connection.run!r} has {manifest.shards} shards, and none of number {shard}",
                "It was created again with fewer shards. Start this process again.",
                code="config.manifest",
            )
        return manifest.of_shard(shard)

    def _require_format(self, fields: Mapping[str, str]) -> None:
        """Raise ConfigError if another version of archipelago has made the run."""
        run, found = self._connection.run, fields.get("format", "0.2")
        if found != FORMAT and "tensors" in fields and _FORMAT.fullmatch(found):  # else the manifest is damaged
            raise ConfigError(
                f"version {found} of archipelago has made the run {run!r}; this one has the format {FORMAT}",
                f"Finish it with archipelago-train {found}. Or stop its processes, delete it (`archipelago rm {run}`), "
                f"and go on from its last checkpoint: `archipelago init --run {run} --resume FOLDER`.",
                code=OTHER_FORMAT,
            )

    def uid(self) -> str | None:
        """See `ReaderClient.uid`."""
        found = None
        with self._connection.forgiving(self._connection.keys.manifest, "a hash"):
            found = self._connection.redis.hget(self._connection.keys.manifest, "uid")
        return None if found is None else str(found.decode("utf-8", "replace"))

    def require(self) -> None:
        """Raise UnknownRunError unless the run exists. A run that has lost only its manifest exists."""
        keys = self._connection.keys
        with self._connection.translated():
            known = self._connection.redis.exists(keys.manifest, keys.state, keys.epoch)
        if not known:
            raise self.unknown()

    def unknown(self) -> UnknownRunError:
        """Return the error for a run that does not exist."""
        here = ", ".join(self.names()) or "none"
        remedy = (
            "Make it with `archipelago init` or a training script (a trainer creates it if you give `steps`), or name "
            "another with --run."
        )
        if self._has_islands():
            remedy = (
                "This Redis has lost it: its islands still write heartbeats here. Continue it from a checkpoint of its "
                "merger with `archipelago init --resume FOLDER`."
            )
        return UnknownRunError(
            f"there is no run {self._connection.run!r} at {self._connection.where} (runs there: {here})", remedy
        )

    def _has_islands(self) -> bool:
        """Return whether there are islands of a run of this name, as far as this user may know."""
        try:
            with self._connection.translated():
                return bool(self._connection.redis.exists(self._connection.keys.islands))
        except BrokerError:
            return False

    def shape(self) -> Manifest:
        """Return the manifest as it was read first. Its fragments never change."""
        self._shape = self._shape or self.manifest()
        return self._shape

    def payload_max(self) -> int:
        """Return the largest payload in bytes that the merger or an honest island stores."""
        return 4 * payload_bytes_max(max(self.shape().sizes))  # the merger's own state contains parameters and momentum
