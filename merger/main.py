"""`archipelago merger` and `python -m merger`: serves a run; a second one stands by until the first is gone."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass

import tyro

from broker.process import RunAddress, guarded, keep_compiled, log_to_stderr, print_json, stop_on_signals

LINGER_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergerOptions(RunAddress):
    """Serve a run: merge what the islands send. Runs on the CPU; a second merger waits until the first is gone."""

    json: bool = False
    """print one JSON object at the end"""


def main(options: MergerOptions) -> int:
    """Serves until a signal, or until another merger has taken over."""
    stopped = stop_on_signals()
    log_to_stderr("merger")
    transport = options.connect()
    transport.manifest()  # before JAX loads: a wrong name is answered at once
    keep_compiled()
    os.environ["JAX_PLATFORMS"] = "cpu"  # the accelerators belong to the islands

    from merger.service import Merger, serve

    merger = Merger(transport, linger_seconds=LINGER_SECONDS)
    serve(merger, stopped)
    log.info("leaves after round %s", merger.rounds.closed)
    if options.json:
        print_json({"run": transport.run, "round": merger.rounds.closed, "merged": transport.books().merged})
    return 0


def entry() -> int:
    """`python -m merger`."""
    return guarded(lambda: main(tyro.cli(MergerOptions, args=sys.argv[1:])))
