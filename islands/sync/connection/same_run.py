"""Notice that another run has taken the name of an island's run.

A run that continues from a checkpoint is the same run, and its islands go back to that checkpoint. A new run under the
old name has other weights, and an island of the old one must neither take them nor send to it.
"""

from __future__ import annotations

from archipelago.broker.errors import ConfigError, UnknownRunError
from archipelago.broker.manifest import Manifest
from archipelago.broker.transport import ReaderClient, Transport


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
            "This island leaves, because its weights are not those of that run. Start it again to join the new run. "
            "To continue the old one, delete the new one and run `archipelago init --resume FOLDER`, with the "
            "checkpoint folder of the old run's merger.",
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
