"""`archipelago bench mixed`: islands in JAX and in PyTorch in one run, against runs of one framework alone.

All runs train the same model in virtual time from the same parameters and on the same tokens: an island draws its
batches by the seed and its number, in whichever framework it trains. Only the rounding of the frameworks differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.machine import require_extra
from archipelago.broker.process import keep_compiled
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.experiments.trial import Progress, Trial, TrialRow, measure
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.tasks.workload import Workload
    from archipelago.ops.experiments.both_frameworks import Framework

JAX, TORCH, BOTH = "all in JAX", "all in PyTorch", "both in one run"


@dataclass(frozen=True)
class MixedOptions(OutputOptions):
    """Train a model by islands in JAX, by islands in PyTorch, and by both in one run, in virtual time."""

    islands: int = 2
    """The number of islands. In the run of both frameworks, every second one is in PyTorch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches. Their spread is the noise that a difference is compared with."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: MixedOptions) -> int:
    """Compare, and write the results."""
    config = checked(options.settings)
    if options.islands < 2:
        raise ConfigError("one island is in one framework", "Give --islands 2 or more.", code="config.value")
    require_extra("llama", "Training in both frameworks")
    keep_compiled()
    import torch

    from archipelago.islands.tasks.ours import fitted

    torch.set_num_threads(1)  # with threads of its own, JAX and PyTorch would wait for each other's
    corpus = open_corpus(config.data.corpus)
    found = compared(fitted(config, corpus), corpus, options.islands, options.seeds or (config.seed,))
    return finish("mixed", found, options)


def compared(config: RunConfig, corpus: OpenCorpus, islands: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Train all runs with every seed.

    Args:
        config: The run's config.
        corpus: Its corpus.
        islands: The number of islands.
        seeds: The seeds to take means and spreads over.

    Returns:
        Plain data with `rows`, `curves` and `losses`.
    """
    from archipelago.islands.tasks.ours import our_work
    from archipelago.ops.experiments.baselines import scoring
    from archipelago.ops.experiments.both_frameworks import MixedRun, require_both
    from archipelago.ops.experiments.island_runs import play

    require_both(config)
    arms: dict[str, TrialRow] = {}
    for name, each in frameworks(islands).items():

        def played(trial: Trial, work: Workload, note: Progress, each: Sequence[Framework] = each) -> dict[str, Any]:
            play(MixedRun(work.config, corpus, each), scoring(work), note)
            return {}

        records = []
        for seed in seeds:
            work = our_work(dataclasses.replace(config, seed=seed), corpus)
            record = measure(Trial.of({}, seed, islands=islands), work, played)
            say(f"{name}, seed {seed}: {record['bits_per_byte']} bits per byte after {record['tokens']:,} tokens")
            records.append(record)
        arms[name] = TrialRow({}, tuple(records))
    return {"config": config.digest(), "seeds": [*seeds], "rows": rows(arms),
            "curves": {name: [record["curve"] for record in arm.records] for name, arm in arms.items()},
            "losses": {name: [*arm.losses.values()] for name, arm in arms.items()}}  # fmt: skip


def frameworks(islands: int) -> dict[str, list[Framework]]:
    """Return the framework of each island in each run."""
    return {
        JAX: ["jax"] * islands,
        TORCH: ["pytorch"] * islands,
        BOTH: ["pytorch" if number % 2 else "jax" for number in range(islands)],
    }


def rows(arms: Mapping[str, TrialRow]) -> list[dict[str, Any]]:
    """Return a table for people. The spread over the seeds is the noise that the ratios are compared with."""
    return [
        {
            "what": name,
            "tokens": arm.records[0]["tokens"],
            "bits_per_byte": arm.mean,
            "spread": arm.spread,
            "to_jax": arm.ratio(arms[JAX]),
            "to_pytorch": arm.ratio(arms[TORCH]),
        }
        for name, arm in arms.items()
    ]
