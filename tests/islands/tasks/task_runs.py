"""A small task, and a run of it in virtual time. The test makes the steps."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import AdoptConfig, InnerConfig, OuterConfig, RunConfig, SyncConfig, WireConfig
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import first_snapshots
from archipelago.islands.tasks.task import Task, TaskFile
from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.islands.user_loop.tensors import require_same_tensors
from archipelago.islands.worker import Island
from tests.harness.played import PlayedRun

CONFIG = RunConfig(
    inner=InnerConfig(steps=1000),
    sync=SyncConfig(interval=4, fragments=2, window=2, quorum=1, grace=0.0),
    outer=OuterConfig(momentum=0.5),
    adopt=AdoptConfig("overwrite"),
    wire=WireConfig(up="bfloat16", thin="int4", down="float32"),
)
#: Eight shards of four batches each.
SHARDS, BATCHES = 8, 4
EXAMPLES = np.random.default_rng(0).normal(size=(SHARDS, BATCHES, 2, 3)).astype(np.float32)


def init(seed: int) -> dict[str, Any]:
    """Return a tree with a leaf in bfloat16, and one that is not trained."""
    return {
        "layers": [{"kernel": jnp.ones((3, 4)) * (1 + seed)}],
        "embedding": jnp.zeros((2, 2), jnp.bfloat16),
        "calls": jnp.int32(7),
    }


def loss(params: dict[str, Any], batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return a loss and a penalty. It fails for leaves in other dtypes than those of `init`."""
    assert params["embedding"].dtype == jnp.bfloat16
    assert params["calls"].dtype == jnp.int32
    found = jnp.mean((batch["x"] @ params["layers"][0]["kernel"]) ** 2)
    return found, 0.1 * jnp.sum((params["embedding"].astype(jnp.float32) - 1.0) ** 2)


def batches(run: TaskRun) -> Iterator[dict[str, Any]]:
    """Yield the batches of leased shards."""
    for shard in run.shards(SHARDS):
        for number in range(shard.position, BATCHES):
            yield {"x": EXAMPLES[shard.number, number]}


TASK = Task(init, loss, batches, evaluate=lambda params: {"loss": 2.5, "accuracy": 0.5, "other": 1}, tokens=10)


def file_of(task: Task = TASK) -> TaskFile:
    """Return the task as if it came from a file."""
    return TaskFile(task, Path("/nowhere/mine.py"), "task")


class TaskedRun(PlayedRun):
    """A run of a task."""

    def __init__(self, task: Task = TASK, config: RunConfig = CONFIG) -> None:
        self.file = file_of(task)
        work = Workload.of(self.file, task_config(config, self.file))
        manifest = replace(work.describe("mine"), uid="0" * 32)
        super().__init__(manifest, first_snapshots(manifest, work.model.init()))

    def island(self, name: str = "a", file: TaskFile | None = None) -> Island:
        """Return an island that has joined, and taken the optimiser's state of a peer if there is one."""
        work = Workload.of(file or self.file, self.manifest.config)
        require_same_tensors(self.manifest, work.model.tensors)
        link = self.link(f"{name}/x")
        arrivals = link.join()
        supply = work.supply(TaskRun(name, secrets.randbits(32), self.manifest.config.seed, link))
        computation = work.computation(self.manifest)
        island = Island(name, self.manifest, computation, supply, link, arrivals, self.clock, "x")
        Newcomer(self.connect(), island, seconds=0.0).complete()
        island.beat("joining")
        link.offer([str(number) for number in range(SHARDS)])
        link.pump()
        return island
