"""Train one of our models, or a task, without islands, on a number of tokens. `archipelago up` compares with that."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import require_number
from archipelago.broker.files import write_atomically
from archipelago.broker.manifest import loss_unit
from archipelago.broker.process import guarded, keep_compiled
from archipelago.ops.commands import parse
from archipelago.ops.experiments.trial import CurvePoint
from archipelago.ops.launch.init import workload_of
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import WeightFiles

PROGRAM = "python -m archipelago.ops.experiments.single_process"


@dataclass(frozen=True)
class SingleProcessOptions:
    """Train without islands, in this process, and write the loss curve."""

    tokens: int
    """tokens to train on"""
    output: Path
    """a JSON file for the curve"""
    task: str | None = None
    """a task FILE.py:NAME in place of one of our models"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """weights to begin with: a .safetensors file, or a folder with one"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def run(options: SingleProcessOptions) -> int:
    """Train, print each evaluation, and write the curve at the end."""
    config = checked(options.settings)
    require_number("--tokens", options.tokens, "Give a positive number.", 1)
    keep_compiled()

    from archipelago.ops.experiments.baselines import one_process

    work = workload_of(config, options.task, options.from_)
    params = WeightFiles(options.from_).load(work.model.tensors) if options.from_ else None

    unit = loss_unit(work.named.data)

    def progress(point: CurvePoint) -> None:
        say(f"{point.tokens:>13,} tokens  held-out {unit.from_evaluation(point.bits_per_byte):.4f} {unit.name}")

    points = one_process(work, options.tokens, progress, params)
    curve = [[point.tokens, point.bits_per_byte] for point in points]
    write_atomically(options.output, json.dumps({"tokens": options.tokens, "curve": curve}))
    return 0


def main() -> int:
    """Parse the command line and run."""
    return guarded(lambda: run(parse(SingleProcessOptions, PROGRAM, sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
