"""Preparation of an island: its data, devices and compiled programs. A standby holds them before it has a name."""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from archipelago.broker.config import RunConfig
from archipelago.broker.footprint import available_here, device_and_host, footprint, memory_text, shortage
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import Patience
from archipelago.broker.transport import IslandTransport
from archipelago.islands.computation import Computation
from archipelago.islands.hosts.leader import HostLeader
from archipelago.islands.mesh import MeshShape
from archipelago.islands.models.interface import Params
from archipelago.islands.options import IslandOptions, own_placement, own_settings
from archipelago.islands.placement import Placement
from archipelago.islands.sync.arrays import device_copy
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import OurTask, register_text, task_here
from archipelago.islands.tasks.task import TaskFile
from archipelago.islands.tasks.workload import Workload
from archipelago.islands.worker import Island

#: The name of the island that `rehearse` builds. Its link never starts.
REHEARSING = "rehearsal"


@dataclass
class PreparedIsland:
    """Everything that an island of this run loads and compiles before it has a name.

    Attributes:
        manifest: The run.
        pinned: The name of a corpus on this machine that replaces the run's, if any.
        workload: What the island trains.
        placement: Where everything is on several devices; None for one device.
        batch_size: The sequences of an inner step; 0 for those of the run.
        scan_steps: Inner steps between two step boundaries; 0 until they are known.
    """

    manifest: Manifest
    pinned: str | None
    workload: Workload
    placement: Placement | None = None
    batch_size: int = 0
    scan_steps: int = 0
    _computes: Callable[..., Computation] = Computation

    @property
    def place(self) -> Callable[[Any], Params]:
        """Brings parameters to the island's devices; on several hosts, to one device of this host."""
        return jax.device_put if self.placement is None or jax.process_count() > 1 else self.placement.place

    @property
    def evaluates_here(self) -> bool:
        """Whether this process can evaluate. On several hosts, it does so alone, on a device that holds the model."""
        shape = self.placement.shape if self.placement is not None else MeshShape()
        return jax.process_count() == 1 or shape.fsdp * shape.tensor == 1

    def share(self, leader: HostLeader) -> None:
        """Let the other hosts of this island compute everything, too. This process leads them."""
        from archipelago.islands.hosts.computing import LeadingComputation

        self._computes = partial(LeadingComputation, leader)
        self.scan_steps = 1  # hosts would have to measure together

    def sample(self) -> Any:
        """Return a batch to learn its tree from."""
        return self.workload.supply(TaskRun(REHEARSING, 0, self.manifest.config.seed)).sample(1)

    def fits(
        self,
        manifest: Manifest,
        pinned: str | None,
        placement: Placement | None = None,
        batch_size: int = 0,
        settings: RunConfig | None = None,
    ) -> bool:
        """Return whether an island of that run can use it."""
        shapes = [None if each is None else each.shape for each in (self.placement, placement)]
        own = (self.manifest, self.pinned, self.batch_size, self.workload.config)
        return own == (manifest, pinned, batch_size, settings or manifest.config) and shapes[0] == shapes[1]

    def link(self, transport: IslandTransport, who: str) -> Link:
        """Return a link for `who`, an island's name and incarnation."""
        return Link(transport, self.manifest, who, ())

    def register(self, transport: IslandTransport) -> None:
        """Tell the run which pinned text this island reads. Raises MismatchError if it knows another of that name."""
        if isinstance(self.workload.named, OurTask):
            register_text(self.workload.named.corpus, transport, self.pinned)

    def island(
        self,
        name: str,
        incarnation: str,
        link: Link,
        arrivals: Sequence[Arrival],
        on_marker: Callable[[Island, int], None] | None = None,
    ) -> Island:
        """Return an island that begins with these snapshots."""
        leases = None if name == REHEARSING else link
        supply = self.workload.supply(TaskRun(name, secrets.randbits(32), self.manifest.config.seed, leases))
        return self.workload.island(
            name, self.manifest, supply, link, arrivals, incarnation=incarnation, on_marker=on_marker,
            placement=self.placement, computes=self._computes,
        )  # fmt: skip

    def warm_up(self, island: Island, scan_steps: int) -> None:
        """Compile everything that the island will run. `scan_steps` 0 measures which number is fastest."""
        known = scan_steps or self.scan_steps
        self.scan_steps = known or best_scan_steps(island)
        island.scan_steps = self.scan_steps
        island.warm_up(has_stepped=not known)

    def rehearse(self, transport: IslandTransport, awaited: Patience, scan_steps: int) -> None:
        """Build an island from the run's snapshots and warm it up. Its link never starts, so no peer hears of it."""
        link = self.link(transport, "")
        island = self.island(REHEARSING, "", link, awaited(link.join))
        self.warm_up(island, scan_steps)
        del island, link
        gc.collect()  # frees the model and its device memory


