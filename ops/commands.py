"""The command line: the table of verbs, and how a verb is found and run. Its module is imported only when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from archipelago.broker.files import require_local
from archipelago.ops.settings import config_file

Options = TypeVar("Options")

#: How options are shown: `[URL]` in place of `[{None}|STR]`.
READABLE = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
#: The words about an option without a default, also where they are broken over two lines of a frame.
_NO_DEFAULT = re.compile(r"\(default:[ │|\n]+None\)")


class Verb(NamedTuple):
    """A verb, with its summary, which the list of verbs shows without loading its code."""

    place: str
    summary: str

    @property
    def module(self) -> Any:
        """Its module, which has `main(options) -> int`."""
        return importlib.import_module(f"archipelago.{self.place.partition(':')[0]}")

    @property
    def options(self) -> Any:
        """The dataclass of its options, whose docstring is the verb's help."""
        return getattr(self.module, self.place.partition(":")[2])


class VerbGroup(NamedTuple):
    """A verb that consists of several verbs, with one line for the list of verbs."""

    verbs: Mapping[str, Verb]
    summary: str


Verbs = Mapping[str, Verb | VerbGroup]

SUMMARY = "Train one model over islands that share nothing but a Redis."

_BENCH: Mapping[str, Verb] = {
    "parity": Verb("ops.experiments.parity:ParityOptions", "Loss of islands and of data-parallel."),
    "study": Verb("ops.experiments.study:StudyOptions", "A grid of trials, and its results."),
    "wire": Verb("ops.bench.wire:WireOptions", "Payloads through Redis, against bare sockets."),
    "merge": Verb("ops.bench.merge:MergeOptions", "What a contribution of many islands costs."),
    "sync": Verb("ops.bench.sync:SyncOptions", "One outer synchronisation, against torchft's."),
    "accelerator": Verb("ops.bench.accelerator:AcceleratorOptions", "What an island costs on this device."),
    "largest": Verb("ops.bench.largest:LargestOptions", "The largest model that this machine can sync."),
}
_SIMULATE: Mapping[str, Verb] = {
    "plan": Verb("ops.simulation.plan:PlanOptions", "Choose M, H, P and codec for a run, on one page."),
    "tables": Verb("ops.simulation.tables:TablesOptions", "The paper's tables beside this model's."),
}
#: The verbs under their headings in `--help`.
GROUPS: Mapping[str, Verbs] = {
    "Train": {
        "up": Verb("ops.launch.up:UpOptions", "Train on this machine: Redis, merger, islands, report."),
        "init": Verb("ops.launch.init:InitOptions", "Create a run in a Redis."),
        "island": Verb("islands.main:IslandOptions", "Join a run and train."),
        "merger": Verb("merger.main:MergerOptions", "Serve a run: merge what its islands send."),
        "prepare": Verb("ops.launch.prepare:PrepareOptions", "Make a corpus ready for islands to read."),
    },
    "Watch": {
        "status": Verb("ops.watch.status:StatusOptions", "Show a run, once or live with --watch."),
        "dash": Verb("ops.dashboard.main:DashOptions", "Show a run live in the browser."),
        "runs": Verb("ops.watch.run_list:RunsOptions", "List the runs of a Redis and of a folder."),
        "report": Verb("ops.watch.report:ReportOptions", "Write a run's figures into one HTML file."),
    },
    "Operate": {
        "steer": Verb("ops.watch.steer:SteerOptions", "Change the settings of a running run."),
        "invite": Verb("ops.launch.invite:InviteOptions", "Give a member of a run its own credentials."),
        "revoke": Verb("ops.launch.invite:RevokeOptions", "End a membership of a run."),
        "doctor": Verb("ops.watch.doctor.main:DoctorOptions", "Check this machine and the Redis."),
        "rm": Verb("ops.launch.rm:RmOptions", "Delete a run."),
        "completion": Verb("ops.completion:CompletionOptions", "Print completions for bash or zsh."),
    },
    "Model": {
        "export": Verb("ops.weights.export:ExportOptions", "Write the merged model as safetensors."),
        "serve-weights": Verb(
            "ops.weights.serving:ServeWeightsOptions", "Keep a folder with the newest weights of a run."
        ),
        "generate": Verb("ops.weights.generate:GenerateOptions", "Continue a prompt with a run's model."),
    },
    "Research": {
        "replay": Verb("ops.experiments.replay:ReplayOptions", "Merge a recorded run again."),
        "chaos": Verb("ops.chaos.main:ChaosOptions", "Train through injected faults and report."),
        "bench": VerbGroup(_BENCH, "Measure loss, speed, memory and traffic; run studies."),
        "simulate": VerbGroup(_SIMULATE, "Plan a run; the paper's tables of failures."),
    },
}
VERBS: Verbs = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}

