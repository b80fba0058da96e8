"""The command line: one verb each, from its dataclass of options. Verbs load what they need when they run."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tyro

from broker.process import guarded
from ops.settings import config_file


class Verb(NamedTuple):
    """A module with `main(options) -> int`, and in it the dataclass of options, whose docstring is the help."""

    module: str
    options: str


VERBS = {
    "up": Verb("ops.up", "UpOptions"),
    "init": Verb("ops.create", "InitOptions"),
    "island": Verb("islands.main", "IslandOptions"),
    "merger": Verb("merger.main", "MergerOptions"),
    "status": Verb("ops.status", "StatusOptions"),
    "steer": Verb("ops.steer", "SteerOptions"),
    "top": Verb("ops.top", "TopOptions"),
    "doctor": Verb("ops.doctor", "DoctorOptions"),
    "dash": Verb("ops.dash", "DashOptions"),
    "report": Verb("ops.run_report", "ReportOptions"),
    "evaluate": Verb("ops.evaluate", "EvaluateOptions"),
    "replay": Verb("ops.replay", "ReplayOptions"),
    "prepare": Verb("ops.prepare", "PrepareOptions"),
    "export": Verb("ops.export", "ExportOptions"),
    "generate": Verb("ops.generate", "GenerateOptions"),
    "alone": Verb("ops.alone", "AloneOptions"),
    "chaos": Verb("ops.chaos", "ChaosOptions"),
    "bench": Verb("ops.bench", "BenchOptions"),
    "sweep": Verb("ops.sweep", "SweepOptions"),
    "simulate": Verb("ops.simulate", "SimulateOptions"),
    "plan": Verb("ops.plan", "PlanOptions"),
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
