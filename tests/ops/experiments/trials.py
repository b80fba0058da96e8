"""A small study, and trials and records to test with."""

from __future__ import annotations

from typing import Any

from archipelago.ops.experiments.trial import Trial

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
    return Trial.of(kind, islands, slow, seed, {name.replace("__", "."): value for name, value in settings.items()})