#: The examples at the end of the `--help` of the verb that they begin with. A test parses each.
EXAMPLES = {
    "archipelago up": "Train the smallest model on this machine, with three islands.",
    "archipelago up --run mine --islands 2 --data.corpus mine --inner.steps 3000": "Train on your own text.",
    "archipelago up --task docs/examples/task_bytes.py --run bytes": "Train a model of your own, from a file.",
    "archipelago up --run mine --resume": "Continue from the newest checkpoint after the Redis was lost.",
    "archipelago up --run shared --open": "Let other machines join, over TLS and with invitations.",
    "archipelago init redis://HOST:6379 --run demo --model.size small": "Create a run in a Redis.",
    "archipelago init --run bytes --task docs/examples/task_bytes.py": "Create a run that trains a task of yours.",
    "archipelago init --run tuned --from demo-llama --data.corpus mine": "Begin with the weights of an export.",
    "archipelago island demo.oslo.join": "Join with a join file that `archipelago invite` made.",
    "archipelago island --run bytes --task docs/examples/task_bytes.py": "Train the task of the run.",
    "archipelago island --run demo --coordinator node0:9000 --hosts 2 --host-rank 1": "Be the second host of one.",
    "archipelago merger demo.merger.join": "Serve the run demo. The second one stands by.",
    "archipelago merger --run demo --resume": "Restore the run from its checkpoints if the Redis has lost it.",
    "archipelago merger --run demo --bucket s3://my-bucket/runs": "Copy the checkpoints to a bucket.",
    "archipelago status --run demo": "Show the run once. The exit status is 1 while the run suffers.",
    "archipelago status --run demo --watch": "Show it live.",
    "archipelago runs": "List the runs at $ARCHIPELAGO_URL and those in the folder runs/.",
    "archipelago runs redis://HOST:6379 --json": "List the runs of a Redis for a program.",
    "archipelago completion bash": "Print the script, for the file from which your shell reads it.",
    "archipelago rm old runs/old/admin.join": "Delete the keys of the run old, after you typed its name.",
    "archipelago rm old redis://HOST:6379 --yes": "Delete it without a question, for scripts.",
    "archipelago dash --run demo": "Serve the page of the run on this machine.",
    "archipelago dash --host 0.0.0.0 --port 8080": "Serve the page to other machines.",
    "archipelago steer --run demo": "Show what is set.",
    "archipelago steer outer.learning_rate=0.5 sync.quorum=2": "Change two settings from the next round on.",
    "archipelago steer merging=paused": "Pause merging; `merging=` resumes it.",
    "archipelago invite oslo --run demo": "Make a user and a join file for the island oslo.",
    "archipelago invite eyes --role viewer": "Let somebody look.",
    "archipelago invite": "List the members.",
    "archipelago revoke oslo --run demo": "End the membership of the island oslo at once.",
    "archipelago doctor demo.oslo.join": "Check this site before it joins.",
    "archipelago doctor": "Check only this machine.",
    "archipelago report demo": "Write the report of the run in runs/demo.",
    "archipelago report demo.oslo.join --out demo.html": "Write that of a run at a Redis.",
    "archipelago export runs/demo --out demo-llama": "Write the newest parameters as a Llama.",
    "archipelago export redis://HOST:6379 --run demo --out demo-llama": "Write the newest parameters of a run.",
    "archipelago serve-weights weights/ redis://HOST:6379 --run demo": "Hand each version on to inference engines.",
    "archipelago generate demo --prompt 'def main(' --tokens 200": "Continue a prompt with the run in runs/demo.",
    "archipelago generate redis://HOST:6379 --run demo": "Sample from a run that trains now.",
    "archipelago prepare notes/ --name mine": "Make a corpus of the text files in a folder.",
    "archipelago prepare notes/ --name mine-tokens --tokenizer tokenizer.json": "Store it as tokens of a tokenizer.",
    "archipelago replay demo": "Merge the recorded run again, and compare every digest.",
    "archipelago chaos --seconds 120 --islands 4": "Train for two minutes while processes are killed.",
    "archipelago chaos --task docs/examples/task_bytes.py": "Kill processes that train a task of yours.",
    "archipelago bench parity --trials parallel islands": "Compare with data-parallel training, in minutes.",
    "archipelago bench parity --model.size base --minutes 8": "Try some ways to merge; again, and try the rest.",
    "archipelago bench parity --trials jax pytorch jax-pytorch --islands 2": "Train a Llama in PyTorch as well.",
    "archipelago bench study isotropic --show": "Show the table of a study.",
    "archipelago bench wire --quick": "Measure payloads through Redis on this machine.",
    "archipelago bench merge --quick": "Measure a merger with few and many islands.",
    "archipelago bench sync --quick": "Measure one synchronisation.",
    "archipelago bench accelerator --quick": "Try the table of an accelerator on any machine.",
    "archipelago bench largest --quick": "Send a large model through Redis.",
    "archipelago simulate plan --sites 3 --link-mbits 200": "Plan a run over three sites.",
    "archipelago simulate tables --days 2": "Compare with the published tables.",
}


