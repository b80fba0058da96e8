"""The flags of `archipelago island`, and the task that follows from them and the run's manifest.

This module does not import JAX until a function needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker.errors import require_number
from archipelago.broker.observe.options import ProbeOptions, WorkerOptions
from archipelago.broker.process import AwaitedRun, keep_compiled
from archipelago.islands.mesh import parsed

if TYPE_CHECKING:
    from archipelago.broker.manifest import Manifest
    from archipelago.islands.tasks.task import TaskFile


@dataclass(frozen=True)
class IslandOptions(WorkerOptions, ProbeOptions, AwaitedRun):
    """Join a run and train. An island needs only the Redis URL, and the run's name if that Redis has several runs."""

    name: str | None = None
    """The name of this island. The default is the one in its join file, else random. A given name stays the same over
    restarts.
    """
    folder: Path | None = None
    """The folder of the island's checkpoints. The default is runs/RUN/islands/NAME. Without it, an
    island with a random name keeps no checkpoints and no curves.
    """
    task: str | None = None
    """The task of the run, FILE.py:NAME, if it trains a task of its users (docs/guide/tasks.md)."""
    mesh: str | None = None
    """How to use several devices of this machine, such as data=2,fsdp=2,tensor=1 (docs/guide/many-devices.md). By
    default all devices are on `data`: each has all parameters and its share of a batch.
    """
    batch_size: int = 0
    """The sequences of this island's inner step, where its devices are larger or smaller than those of others. Its
    weight follows the tokens that it trains on. 0: as many as the run's settings say.
    """
    coordinator: str | None = None
    """The address of host 0 of an island over several hosts, such as node0:9000 (docs/guide/many-devices.md)."""
    hosts: int | None = None
    """The number of hosts of this island. All of them run this command."""
    host_rank: int | None = None
    """The number of this host: 0 for the leader, which alone talks to Redis."""
    standby: bool = False
    """Load and compile everything, print `ready`, and join once a line on standard input names the island."""
    evaluate_every: float = 15.0
    """The seconds between two evaluations of the published parameters by this island, if it is the one that evaluates.
    They take at most 2 % of the device's time. 0: this island never evaluates.
    """
    json: bool = False
    """Print one JSON object at the end."""


def require_valid(options: IslandOptions) -> None:
    options.require_status()
    if options.mesh is not None:
        parsed(options.mesh)
    remedy = "Give a number of seconds such as 15, or 0 for no evaluations."
    require_number("--evaluate-every", options.evaluate_every, remedy)


def is_random(options: IslandOptions) -> bool:
    """Return whether the island's name is random, so that no later start has it."""
    invited = options.invitation()
    return options.name is None and not (invited and invited.island)


def own_task(options: IslandOptions, manifest: Manifest) -> TaskFile | None:
    """Return the task that the island trains, if the run has one. JAX, which this may import, caches its programs."""
    keep_compiled()

    from archipelago.islands.tasks.task import task_of

    return task_of(options.task, manifest, "`archipelago island`")
