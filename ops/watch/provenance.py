"""Where the figures of a report come from: settings, times, baseline, machines, versions, and how to repeat the run."""

from __future__ import annotations

import base64
import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from archipelago.broker.config import RunConfig, flat
from archipelago.broker.manifest import Manifest
from archipelago.broker.messages import Evaluation, TapeEntry
from archipelago.ops.settings import flags, setting_text
from archipelago.ops.watch.formatting import date, hours, number, size
from archipelago.ops.watch.run_summary import syncs_in_words
from archipelago.ops.watch.run_view import RunView


@dataclass(frozen=True)
class Provenance:
    """Everything that a reader of a report needs to judge and to repeat the run.

    Attributes:
        sections: Facts in words, by section and by name.
        settings: All settings of the run as text.
        changed: The settings that differ from the defaults.
        commands: A shell script that repeats the run.
        picture: The loss curve with the baseline, as PNG; empty if there is none.
    """

    sections: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, str]
    changed: Sequence[str]
    commands: str
    picture: bytes = b""

    def as_data(self) -> dict[str, Any]:
        """Return the facts for JSON, without the picture."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if name != "picture"}


def provenance(
    manifest: Manifest,
    view: RunView,
    tape: Sequence[TapeEntry],
    evaluations: Sequence[Evaluation],
    report: Mapping[str, Any],
    picture: bytes = b"",
) -> Provenance:
    """Collect the facts. Pure.

    Args:
        manifest: The run's manifest.
        view: The run as it is now.
        tape: All rounds that are still known, oldest first.
        evaluations: All evaluations, oldest first.
        report: The run's report.json; empty if there is none.
        picture: The run's loss.png; empty if there is none.
    """
    settings, defaults = flat(manifest.config), flat(RunConfig())
    machines, islands = _machines(view), view.known or int(report.get("islands") or 0)
    return Provenance(
        sections={
            "Run": _run(manifest, view) | _times(tape, evaluations, report),
            "Result": _result(view, report) | {"syncs": syncs_in_words(view)},
            "Machines": machines,
            "Versions": dict(manifest.versions),
            "Changed while it ran": {f"round {e.round}": e.steered for e in tape if e.steered},
        },
        settings={key: setting_text(value) for key, value in settings.items()},
        changed=[key for key, value in settings.items() if value != defaults[key]],
        commands=commands(manifest, islands, len(machines), [e for e in tape if e.steered]),
        picture=picture if report.get("curve_one_process") else b"",  # Without a baseline, the page's chart has it all.
    )


def _run(manifest: Manifest, view: RunView) -> dict[str, str]:
    corpus = manifest.corpus
    model = manifest.config.model.size
    known = f"{corpus.name}, {corpus.bytes:,} bytes, digest {corpus.digest}"
    return {
        "run": view.run,
        "model": f"{model}, {view.size}",
        "corpus": known if corpus.name else "that of its task" if manifest.task else "that of its users' scripts",
        **({"tokenizer": f"digest {corpus.tokenizer}, {corpus.tokens:,} tokens"} if corpus.tokenizer else {}),
        "config digest": manifest.config.digest(),
        "progress": f"step {view.step:,} of {view.steps:,}, round {view.rounds:,}",
        "tokens": f"{view.tokens_trained:,} trained, {view.tokens_merged:,} merged, {view.tokens_lost:,} lost",
        "traffic": f"{size(view.bytes_up)} up, {size(view.bytes_down)} down",
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
        "duration": f"{hours(max(moments) - min(moments))}, pauses included",
    }
    trained, speed = (float(report.get(key) or math.nan) for key in ("seconds", "tokens_per_second"))
    if trained > 0:
        found["last session"] = f"{hours(trained)}, {number(speed, 0)} tokens/s in all"
    return found


def _result(view: RunView, report: Mapping[str, Any]) -> dict[str, str]:
    unit = view.unit
    found = {
        f"held-out {unit}": f"{number(view.held_out_first, 4)} at the first evaluation, "
                            f"{number(view.held_out_last, 4)} at the last",
        f"training {unit}": number(view.loss, 4),
    }  # fmt: skip
    single, curve = float(report.get("held_out_one_process") or math.nan), report.get("curve_one_process")
    if math.isnan(single) or not curve:
        found["baseline"] = "not measured"
        return found
    last = float(report.get("held_out_last") or math.nan)
    found["baseline"] = f"{number(single, 4)}: one process that trained on {int(curve[-1][0]):,} tokens"
    found["relative to it"] = f"{100 * (last / single - 1):+.2f} %"
    return found


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
    if manifest.config.has_own_loops:
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


# -- the part of the page that says it -------------------------------------------------------------------------------


def cards(found: Provenance) -> str:
    """Return the sections as HTML. All text in them is escaped."""
    facts = "".join(_facts(title, rows) for title, rows in found.sections.items() if rows)
    picture = ""
    if found.picture:
        data = base64.b64encode(found.picture).decode()
        picture = (
            f'<div><h3>Loss and baseline</h3><img alt="Loss and baseline" src="data:image/png;base64,{data}"></div>'
        )
    settings = "".join(_setting(key, value, key in found.changed) for key, value in found.settings.items())
    return (
        f'<section class="card" aria-label="About this run"><div class="head"><h2>About this run</h2></div>'
        f'<div class="facts">{facts}{picture}</div></section>\n'
        f'<section class="card" aria-label="Settings"><div class="head"><h2>Settings</h2>'
        f'<p class="sub">{len(found.changed)} differ from the defaults, in bold</p></div>'
        f'<dl class="all-settings">{settings}</dl></section>\n'
        f'<section class="card" aria-label="Repeat this run"><div class="head"><h2>Repeat this run</h2></div>'
        f'<pre class="script">{escape(found.commands)}</pre></section>\n'
    )


def _facts(title: str, rows: Mapping[str, str]) -> str:
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f"<div><h3>{escape(title)}</h3><dl>{inner}</dl></div>"


def _setting(key: str, value: str, changed: bool) -> str:
    mark = ' class="changed"' if changed else ""
    return f"<div{mark}><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
