"""The command line: one verb each, from its dataclass of options. Verbs load what they need when they run."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tyro

from archipelago.broker.process import guarded
from archipelago.ops.settings import config_file


class Verb(NamedTuple):
    """A module with `main(options) -> int`, and in it the dataclass of options, whose docstring is the help."""

    module: str
    options: str


VERBS = {
    "up": Verb("archipelago.ops.launch.up", "UpOptions"),
    "init": Verb("archipelago.ops.launch.init", "InitOptions"),
    "island": Verb("archipelago.islands.main", "IslandOptions"),
    "merger": Verb("archipelago.merger.main", "MergerOptions"),
    "status": Verb("archipelago.ops.watch.status", "StatusOptions"),
    "steer": Verb("archipelago.ops.watch.steer", "SteerOptions"),
    "top": Verb("archipelago.ops.watch.live", "TopOptions"),
    "doctor": Verb("archipelago.ops.watch.doctor.main", "DoctorOptions"),
    "dash": Verb("archipelago.ops.dashboard.main", "DashOptions"),
    "report": Verb("archipelago.ops.watch.report", "ReportOptions"),
    "evaluate": Verb("archipelago.ops.watch.evaluate", "EvaluateOptions"),
    "replay": Verb("archipelago.ops.experiments.replay", "ReplayOptions"),
    "prepare": Verb("archipelago.ops.launch.prepare", "PrepareOptions"),
    "export": Verb("archipelago.ops.weights.export", "ExportOptions"),
    "generate": Verb("archipelago.ops.weights.generate", "GenerateOptions"),
    "alone": Verb("archipelago.ops.experiments.single_process", "AloneOptions"),
    "chaos": Verb("archipelago.ops.chaos.main", "ChaosOptions"),
    "bench": Verb("archipelago.ops.bench.main", "BenchOptions"),
    "sweep": Verb("archipelago.ops.experiments.sweep", "SweepOptions"),
    "simulate": Verb("archipelago.ops.simulation.main", "SimulateOptions"),
    "plan": Verb("archipelago.ops.simulation.plan", "PlanOptions"),
}


def run(args: Sequence[str]) -> int:
    """Runs the verb that `args` begin with."""
    if args and args[0] in VERBS:
        verb = VERBS[args[0]]
        module = importlib.import_module(verb.module)
        options_type = getattr(module, verb.options)
        options = tyro.cli(
            options_type, prog=f"archipelago {args[0]}", args=list(args[1:]), **_defaults(options_type, args)
        )
        return int(module.main(options))
    return _overview(args)


def _defaults(options_type: type[Any], args: Sequence[str]) -> dict[str, Any]:
    """For verbs with settings: those of the config file, as defaults of the flags."""
    names = {f.name for f in dataclasses.fields(options_type)}
    if "settings" not in names or "config" not in names:
        return {}
    required = [f for f in dataclasses.fields(options_type) if f.default is f.default_factory is dataclasses.MISSING]
    missing = {f.name: tyro.MISSING for f in required}
    return {"default": options_type(**missing, settings=config_file(args))}


def _overview(args: Sequence[str]) -> int:
    """The list of verbs: on standard output when it was asked for, else as an error."""
    asked = not args or args[0] in ("-h", "--help", "help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        out.write(f"error: there is no verb {args[0]!r}. Choose one of these:\n\n")
    out.write("usage: archipelago VERB [OPTIONS]\n\nTrain one model over islands that share nothing but a Redis.\n\n")
    for name, verb in VERBS.items():
        doc = getattr(importlib.import_module(verb.module), verb.options).__doc__ or ""
        out.write(f"  {name:<10}{doc.strip().splitlines()[0]}\n")
    out.write("\n`archipelago VERB --help` lists the options of each.\n")
    return 0 if asked else 2


def main() -> int:
    """The entry point `archipelago`."""
    return guarded(lambda: run(sys.argv[1:]))
