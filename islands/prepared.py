"""Preparation of an island: its data, devices and compiled programs. A standby holds them before it has a name."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from archipelago.broker.config import BATCH_FACTOR_MAX
from archipelago.broker.errors import ConfigError, require_number
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import Patience, compiled_once
from archipelago.broker.transport import IslandTransport
from archipelago.islands.inner import require_divisible
from archipelago.islands.mesh import MeshShape, parsed, usable_devices
from archipelago.islands.models.interface import Params
from archipelago.islands.options import IslandOptions
from archipelago.islands.placement import Placement, placement_of
from archipelago.islands.sync.connection.downloads import Arrival
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.participant import Participant
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import task_here
from archipelago.islands.tasks.task import TaskFile
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.team.jax_team import JaxTeam
from archipelago.islands.user_loop.tensors import require_same_tensors
from archipelago.islands.worker import Island

#: The name of the island that `rehearse` builds. Its link never starts.
REHEARSING = "rehearsal"


@dataclass
class PreparedIsland:
    """Everything that an island of this run loads and compiles before it has a name.

    Attributes:
        placement: Where everything is on several devices; None for one device.
        batch_size: The sequences of an inner step; 0 for those of the run.
        team: The processes of an island over several hosts, once all of them are prepared.
    """

    manifest: Manifest
    workload: Workload
    placement: Placement | None = None
    batch_size: int = 0
    team: JaxTeam | None = None

    @property
    def place(self) -> Callable[[Any], Params]:
        """Brings parameters to the island's devices; on several hosts, to one device of this host."""
        return jax.device_put if self.placement is None or jax.process_count() > 1 else self.placement.place

    @property
    def evaluates_here(self) -> bool:
        """Whether this process can evaluate. On several hosts, it does so alone, on a device that holds the model."""
        shape = self.placement.shape if self.placement is not None else MeshShape()
        return jax.process_count() == 1 or shape.fsdp * shape.tensor == 1

    def sample(self) -> Any:
        """Return a batch to learn its tree from."""
        return self.workload.supply(TaskRun(REHEARSING, 0, self.manifest.config.seed)).sample(1)

    def fits(self, manifest: Manifest, placement: Placement | None = None, batch_size: int = 0) -> bool:
        """Return whether an island of that run can use it."""
        meshes = [None if each is None else each.shape for each in (self.placement, placement)]
        return (self.manifest, self.batch_size) == (manifest, batch_size) and meshes[0] == meshes[1]

    def island(
        self,
        name: str,
        incarnation: str,
        link: Link,
        arrivals: Sequence[Arrival],
        on_marker: Callable[[Participant], object] | None = None,
    ) -> Island:
        """Return an island that begins with these snapshots."""
        leases = None if name == REHEARSING else link
        supply = self.workload.supply(TaskRun(name, secrets.randbits(32), self.manifest.config.seed, leases))
        computation = self.workload.computation(self.manifest, self.placement, self.team)
        return Island(
            name, self.manifest, computation, supply, link, arrivals, incarnation=incarnation, on_marker=on_marker
        )  # fmt: skip

    def rehearse(self, transport: IslandTransport, awaited: Patience) -> None:
        """Build an island from the run's snapshots and warm it up. Its link never starts, so no peer hears of it."""
        link = Link(transport, self.manifest, "", ())
        island = self.island(REHEARSING, "", link, awaited(link.join))
        with compiled_once(self.manifest.config.digest()):
            island.warm_up()
        del island, link
        gc.collect()  # frees the model and its device memory


def prepared_for(
    options: IslandOptions, manifest: Manifest, task: TaskFile | None, earlier: PreparedIsland | None = None
) -> PreparedIsland:
    """Return what an island with these flags needs, from a standby if that fits. `task` is None for our models."""
    placement = own_placement(options, manifest)
    if earlier is not None and earlier.fits(manifest, placement, options.batch_size):
        return earlier
    return prepare(manifest, task, placement, options.batch_size)


def own_placement(options: IslandOptions, manifest: Manifest) -> Placement | None:
    """Return where everything is on the devices of this island; None for one device."""
    require_batch(options.batch_size, manifest)
    shape = parsed(options.mesh) if options.mesh is not None else None
    own, parts = options.batch_size or manifest.config.data.batch_size, manifest.config.inner.micro_batches
    if not manifest.task:
        require_divisible(own, parts)
    batch_size = 0 if manifest.task else own // parts  # a task has its own
    placement = placement_of(shape, manifest, batch_size, usable_devices())
    if jax.process_count() > 1 and (placement is None or placement.shape.devices < jax.device_count()):
        raise ConfigError(
            f"this island has {jax.device_count()} devices on {jax.process_count()} hosts, and its mesh has "
            f"{placement.shape.devices if placement else 1}",
            "Give a --mesh of all of them, or a --batch-size that their number divides.",
            code="mesh.size",
        )
    return placement


def require_batch(batch_size: int, manifest: Manifest) -> None:
    """Raise ConfigError (`config.value`) for a batch that the run would not take."""
    if batch_size and manifest.task:
        raise ConfigError(
            "a task has batches of its own, so --batch-size would change nothing", "Leave it out.", code="config.value"
        )
    most = BATCH_FACTOR_MAX * manifest.config.data.batch_size
    remedy = f"Give 1 to {most:,} sequences ({BATCH_FACTOR_MAX} times the run's batch), or 0 for the run's."
    require_number("--batch-size", batch_size, remedy, most=most)


def prepare(
    manifest: Manifest, task: TaskFile | None = None, placement: Placement | None = None, batch_size: int = 0
) -> PreparedIsland:
    """Load the corpus of one of our models, or take the users' task, and build its inner steps.

    This asks the broker for nothing.

    Args:
        task: The users' task; None for one of our models.

    Raises:
        MismatchError: The run trains other tensors.
    """
    work = Workload.of(task or task_here(manifest, batch_size), manifest.config)
    require_same_tensors(manifest, work.model.tensors)
    if placement is not None:
        work = replace(work, steps=placement.steps(work.steps))
    return PreparedIsland(manifest, work, placement, batch_size)
