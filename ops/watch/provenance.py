"""Where the figures of a report come from: times, baseline, machines, versions, and how to repeat the run. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, TapeEntry
from archipelago.ops.settings import flags
from archipelago.ops.watch.formatting import ago, date, number
from archipelago.ops.watch.run_summary import syncs_in_words
from archipelago.ops.watch.run_view import RunView


def provenance(
    manifest: Manifest, view: RunView, tape: Sequence[TapeEntry], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `sections`, facts in words by section and name, and `commands`, a shell script that repeats the run.

    `tape` has all rounds that are still known, and `report` is the run's report.json, empty if there is none.
    """
    islands = view.known or int(report.get("islands") or 0)
    sections = {
        "Run": {"config digest": manifest.config.digest(), **_times(tape, view.evaluations, report)},
        "Result": {**_baseline(report), "syncs": syncs_in_words(view)},
        "Machines": _machines(view),
        "Changed while it ran": {f"round {e.round}": e.steered for e in tape if e.steered},
    }
    return {
        "sections": {title: facts for title, facts in sections.items() if facts},
        "commands": commands(manifest, islands, [e for e in tape if e.steered]),
    }


def _times(tape: Sequence[TapeEntry], evaluations: Sequence[Evaluation], report: Mapping[str, Any]) -> dict[str, str]:
    """Return when the run began and ended, as far as its rounds and evaluations tell."""
    recorded = [entry.unix_seconds for entry in tape] + [evaluation.unix_seconds for evaluation in evaluations]
    moments = [moment for moment in recorded if moment > 0]
    if not moments:
        return {}
    found = {
        "first record": date(min(moments)),
        "last record": date(max(moments)),
        "duration": f"{ago(max(moments) - min(moments))}, pauses included",
    }
    trained, speed = (float(report.get(key) or math.nan) for key in ("seconds", "tokens_per_second"))
    if trained > 0:
        found["last session"] = f"{ago(trained)}, {number(speed, 0)} tokens/s in all"
    return found


def _baseline(report: Mapping[str, Any]) -> dict[str, str]:
    single, curve = float(report.get("held_out_one_process") or math.nan), report.get("curve_one_process")
    if math.isnan(single) or not curve:
        return {"baseline": "not measured"}
    last = float(report.get("held_out_last") or math.nan)
    return {
        "baseline": f"{number(single, 4)}: one process that trained on {int(curve[-1][0]):,} tokens",
        "relative to it": f"{100 * (last / single - 1):+.2f} %",
    }


def _machines(view: RunView) -> dict[str, str]:
    """Return what each host is and which islands trained on it."""
    hosts: dict[str, list[str]] = {}
    for island in view.islands:
        hosts.setdefault(island.host, []).append(f"{island.name} on {island.device}")
    described = {island.host: island.machine for island in view.islands if island.machine}
    return {host: "; ".join(filter(None, (described.get(host), ", ".join(on)))) for host, on in hosts.items()}


def commands(manifest: Manifest, islands: int, steered: Sequence[TapeEntry]) -> str:
    """Return a shell script that repeats the run of our own islands, without addresses and passwords."""
    from archipelago.islands.data.corpus import KNOWN

    if manifest.task or manifest.config.has_user_loops:
        what = f"the task {manifest.task!r}" if manifest.task else "training scripts of its users"
        return f"# The islands of this run were {what}: start them again, with another name for the run.\n"
    name, corpus = shlex.quote(f"{manifest.run}-again"), manifest.corpus
    again = corpus.name if corpus.name in KNOWN else f"FILE_OR_FOLDER --name {corpus.name}"
    config = "".join(f" {shlex.quote(word)}" for word in flags(manifest.config))
    weights = manifest.versions.get("weights", "").rpartition(" ")[0]  # The digest follows the name.
    config += f" --from {shlex.quote(weights)}" if weights else ""
    versions = ", ".join(f"{package} {manifest.versions.get(package, '')}" for package in ("archipelago-train", "jax"))
    tokenizer = f", and its tokenizer {corpus.tokenizer}" if corpus.tokenizer else ""
    lines = [
        f"# {versions}; several machines: `archipelago init` with the same settings, `merger`, and `island` on each",
        f"archipelago prepare {again}   # its digest must be {corpus.digest}{tokenizer}",
        f"archipelago up --run {name} --islands {max(1, islands)}{config}",
        *(f"archipelago steer runs/{name}/admin.join {entry.steered}   # at round {entry.round}" for entry in steered),
    ]
    return "\n".join(lines) + "\n"
