"""A small study, trials and records, and a task to test with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.ops.experiments.trial import Trial
from tests.islands.tasks.task_runs import CONFIG, TASK, file_of

BASE = """
[data]
corpus = "small-text"
sequence_length = 32
batch_size = 4
shards = 8
held_out_sequences = 32

[inner]
steps = 24
warmup_steps = 4

[sync]
interval = 12
"""


STUDY = """
about = "which rate"
base = "base.toml"
seeds = [1, 0]

[[grid]]
kind = "parallel"
islands = 2

[[grid]]
islands = [2, 4]
seeds = [0]
"outer.rule" = "sgd"
"outer.learning_rate" = [0.5, 1.0]
"""


def record_of(trial: Trial, loss: float | None = 2.0, tokens: int = 1000) -> dict[str, Any]:
    return {
        "kind": trial.kind,
        "islands": trial.islands,
        "slow": trial.slow,
        "seed": trial.seed,
        "settings": dict(trial.settings),
        "bits_per_byte": loss,
        "diverged": loss is None,
        "tokens": tokens,
        "seconds": 1.0,
    }


def trial_of(kind: str = "islands", islands: int = 2, seed: int = 0, slow: float = 1.0, **settings: Any) -> Trial:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Trial.of(named, seed, kind=kind, islands=islands, slow=slow)


def kernel(params: dict[str, Any]) -> float:
    """Return how large the kernel is. It is 1 before any training, and best at 0."""
    return float(abs(params["layers"][0]["kernel"]).mean())


def task_work(**changes: Any) -> Workload:
    """Return the task of 48 steps with these changes, which compiles in no time."""
    file = file_of(replace(TASK, **{"evaluate": kernel} | changes))
    return Workload.of(file, task_config(replace(CONFIG, inner=replace(CONFIG.inner, steps=48)), file))
