"""Train one process on a number of tokens, for comparison (started by `archipelago up`)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from archipelago.broker.config import RunConfig, checked
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import guarded, keep_compiled, print_json
from archipelago.ops.launch.init import require_usable
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import WeightFiles


@dataclass(frozen=True)
class AloneOptions:
    """Train without islands, in this process, on so many tokens; for comparison."""

    tokens: int
    """tokens to train on"""
    output: Path | None = None
    """a JSON file for the curve"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """weights to begin with: a .safetensors file, or a folder with one"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    json: bool = False
    """print one JSON object"""


def main(options: AloneOptions) -> int:
    """Trains, says how it goes, and writes the curve."""
    config = checked(options.settings)
    if options.tokens < 1:
        raise ConfigError(f"--tokens cannot be {options.tokens}", "Give a positive number.")
    keep_compiled()

    from archipelago.islands.models.registry import build
    from archipelago.ops.experiments.baselines import Point, one_process

    config, corpus = require_usable(config, options.from_)
    params = WeightFiles(options.from_).load(build(config.model).tensors) if options.from_ else None

    def progress(point: Point) -> None:
        say(f"{point.tokens:>13,} tokens  {point.bits_per_byte:.4f} bits per byte")

    points = one_process(config, corpus, options.tokens, progress, params)
    found = {"tokens": options.tokens, "curve": [[point.tokens, point.bits_per_byte] for point in points]}
    if options.output is not None:
        part = options.output.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(options.output)
    if options.json:
        print_json(found)
    return 0


if __name__ == "__main__":
    from archipelago.ops.cli import parse

    sys.exit(guarded(lambda: main(parse(AloneOptions, "single_process", sys.argv[1:]))))
