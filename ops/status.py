"""`archipelago status`: who is alive, who takes part, how stale; once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console

from broker.process import connect_to, print_json
from ops.show import render
from ops.view import observe


@dataclass(frozen=True)
class StatusOptions:
    """Show a run: its islands, its rounds, its books. Reads Redis only; starts in a blink."""

    url: Annotated[str | None, tyro.conf.Positional] = None
    """redis://HOST:PORT, rediss://… or unix://…; default $ARCHIPELAGO_URL"""
    run: str | None = None
    """name of the run; default $ARCHIPELAGO_RUN, or the only run there"""
    json: bool = False
    """print one JSON object"""


def main(options: StatusOptions) -> int:
    """One reading."""
    transport = connect_to(options.url, options.run)
    view = observe(transport, transport.manifest())
    if options.json:
        print_json(asdict(view))
    else:
        Console(highlight=False).print(render(view))
    return 0