def prepared_for(
    options: IslandOptions,
    manifest: Manifest,
    task: TaskFile | None,
    device_bytes: int | None = None,
    earlier: PreparedIsland | None = None,
) -> PreparedIsland:
    """Return what an island with these flags needs, from a standby if that fits.

    Args:
        options: The flags.
        manifest: The run.
        task: The users' task; None for one of our models.
        device_bytes: The memory of a device, where several hosts have agreed on it.
        earlier: What a standby has prepared.
    """
    placement, settings = own_placement(options, manifest, device_bytes), own_settings(options, manifest.config)
    if earlier is not None and earlier.fits(manifest, options.corpus, placement, options.batch_size, settings):
        return earlier
    return prepare(manifest, options.corpus, task, placement, options.batch_size, settings)


def prepare(
    manifest: Manifest,
    pinned: str | None,
    task: TaskFile | None = None,
    placement: Placement | None = None,
    batch_size: int = 0,
    settings: RunConfig | None = None,
) -> PreparedIsland:
    """Load the corpus of one of our models, or take the users' task, and build its inner steps.

    This asks the broker for nothing.

    Args:
        task: The users' task; None for one of our models.
        settings: How this island computes; None for the run's settings.
        manifest, pinned, placement, batch_size: As in `PreparedIsland`.

    Raises:
        MismatchError: The run trains other tensors.
    """
    settings = settings or manifest.config
    work = Workload.of(task or task_here(manifest, pinned, batch_size, settings), settings)
    work.require_same(manifest)
    if placement is not None:
        work = replace(work, steps=placement.steps(work.steps))
    return PreparedIsland(manifest, pinned, work, placement, batch_size)


#: Longer steps hide the cost of their dispatch, so they are dispatched singly. Calls are then answered sooner.
DISPATCH_MATTERS_SECONDS = 0.02
#: A call that takes longer is measured once.
LONG_SECONDS = 1.0
#: The longest time between two step boundaries when several steps are made at once.
BOUNDARY_SECONDS = 0.04


def unused_devices(devices: Sequence[jax.Device], shape: MeshShape) -> str:
    """Return which devices the island does not use, and how to use them; empty if it uses all."""
    if len(devices) <= shape.devices:
        return ""
    used = devices[0]
    begin = f"this island uses {shape.devices} of {len(devices)} devices: {used.device_kind}, --mesh {shape}"
    if used.platform == "cpu":
        return f"{begin}; the others come from XLA_FLAGS and add no cores: one CPU device uses all that it may use"
    return f"{begin}; another mesh can use the others, or another island whose environment shows it only those"


def memory_in_words(manifest: Manifest, device: jax.Device, shape: MeshShape | None = None) -> tuple[str, list[str]]:
    """Return how much memory the run takes by part, and what does not fit here.

    Args:
        manifest: The run.
        device: One of the island's devices.
        shape: Their mesh; None for one device.
    """
    needed, available = footprint(manifest), available_here()
    said = f"memory: {needed.describe()}"
    if device.platform == "cpu":
        words = shortage("this island", needed.island, available)
        return f"{said}; {memory_text(available)} are available here", [words] if words else []
    whole, on_host = device_and_host(manifest)
    on_device = whole // (shape.fsdp * shape.tensor if shape else 1)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    each = "each device" if shape and shape.devices > 1 else "the device"
    said += f"; here {memory_text(on_device)} of {memory_text(limit) if limit else 'the memory'} on {each}, and "
    said += f"{memory_text(on_host)} of {memory_text(available)} on the machine"
    troubles = [shortage("this island, on its machine,", on_host, available)]
    troubles += [shortage("this island, on its device,", on_device, limit)] if limit else []
    return said, [words for words in troubles if words]


def best_scan_steps(island: Island) -> int:
    """Return the steps between two boundaries: 1, or a divisor of the stride that fits into 40 ms and is faster."""
    one = _seconds_a_step(island, 1)
    stride = max(1, island.config.sync.interval // len(island.manifest.fragments))
    if one > DISPATCH_MATTERS_SECONDS or stride == 1:
        return 1
    fitting = [n for n in range(2, stride + 1) if stride % n == 0 and n * one <= BOUNDARY_SECONDS]
    if not fitting:
        return 1
    many = fitting[-1]
    return many if _seconds_a_step(island, many) < 0.95 * one else 1


def _seconds_a_step(island: Island, scan_steps: int) -> float:
    """Return the shortest time of a step over several calls on copies, after one call that compiles."""
    batch, state = island.batches.sample(scan_steps), device_copy(island.inner)
    arguments = island.computation.arguments(batch, 0, island.link.run_steps)
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        state, losses_n = island.computation.steps(state, *arguments)
        losses_n.block_until_ready()
        if attempt:
            best = min(best, time.perf_counter() - began)
        if attempt and best > LONG_SECONDS:  # measuring again would delay the join by as much, and change nothing
            break
    return best / scan_steps
