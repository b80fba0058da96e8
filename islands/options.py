"""The flags of `archipelago island`, and what follows from them alone. This module does not import JAX."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from archipelago.broker.buckets.folder import BucketFolder, chosen
from archipelago.broker.errors import require_number
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.process import AwaitedRun, reading_from_replica
from archipelago.broker.redis.transport import RedisTransport
from archipelago.islands.mesh.shape import parsed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandOptions(WorkerOptions, AwaitedRun):
    """Join a run and train. An island needs only the Redis URL, and the run's name if that Redis has several runs."""

    read_from: str | None = None
    """The URL of a replica of the run's Redis. Snapshots are downloaded from it where it has them, and the Redis itself
    sends fewer bytes (docs/guide/operating.md). The default is $ARCHIPELAGO_READ_FROM, or none.
    """
    name: str | None = None
    """The name of this island. The default is the one in its join file, else random. A given name stays the same over
    restarts.
    """
    folder: Path | None = None
    """The folder of the island's checkpoints. The default is runs/RUN/islands/NAME."""
    corpus: str | None = None
    """A corpus on this machine to train on instead of the run's, for text that must not leave its site."""
    task: str | None = None
    """The task of the run, FILE.py:NAME, if it trains a task of its users (docs/guide/your-training.md)."""
    mesh: str | None = None
    """How to use several devices of this machine, such as data=2,fsdp=2,tensor=1 (docs/guide/many-devices.md). By
    default all devices are on `data`: each has all parameters and its share of a batch.
    """
    batch_size: int = 0
    """The sequences of this island's inner step, where its devices are larger or smaller than those of others. Its
    weight follows the tokens that it trains on. 0: as many as the run's settings say.
    """
    micro_batches: int | None = None
    """Compute each batch in this many parts on this island, if its device has less memory than those of others. The
    default is the run's --inner.micro-batches.
    """
    rematerialise: bool | None = None
    """Compute layers again in the backward pass on this island, for the same reason. The default is the run's."""
    coordinator: str | None = None
    """The address of host 0 of an island over several hosts, such as node0:9000 (docs/guide/many-devices.md)."""
    hosts: int | None = None
    """The number of hosts of this island. All of them run this command. Slurm, Kubernetes and TPU hosts are detected,
    unless this is 1.
    """
    host_rank: int | None = None
    """The number of this host: 0 for the leader, which alone talks to Redis."""
    scan_steps: int = 0
    """The inner steps between two step boundaries, compiled as one scan. 0 measures and uses the fastest number."""
    step_seconds_min: float = 0.0
    """The minimum duration of an inner step, for trials of more islands than the machine has cores."""
    standby: bool = False
    """Load and compile everything, print `ready`, and join once a line on standard input names the island."""
    evaluate_every: float = 15.0
    """The seconds between two evaluations of the published parameters by this island, if it is the one that evaluates.
    They take at most 2 % of the device's time. 0: this island never evaluates.
    """
    json: bool = False
    """Print one JSON object at the end."""

    def connect(self) -> RedisTransport:
        """Connect to the run, and to the replica."""
        return reading_from_replica(super().connect(), self.read_from)


def require_valid(options: IslandOptions) -> None:
    options.require_status()
    if options.mesh is not None:
        parsed(options.mesh)
    remedy = "Give a number of steps, or 0 to measure."
    require_number("--scan-steps", options.scan_steps, remedy)
    remedy = "Give seconds, or 0 for none."
    require_number("--step-seconds-min", options.step_seconds_min, remedy)
    remedy = "Give a number of seconds such as 15, or 0 for no evaluations."
    require_number("--evaluate-every", options.evaluate_every, remedy)


def own_bucket(options: IslandOptions, run: str, name: str) -> BucketFolder | None:
    """Return the folder of the island's copies in a bucket. An island with a random name cannot come back to them."""
    if options.name is None and options.invitation() is None:
        if chosen(options.bucket):
            log.info("no copies in the bucket: without --name, the island cannot come back to them")
        return None
    return options.bucket_folder(run, "islands", name)
