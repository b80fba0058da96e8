"""The command line: one verb for each task. A verb's module is imported only when that verb runs."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import tyro

from archipelago.broker.process import guarded
from archipelago.ops.settings import config_file


class Verb(NamedTuple):
    """Where a verb lives.

    Attributes:
        module: The module, which has `main(options) -> int`.
        options: The name of its dataclass of options, whose docstring is the verb's help.
        summary: One line for the list of verbs, written here so that the list needs no imports.
    """

    module: str
    options: str
    summary: str


VERBS = {
    "up": Verb("archipelago.ops.launch.up", "UpOptions", "Train on this machine: Redis, merger, islands, report."),
    "init": Verb("archipelago.ops.launch.init", "InitOptions", "Create a run in a Redis."),
    "island": Verb("archipelago.islands.main", "IslandOptions", "Join a run and train."),
    "merger": Verb("archipelago.merger.main", "MergerOptions", "Serve a run: merge what its islands send."),
    "status": Verb("archipelago.ops.watch.status", "StatusOptions", "Show a run, once or live with --watch."),
    "dash": Verb("archipelago.ops.dashboard.main", "DashOptions", "Show a run in the browser, and steer it there."),
    "steer": Verb("archipelago.ops.watch.steer", "SteerOptions", "Change the settings of a running run."),
    "doctor": Verb("archipelago.ops.watch.doctor.main", "DoctorOptions", "Check this machine and the Redis."),
    "report": Verb("archipelago.ops.watch.report", "ReportOptions", "Write a run's figures into one HTML file."),
    "evaluate": Verb("archipelago.ops.watch.evaluate", "EvaluateOptions", "Measure the merged model on held-out text."),
    "export": Verb("archipelago.ops.weights.export", "ExportOptions", "Write the merged model as safetensors."),
    "generate": Verb("archipelago.ops.weights.generate", "GenerateOptions", "Continue a prompt with the merged model."),
    "prepare": Verb("archipelago.ops.launch.prepare", "PrepareOptions", "Make a corpus ready for islands to read."),
    "replay": Verb("archipelago.ops.experiments.replay", "ReplayOptions", "Merge a recorded run again."),
    "chaos": Verb("archipelago.ops.chaos.main", "ChaosOptions", "Train through injected faults and report."),
    "sweep": Verb("archipelago.ops.experiments.sweep", "SweepOptions", "Run a study."),
    "plan": Verb("archipelago.ops.simulation.plan", "PlanOptions", "Plan a run."),
    "bench": Verb("archipelago.ops.bench.main", "BenchOptions", "Measure speed and quality."),
    "simulate": Verb("archipelago.ops.simulation.main", "SimulateOptions", "Plan a run, or simulate one."),
}

Options = TypeVar("Options")


def run(args: Sequence[str]) -> int:
    """Run the verb that `args` begins with, and return its exit status."""
    if not args or args[0] not in VERBS:
        return _overview(args)
    verb = VERBS[args[0]]
    module = importlib.import_module(verb.module)
    options = parse(getattr(module, verb.options), f"archipelago {args[0]}", args[1:])
    return int(module.main(options))


def parse(options_type: type[Options], prog: str, args: Sequence[str]) -> Options:
    """Return the options that `args` state. A file named with `--config` supplies the defaults of the settings."""
    options: Options = tyro.cli(options_type, prog=prog, args=list(args), **_defaults(options_type, args))
    return options


def _defaults(options_type: type[Any], args: Sequence[str]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(options_type)}
    if "settings" not in names or "config" not in names:
        return {}
    required = [f for f in dataclasses.fields(options_type) if f.default is f.default_factory is dataclasses.MISSING]
    missing = {f.name: tyro.MISSING for f in required}
    return {"default": options_type(**missing, settings=config_file(args))}


def _overview(args: Sequence[str]) -> int:
    """Print the list of verbs: on standard output if the user asked for it, otherwise as part of an error."""
    asked = not args or args[0] in ("-h", "--help", "help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        out.write(f"error: there is no verb {args[0]!r}. Choose one of these:\n\n")
    out.write("usage: archipelago VERB [OPTIONS]\n\nTrain one model over islands that share nothing but a Redis.\n\n")
    for name, verb in VERBS.items():
        out.write(f"  {name:<10}{verb.summary}\n")
    out.write("\n`archipelago VERB --help` lists the options of a verb.\n")
    return 0 if asked else 2


def main() -> int:
    """Run the command `archipelago`."""
    return guarded(lambda: run(sys.argv[1:]))
