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
    manifest: Manifest,
    view: RunView,
    tape: Sequence[TapeEntry],
    report: Mapping[str, Any],
) -> dict[str, Any]:
    """Return `sections`, facts in words by section and name, and `commands`, a shell script that repeats the run.

    Args:
        manifest: The run's manifest.
        view: The run as it is now.
        tape: All rounds that are still known, oldest first.
        report: The run's report.json; empty if there is none.
    """
    machines, islands = _machines(view), view.known or int(report.get("islands") or 0)
    sections = {
        "Run": {"config digest": manifest.config.digest(), **_times(tape, view.evaluations, report)},
        "Result": {**_baseline(report), "syncs": syncs_in_words(view)},
        "Machines": machines,
        "Changed while it ran": {f"round {e.round}": e.steered for e in tape if e.steered},
    }
    return {
        "sections": {title: facts for title, facts in sections.items() if facts},
        "commands": commands(manifest, islands, len(machines), [e for e in tape if e.steered]),
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


def commands(manifest: Manifest, islands: int, hosts: int, steered: Sequence[TapeEntry]) -> str:
    """Return a shell script that repeats the run, without addresses and passwords.

    Args:
        manifest: The run's manifest.
        islands: The number of islands.
        hosts: The number of machines that they ran on.
        steered: The rounds from which on an operator changed settings.
    """
    from archipelago.islands.data.corpus import KNOWN

    if manifest.task:
        return (
            f"# The islands of this run trained the task {manifest.task!r}. Start it again from its file:\n"
            f"# archipelago up --run {shlex.quote(f'{manifest.run}-again')} --task FILE.py:NAME, with its settings.\n"
        )
    if manifest.config.has_user_loops:
        return (
            "# The islands of this run were training scripts of its users: start them again, with another name for\n"
            "# the run. Its settings are those of `archipelago.create`.\n"
        )
    name, corpus = shlex.quote(f"{manifest.run}-again"), manifest.corpus.name
    again = corpus if corpus in KNOWN else f"FILE_OR_FOLDER --name {corpus}"
    lines = [
        f"# archipelago-train {manifest.versions.get('archipelago-train', '')}, jax {manifest.versions.get('jax', '')}",
        f"archipelago prepare {again}   # its digest must be {manifest.corpus.digest}",
    ]
    if manifest.corpus.tokenizer:
        lines[1] = f"# The corpus has a tokenizer with the digest {manifest.corpus.tokenizer}.\n{lines[1]}"
    config = "".join(f" {shlex.quote(word)}" for word in flags(manifest.config))
    weights = manifest.versions.get("weights", "").rpartition(" ")[0]  # The digest follows the name.
    config += f" --from {shlex.quote(weights)}" if weights else ""
    if hosts <= 1:
        lines.append(f"archipelago up --run {name} --islands {max(1, islands)}{config}")
    else:
        lines += [
            "export ARCHIPELAGO_URL=rediss://HOST:PORT   # on every machine",
            f"archipelago init --run {name}{config}",
            f"archipelago merger --run {name}   # on one machine",
            f"archipelago island --run {name}   # {islands} islands on {hosts} machines",
        ]
    if steered and hosts <= 1:
        lines.append(f"export ARCHIPELAGO_URL=runs/{name}/admin.join   # then, while it trains:")
    lines += [f"archipelago steer --run {name} {entry.steered}   # at round {entry.round}" for entry in steered]
    return "\n".join(lines) + "\n"
