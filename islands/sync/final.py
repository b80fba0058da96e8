"""The parameters at the end of a run, for a script that has left it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from archipelago.broker.codecs import Vector
from archipelago.broker.control import run_steps
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Manifest
from archipelago.broker.shards.transport import shards_of
from archipelago.broker.transport import IslandTransport, refusal
from archipelago.islands.sync.evaluator import newest_merged

POLL_SECONDS = 0.2
#: How many islands an error names.
NAMED_MAX = 4


def final_vectors(
    transport: IslandTransport,
    manifest: Manifest,
    sent: Mapping[int, Sequence[str]],
    *,
    is_over: bool,
    deadline: float,
    pause: Callable[[float], None] = time.sleep,
) -> list[Vector]:
    """Return the run's parameters, one float32 vector for each fragment, once all that it waits for is merged.

    At the end of the run, that is all contributions of all islands, so that everybody gets the same parameters. Of a
    run that goes on, it is those of this island, and the parameters are the newest.

    Args:
        transport: The connection to the whole run.
        manifest: The run.
        sent: The stream entries of this island's contributions that were undecided when it left, by shard.
        is_over: Whether the run was at its end then. It may be now.
        deadline: When to give up, in seconds of `time.monotonic`.
        pause: Waits between two looks at the run.

    Raises:
        BrokerError: They are not merged in time (`island.not-merged`).
    """
    while why := lacking(transport, manifest, sent, is_over=is_over):
        if time.monotonic() >= deadline:
            run = manifest.run
            raise BrokerError(
                f"the last rounds of the run {run!r} are not merged in time: {why}",
                f"Redis keeps everything. `archipelago status --run {run}` shows the run; without a merger, start "
                f"`archipelago merger --run {run}`. Then call `final` again, or give it a longer `timeout` "
                "(of a trainer's island, `callback.island.final()` and `final_seconds`).",
                code="island.not-merged",
            )
        pause(POLL_SECONDS)
    return list(newest_merged(transport, manifest).vectors)


def lacking(transport: IslandTransport, manifest: Manifest, sent: Mapping[int, Sequence[str]], *, is_over: bool) -> str:
    """Return what is still awaited, in words; empty if it is nothing."""
    reader = transport.reader
    step = max((head.step for head in reader.heads() if head is not None), default=0)
    is_over = is_over or step >= run_steps(manifest.config, reader.control())
    # An island leaves when all that it has sent is stored, so the islands are looked at before the contributions.
    here = [each.heartbeat.island for each in reader.presences() if each.is_live] if is_over else []
    shards = [each.island for each in shards_of(transport)]
    own = [entry for shard, entries in sent.items() for entry in entries if shards[shard].holds(entry)]
    waiting = reader.backlog() if is_over else len(own)
    why = [f"the islands {', '.join(here[:NAMED_MAX])} have not left"] if here else []
    if waiting:
        why.append(f"{waiting} contributions wait")
    if (waiting or not is_over) and not reader.is_served():
        why.insert(
            0, f"no merger serves the run ({refused})" if (refused := refusal(reader)) else "no merger serves it"
        )
    return "; ".join(why)
