"""`archipelago status`: who is alive, who takes part, how stale; once."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Console

from broker.process import RunAddress, print_json
from ops.show import render
from ops.view import observe


@dataclass(frozen=True)
class StatusOptions(RunAddress):
    """Show a run: its islands, its rounds, its books. Reads Redis only; starts in a blink."""

    json: bool = False
    """print one JSON object"""


def main(options: StatusOptions) -> int:
    """One reading."""
    transport = options.connect()
    view = observe(transport, transport.manifest())
    if options.json:
        print_json(asdict(view))
    else:
        Console(highlight=False).print(render(view))
    return 0
