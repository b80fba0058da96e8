"""A run of training scripts, in any framework: its settings, its manifest, and version 0 of every fragment."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from archipelago.broker.codecs import Vector
from archipelago.broker.config import OWN_MODEL, InnerConfig, ModelConfig, RunConfig, checked, differences
from archipelago.broker.errors import ConfigError, DivergedError, MismatchError, RunExistsError, UnknownRunError
from archipelago.broker.footprint import memory_text, redis_parts
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import NO_CORPUS, Manifest, Tensor, balanced, installed_versions
from archipelago.broker.messages import Snapshot
from archipelago.broker.observe.logs import show_unless_set_up
from archipelago.broker.observe.merge_load import warn_of_few_syncs
from archipelago.broker.process import Patience, connect_to
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.shards.transport import create, require_shards, with_shards
from archipelago.broker.transport import Memory, Transport, refusal
from archipelago.broker.wire import digest, pack
from archipelago.islands.user_loop.tensors import require_same_tensors

log = logging.getLogger(__name__)
#: From the name of a tensor to its first values, as one float32 vector in the memory of the host.
FirstValues = Callable[[str], Vector]
#: Returns the tensors that are not trained.
Frozen = Callable[[], Sequence[FrozenValues]]


def settings(steps: int, *, record: bool, **sections: object) -> RunConfig:
    """Return the settings that a script gives to `create`. Raises ConfigError for impossible ones."""
    given: dict[str, Any] = {name: section for name, section in sections.items() if section is not None}
    config = RunConfig(record=record, model=ModelConfig(size=OWN_MODEL), inner=InnerConfig(steps=steps), **given)
    return checked(config, "the settings of `create`")


def create_run(
    url: str | None,
    name: str,
    config: RunConfig,
    shards: int,
    tensors: Sequence[Tensor],
    first: FirstValues,
    frozen: Frozen,
    model_config: str = "",
    wait_seconds: float = 30.0,
    unmerged: Collection[str] = (),
) -> bool:
    """Create a run unless it exists with these tensors and settings. Return whether this call created it.

    The other arguments, and the errors, are those of `archipelago.create`.

    Args:
        frozen: Returns the tensors that are not trained. Their values are read only if this call creates the run,
            because `join` compares them.
        model_config: The settings of a model of `transformers` as JSON, for exports.
        unmerged: The names of tensors whose type is not merged.
    """
    run = checked_name(name, "the run name")
    fragments = balanced(tensors, config.sync.fragments)
    whole = Manifest(run, config, tuple(tensors), fragments, NO_CORPUS, installed_versions(), uuid.uuid4().hex)
    manifest = with_shards(replace(whole, model_config=model_config), shards)
    show_unless_set_up()
    awaited = Patience(wait_seconds, lambda: False)
    with closing(awaited(lambda: connect_to(url, run))) as transport:
        with suppress(UnknownRunError):  # which a server can say once it has loaded its data
            awaited(transport.reader.manifest)
        return _create(transport, manifest, first, frozen, unmerged)


def _create(
    transport: Transport, manifest: Manifest, first: FirstValues, frozen: Frozen, unmerged: Collection[str]
) -> bool:
    with suppress(UnknownRunError):
        require_same(transport.reader.manifest(), manifest, unmerged)
        if not transport.reader.is_served() and (why := refusal(transport.reader)):
            log.warning("the run %r exists, and its merger does not serve it: %s", manifest.run, why)
        return False
    require_no_islands(transport)
    require_room(manifest, transport.reader.memory())
    manifest = replace(manifest, frozen=tuple(values.named() for values in frozen()))
    try:
        create(transport, manifest, first_snapshots(manifest, first))
    except RunExistsError:  # another process was faster
        require_same(transport.reader.manifest(), manifest, unmerged)
        return False
    warn_of_few_syncs(log, manifest.config.inner.steps / manifest.config.sync.interval, "will have")
    return True


def require_same(found: Manifest, own: Manifest, unmerged: Collection[str]) -> None:
    """Raise MismatchError unless a run that exists has these tensors and settings."""
    require_same_tensors(found, own.tensors, unmerged=unmerged)
    require_shards(found, own.shards)
    changed = differences(found.config, own.config)
    kinds = {t.name: t.kind for t in own.tensors}
    changed += [f"kind of {t.name}: {t.kind} → {kinds[t.name]}" for t in found.tensors if t.kind != kinds[t.name]]
    if changed:
        raise MismatchError(
            "settings", found.config.digest(), own.config.digest(),
            "`join`, and a trainer without `steps`, take the run's own settings. For other settings, create a run with "
            "another name.",
            code="config.other-settings",
            what=f"the run {found.run!r} has other settings: {'; '.join(changed)}",
        )  # fmt: skip


def require_no_islands(transport: Transport) -> None:
    """Raise ConfigError if islands of a run of this name, which the Redis does not have, are alive."""
    live = sorted(presence.heartbeat.island for presence in transport.reader.presences() if presence.is_live)
    if live:
        raise ConfigError(
            f"{len(live)} islands of a run {transport.run!r} that this Redis has lost are alive, such as {live[0]}",
            "A new run would begin from new weights. To continue theirs, start its merger with --resume. To give it "
            "up, stop them and wait 10 s.",
            code="init.islands-live",
        )


def require_room(manifest: Manifest, memory: Memory) -> None:
    """Raise ConfigError (`loop.too-large`) if the Redis may not hold the run."""
    needed = sum(redis_parts(manifest.config, manifest.parameters, max(manifest.sizes, default=0)).values())
    room = max(0, memory.most - memory.used)
    if memory.most and needed > room:
        raise ConfigError(
            f"the run {manifest.run!r} does not fit into the Redis: {manifest.parameters:,} parameters need about "
            f"{memory_text(needed)}, and {memory_text(room)} of its {memory_text(memory.most)} are free",
            "Raise the server's maxmemory, use a larger machine, or train fewer parameters. Nothing was sent.",
            code="loop.too-large",
        )


def first_snapshots(manifest: Manifest, first: FirstValues) -> Sequence[tuple[Snapshot, bytes]]:
    """Return version 0 of every fragment with its payload."""
    wire, out = manifest.config.wire, []
    for p, rows in enumerate(manifest.layout):
        vectors = [first(tensor.name) for tensor, _ in rows]
        for (tensor, _), values in zip(rows, vectors, strict=True):
            if not np.isfinite(values).all():
                raise DivergedError(
                    f"the tensor {tensor.name!r} of the first parameters holds NaN or infinity",
                    "Initialise the parameters again.",
                    code="loop.not-finite",
                )
        payload = pack(np.concatenate(vectors), wire.full, wire.full_zstd_level)
        out.append((Snapshot(0, p, 0, 0, wire.full, len(payload), digest(payload), merged=""), payload))
    return out