def run(args: Sequence[str], begin: Callable[[], None] = lambda: None) -> int:
    """Run the verb that `args` begins with, and return its exit status.

    `begin` is called once its code is loaded and its options are read, before it runs.
    """
    if list(args) in (["--version"], ["version"]):
        sys.stdout.write(f"archipelago {importlib.metadata.version('archipelago-train')}\n")
        return 0
    program, summary, verbs = "archipelago", SUMMARY, VERBS
    if len(args) > 1 and args[0] == "help":
        args = [*args[1:], "--help"]
    while args and args[0] in verbs:
        verb, program, args = verbs[args[0]], f"{program} {args[0]}", args[1:]
        if isinstance(verb, Verb):
            options = parse(verb.options, program, args)
            begin()
            return int(verb.module.main(options))
        verbs, summary = verb
    return _overview(program, summary, verbs, args)


def parse(options_type: type[Options], program: str, args: Sequence[str]) -> Options:
    """Return the options that `args` state. A file named with `--config` supplies the defaults of the settings."""
    with _readable_help(program):
        options: Options = tyro.cli(
            options_type, prog=program, args=list(args), config=READABLE, **_defaults(options_type, args)
        )
    for each in dataclasses.fields(options_type):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if isinstance(value, Path):
            require_local(value, f"--{each.name.strip('_').replace('_', '-')}")
    return options


@contextlib.contextmanager
def _readable_help(program: str) -> Iterator[None]:
    """Print the help that the block prints, if it does: without defaults that say nothing, and with examples."""
    # The library draws frames only for an output that says that it can show them.
    shown = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding or "utf-8", newline="", write_through=True)
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        shown.seek(0)
        if text := shown.read():
            lines = [f"  $ {command}\n      {what}\n" for command, what in examples_of(program).items()]
            sys.stdout.write("".join([_without_none(text), *(["\nexamples:\n"] if lines else []), *lines]))


def examples_of(program: str) -> dict[str, str]:
    """Return the examples of a verb, such as `archipelago bench sync`."""
    return {command: what for command, what in EXAMPLES.items() if f"{command} ".startswith(f"{program} ")}


def _without_none(text: str) -> str:
    """Remove the words `(default: None)` from a help text. What is not set has its default in its description.

    The words become spaces, because the text lies in a frame; a line that then is empty is left out.
    """
    blank = _NO_DEFAULT.sub(lambda found: re.sub(r"\(default:|None\)", lambda word: " " * len(word[0]), found[0]), text)
    blank = blank.replace("show this help message and exit", "Show this help message and end.")
    both = zip(text.splitlines(), blank.splitlines(), strict=True)
    return "".join(f"{line}\n" for before, line in both if line == before or line.strip(" │|"))


def _defaults(options_type: type[Any], args: Sequence[str]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(options_type)}
    if "settings" not in names or "config" not in names:
        return {}
    required = [f for f in dataclasses.fields(options_type) if f.default is f.default_factory is dataclasses.MISSING]
    missing = {f.name: tyro.MISSING for f in required}
    own, given = options_type(**missing), config_file(args)
    return {"default": dataclasses.replace(own, settings=given) if given else own}


def _overview(program: str, summary: str, verbs: Verbs, args: Sequence[str]) -> int:
    """Print the list of verbs: on standard output if the user asked for it, otherwise as part of an error."""
    asked = not args or args[0] in ("-h", "--help", "help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        near = difflib.get_close_matches(args[0], [*verbs, "--help", "--version"], 1)
        if near:
            out.write(f"error: there is no verb {args[0]!r}. Did you mean `{program} {near[0]}`?\n")
            return 2
        out.write(f"error: there is no verb {args[0]!r}. Choose one of these:\n\n")
    out.write(f"usage: {program} VERB [OPTIONS]\n\n{summary}\n\n")
    width = max(10, 2 + max(map(len, verbs)))
    for heading, group in (GROUPS if verbs is VERBS else {"": verbs}).items():
        lines = "".join(f"  {name:<{width}}{verb.summary}\n" for name, verb in group.items())
        out.write(f"{heading}:\n{lines}\n" if heading else lines)
    out.write(f"`{program} VERB --help` lists the options of a verb, with examples.\n")
    if not asked:
        out.write(f"`{program} --help` shows this list.\n")
    return 0 if asked else 2
