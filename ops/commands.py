"""The command line: the table of verbs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from archipelago.ops import verbs
from archipelago.ops.verbs import Group, Verb, Verbs

SUMMARY = "Train one model over islands that share nothing but a Redis."

VERBS: Verbs = {
    "up": Verb("archipelago.ops.launch.up", "UpOptions", "Train on this machine: Redis, merger, islands, report."),
    "init": Verb("archipelago.ops.launch.init", "InitOptions", "Create a run in a Redis."),
    "island": Verb("archipelago.islands.main", "IslandOptions", "Join a run and train."),
    "merger": Verb("archipelago.merger.main", "MergerOptions", "Serve a run: merge what its islands send."),
    "status": Verb("archipelago.ops.watch.status", "StatusOptions", "Show a run, once or live with --watch."),
    "runs": Verb("archipelago.ops.watch.run_list", "RunsOptions", "List the runs of a Redis and of the runs' folder."),
    "rm": Verb("archipelago.ops.launch.rm", "RmOptions", "Delete a run."),
    "dash": Verb("archipelago.ops.dashboard.main", "DashOptions", "Show a run in the browser, and steer it there."),
    "steer": Verb("archipelago.ops.watch.steer", "SteerOptions", "Change the settings of a running run."),
    "invite": Verb("archipelago.ops.launch.invite", "InviteOptions", "Give a member of a run credentials of its own."),
    "revoke": Verb("archipelago.ops.launch.invite", "RevokeOptions", "End a membership of a run."),
    "doctor": Verb("archipelago.ops.watch.doctor.main", "DoctorOptions", "Check this machine and the Redis."),
    "report": Verb("archipelago.ops.watch.report", "ReportOptions", "Write a run's figures into one HTML file."),
    "export": Verb("archipelago.ops.weights.export", "ExportOptions", "Write the merged model as safetensors."),
    "generate": Verb("archipelago.ops.weights.generate", "GenerateOptions", "Continue a prompt with the merged model."),
    "prepare": Verb("archipelago.ops.launch.prepare", "PrepareOptions", "Make a corpus ready for islands to read."),
    "replay": Verb("archipelago.ops.experiments.replay", "ReplayOptions", "Merge a recorded run again."),
    "chaos": Verb("archipelago.ops.chaos.main", "ChaosOptions", "Train through injected faults and report."),
    "bench": Group("archipelago.ops.bench", "Measure loss, speed, memory and traffic; run studies."),
    "simulate": Group("archipelago.ops.simulation", "Plan a run; the paper's tables of failures and links."),
}


def run(args: Sequence[str], begin: Callable[[], None] = verbs.nothing) -> int:
    """Run the verb that `args` begins with, and return its exit status. `begin` is called once its code is loaded."""
    if list(args) in (["--version"], ["version"]):
        return _print_version()
    return verbs.run("archipelago", SUMMARY, VERBS, args, begin)


def _print_version() -> int:
    from importlib.metadata import version

    sys.stdout.write(f"archipelago {version('archipelago-train')}\n")
    return 0
