"""What an island trains, by which settings, and on which devices: from its flags and the run's manifest."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from archipelago.broker.config import BATCH_FACTOR_MAX
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import keep_compiled
from archipelago.islands.mesh.shape import MeshShape, parsed

if TYPE_CHECKING:
    from archipelago.broker.config import RunConfig
    from archipelago.broker.manifest import Manifest
    from archipelago.islands.mesh.placement import Placement
    from archipelago.islands.options import IslandOptions
    from archipelago.islands.tasks.task import TaskFile

log = logging.getLogger(__name__)


def own_task(options: IslandOptions, manifest: Manifest) -> TaskFile | None:
    """Return the task that the island trains, if the run has one. This may import JAX."""
    if options.task is None and not manifest.task:
        manifest.require_own_code("`archipelago island`")
        return None
    if options.corpus is not None:
        raise ConfigError(
            "a task brings its own data, so --corpus would change nothing", "Leave it out.", code="task.setting"
        )
    keep_compiled()

    from archipelago.islands.tasks.task import task_of

    return task_of(options.task, manifest, "`archipelago island`")


def own_settings(options: IslandOptions, config: RunConfig) -> RunConfig:
    """Return the settings by which this island computes its inner steps, if its device has less memory than others.

    Such an island contributes the same up to rounding, so it shares a run with the others.

    Raises:
        ConfigError: They cannot be used here (`config.micro-batches`, `config.own-memory`).
    """
    parts, again = options.micro_batches, options.rematerialise
    inner = config.inner if parts is None else replace(config.inner, micro_batches=parts)
    model = config.model if again is None else replace(config.model, rematerialise=again)
    own = replace(config, inner=inner, model=model)
    size = options.batch_size or own.data.batch_size
    if inner.micro_batches < 1 or (not own.has_own_loops and size % inner.micro_batches):
        raise ConfigError(
            f"a batch of {size:,} sequences cannot be computed in {inner.micro_batches:,} equal parts",
            "Set --micro-batches to a divisor of the batch size.",
            code="config.micro-batches",
        )
    if own == config:
        return config
    if model != config.model and own.has_own_loops:
        raise ConfigError(
            "only a task itself can rematerialise its layers",
            "Use jax.checkpoint in its loss.",
            code="config.own-memory",
        )
    return own


def own_placement(options: IslandOptions, manifest: Manifest, device_bytes: int | None = None) -> Placement | None:
    """Return where everything is on the devices of this island; None for one device. This imports JAX.

    Args:
        options: The flags.
        manifest: The run.
        device_bytes: The memory of a device, where several hosts have agreed on it. The default is what is here.
    """
    import jax

    from archipelago.islands.mesh.placement import device_memory, placement_of

    require_batch(options.batch_size, manifest)
    shape = parsed(options.mesh) if options.mesh is not None else None
    config = own_settings(options, manifest.config)
    own = options.batch_size or config.data.batch_size
    batch_size = 0 if manifest.task else own // config.inner.micro_batches  # a task has its own
    memory = device_memory() if device_bytes is None else device_bytes
    placement = placement_of(shape, manifest, batch_size, jax.devices(), memory)
    if jax.process_count() > 1 and (placement is None or placement.shape.devices < jax.device_count()):
        raise ConfigError(
            f"this island has {jax.device_count()} devices on {jax.process_count()} hosts, and its mesh has "
            f"{placement.shape.devices if placement else 1}",
            "Give a --mesh of all of them, or a --batch-size that their number divides.",
            code="mesh.devices",
        )
    return placement


def require_batch(batch_size: int, manifest: Manifest) -> None:
    """Raise ConfigError (`config.value`, `task.setting`) for a batch that the run would not take."""
    if batch_size and manifest.task:
        raise ConfigError(
            "a task has batches of its own, so --batch-size would change nothing", "Leave it out.", code="task.setting"
        )
    most = BATCH_FACTOR_MAX * manifest.config.data.batch_size
    if not 0 <= batch_size <= most:
        raise ConfigError(
            f"--batch-size cannot be {batch_size}",
            f"Give 1 to {most:,} sequences ({BATCH_FACTOR_MAX} times the run's batch), or 0 for the run's.",
            code="config.value",
        )


def tell_of_device(manifest: Manifest, placement: Placement | None) -> None:
    """Log what the run needs and what this machine has, and which devices stay unused."""
    import jax

    from archipelago.islands.device import memory_in_words, unused_devices

    shape = placement.shape if placement is not None else MeshShape()
    said, troubles = memory_in_words(manifest, jax.devices()[0], shape)
    log.info("%s", said)
    for trouble in troubles:
        log.warning("%s", trouble, extra={"code": "island.memory"})
    if unused := unused_devices(jax.local_devices(), shape, os.environ):
        log.warning("%s", unused, extra={"code": "island.unused-devices"})
