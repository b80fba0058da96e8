"""`archipelago.create`: a run from the parameters of a user's JAX script."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from archipelago.broker.config import (
    OWN_MODEL,
    AdoptConfig,
    InnerConfig,
    MergeConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
    checked,
    differences,
)
from archipelago.broker.errors import ConfigError, DivergedError, MismatchError, RunExistsError, UnknownRunError
from archipelago.broker.footprint import memory_text, redis_parts
from archipelago.broker.manifest import NO_CORPUS, Manifest, balanced, installed_versions
from archipelago.broker.messages import Snapshot
from archipelago.broker.process import connect_to
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.transport import Memory, Transport
from archipelago.broker.wire import digest, pack
from archipelago.islands.own_loop.tensors import KindOf, kinds_by, require_same_tensors
from archipelago.islands.own_loop.tree import TreeLayout, host_vector
from archipelago.islands.sync.same_run import require_no_islands


def create(
    url: str | None,
    name: str,
    params: Any,
    *,
    steps: int,
    sync: SyncConfig | None = None,
    merge: MergeConfig | None = None,
    outer: OuterConfig | None = None,
    adopt: AdoptConfig | None = None,
    wire: WireConfig | None = None,
    kinds: str | KindOf = "embed",
    record: bool = False,
) -> bool:
    """Create a run for training scripts in JAX, which then `join` it. Its first parameters are those given.

    Args:
        url: The URL of the Redis (redis://HOST:PORT); None for $ARCHIPELAGO_URL.
        name: The name of the run.
        params: A tree of arrays: a dictionary, an `nnx.State`, or any other pytree with names. Leaves of float32,
            bfloat16 and float16 are merged, in float32. Others stay each island's own.
        steps: The length of the run in global inner steps, which count the steps of the fastest island.
        sync: How often islands contribute.
        merge: The rules that merge the contributions of a round.
        outer: The outer optimiser.
        adopt: How an island takes a snapshot.
        wire: The codecs.
        kinds: Which tensors are embeddings, for which `merge` has a rule of its own: a regular expression that is found
            in their names, or a function from a name to "embedding" or "rest".
        record: Keep all payloads, so that `archipelago replay` can repeat the merger's part.

    Returns:
        Whether this call created it: False if the run exists with these tensors and settings.

    Raises:
        ConfigError: The tree cannot be merged (`loop.nothing`, `loop.unnamed`, `loop.dtype`), the Redis is too small
            (`loop.too-large`), or islands of a lost run of that name are alive (`init.islands-live`).
        MismatchError: The run exists with other tensors (`loop.other-tensors`) or settings (`config.other-settings`).
        DivergedError: A leaf holds NaN or infinity (`loop.not-finite`).
    """
    config = checked(
        RunConfig(
            record=record,
            model=ModelConfig(size=OWN_MODEL),
            inner=InnerConfig(steps=steps),
            sync=sync or SyncConfig(),
            merge=merge or MergeConfig(),
            outer=outer or OuterConfig(),
            adopt=adopt or AdoptConfig(),
            wire=wire or WireConfig(),
        ),
        "the settings of `create`",
    )
    layout = TreeLayout.of(params)
    tensors = layout.tensors(kinds_by(kinds))
    fragments = balanced(tensors, config.sync.fragments)
    run = checked_name(name, "the run name")
    manifest = Manifest(run, config, tensors, fragments, NO_CORPUS, installed_versions(), uuid.uuid4().hex)
    transport = connect_to(url, run)
    try:
        return _create(transport, manifest, layout)
    finally:
        transport.close()


def _create(transport: Transport, manifest: Manifest, layout: TreeLayout) -> bool:
    try:
        require_same(transport.reader.manifest(), manifest)
        return False
    except UnknownRunError:
        pass
    require_no_islands(transport)
    require_room(manifest, transport.reader.memory())
    try:
        transport.create(manifest, _first_snapshots(manifest, layout))
    except RunExistsError:  # another process was faster
        require_same(transport.reader.manifest(), manifest)
        return False
    return True


def require_same(found: Manifest, own: Manifest) -> None:
    """Raise MismatchError unless a run that exists has these tensors and settings."""
    require_same_tensors(found, own.tensors)
    changed = differences(found.config, own.config)
    kinds = {t.name: t.kind for t in own.tensors}
    changed += [f"kind of {t.name}: {t.kind} → {kinds[t.name]}" for t in found.tensors if t.kind != kinds[t.name]]
    if changed:
        raise MismatchError(
            "settings", found.config.digest(), own.config.digest(),
            "`join` takes the run's own settings. For other settings, create a run with another name.",
            code="config.other-settings",
            what=f"the run {found.run!r} has other settings: {'; '.join(changed)}",
        )  # fmt: skip


def require_room(manifest: Manifest, memory: Memory) -> None:
    """Raise ConfigError (`loop.too-large`), with the sum, if the Redis may not hold the run."""
    if not memory.limit:
        return
    parts = redis_parts(manifest)
    needed, room = sum(parts.values()), max(0, memory.limit - memory.used)
    if needed <= room:
        return
    terms = " + ".join(f"{memory_text(size)} for {part}" for part, size in parts.items())
    raise ConfigError(
        f"the run {manifest.run!r} does not fit into the Redis: {manifest.parameters:,} parameters need about "
        f"{terms} = {memory_text(needed)}, and {memory_text(room)} of its {memory_text(memory.limit)} are free",
        "Raise the server's maxmemory, or train fewer parameters. Nothing was sent.",
        code="loop.too-large",
    )


def _first_snapshots(manifest: Manifest, layout: TreeLayout) -> Sequence[tuple[Snapshot, bytes]]:
    """Return version 0 of every fragment with its payload."""
    wire, out = manifest.config.wire, []
    for p, rows in enumerate(manifest.layout):
        leaves = [layout.templates[tensor.name] for tensor, _ in rows]
        vector_N = host_vector(leaves)
        if not np.isfinite(vector_N).all():
            bad = next(t.name for t, leaf in zip((t for t, _ in rows), leaves, strict=True)
                       if not np.isfinite(host_vector([leaf])).all())  # fmt: skip
            raise DivergedError(
                f"the leaf {bad!r} of the first parameters holds NaN or infinity",
                "Initialise the parameters again.",
                code="loop.not-finite",
            )
        payload = pack(vector_N, wire.full, wire.full_zstd_level)
        out.append((Snapshot(0, p, 0, 0, wire.full, len(payload), digest(payload), merged=""), payload))
    return out
