"""`archipelago status`: who is alive, who takes part, how stale; once."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from archipelago.broker.process import RunAddress, print_json
from archipelago.ops.watch.formatting import render
from archipelago.ops.watch.health import as_json, situation, trouble
from archipelago.ops.watch.run_view import observe


@dataclass(frozen=True)
class StatusOptions(RunAddress):
    """Show a run: its islands, its rounds, its books, who serves it, what is steered. Starts in a blink.

    Only reads. For scripts: ends with 0 when the run is fine, has ended or is paused, and with 1 when no island is
    live, or nothing was merged for over a minute (for three strides, where islands are slower than that).
    """

    json: bool = False
    """print one JSON object"""


def main(options: StatusOptions) -> int:
    """One reading."""
    transport = options.connect()
    manifest = transport.manifest()
    view, found = observe(transport, manifest), situation(transport)
    wrong = trouble(view, found, manifest.config.sync.interval)
    if options.json:
        print_json(as_json(view, found, wrong))
    else:
        Console(highlight=False).print(render(view, found, wrong))
    return 1 if wrong else 0
