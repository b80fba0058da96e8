"""`archipelago bench merge`: the merger's processor time for a contribution, in runs with few and with many islands.

`archipelago bench accelerator` measures the pieces of a merge, and spectra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from archipelago.broker.config import InnerConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import Snapshot
from archipelago.broker.wire import pack
from archipelago.ops.bench.harness import child, cpu_seconds, manifest_of, own_run, serve_merger
from archipelago.ops.bench.output import OutputOptions, finish, ratio_row
from archipelago.ops.bench.played import PATIENCE_SECONDS, PlayedIslands

RUN = "bench-merge"
#: The numbers of islands to compare, and the elements of a contribution.
MANY, QUICK_MANY, ELEMENTS = (16, 256), (4, 16), 1 << 14
#: Contributions that are measured, and rounds before them: the merger compiles, and meets the islands.
CONTRIBUTIONS, WARM_UPS = 3072, 3
#: A contribution may cost this share more with many islands.
GOAL = 1.1
#: How much of a contribution is the same in all of them, so that islands agree as honest ones do.
SHARED = 0.7


@dataclass(frozen=True)
class MergeOptions(OutputOptions):
    """Measure what a contribution costs the merger in runs with up to 256 islands."""

    quick: bool = False
    """Use fewer contributions, and at most 16 islands."""


def main(options: MergeOptions) -> int:
    few, many = QUICK_MANY if options.quick else MANY
    contributions = CONTRIBUTIONS // (16 if options.quick else 1)
    rows = many_islands(few, many, ELEMENTS, contributions)
    return finish("merge", {"rows": rows}, options)


def many_islands(few: int, many: int, elements: int, contributions: int) -> list[dict[str, Any]]:
    """Compare the merger's processor time for a contribution between runs of two numbers of islands.

    Merger and Redis are the real ones. This process plays the islands: each claims its name, sends heartbeats, and
    contributes to every round with a payload that was encoded before.
    """
    theirs, mine = (_merger_seconds(islands, elements, max(1, contributions // islands)) for islands in (few, many))
    what = f"a contribution of {elements:,} with {many} islands, merger's processor time, ms"
    return [ratio_row(what, 1e3 * mine, f"with {few} islands", 1e3 * theirs, goal=GOAL)]


def _merger_seconds(islands: int, elements: int, rounds: int) -> float:
    """Return the processor time that a contribution to these rounds takes the merger."""
    config = RunConfig(
        inner=InnerConfig(steps=1 << 30),
        sync=SyncConfig(interval=1, fragments=1, window=1, quorum=islands),
        wire=WireConfig(up="int4", thin="", down="int4"),
    )
    manifest = manifest_of(RUN, config, [Tensor("all", (elements,))], [["all"]])
    zeros = pack(np.zeros(elements, np.float32), "float32", 0)
    with own_run(manifest, [zeros]) as (server, transport), child(serve_merger, server.url, RUN, (), 2) as merger:
        merger.receive(PATIENCE_SECONDS)
        payloads = {f"island-{number:03}": _payload(elements, number) for number in range(islands)}
        played = PlayedIslands(transport, payloads)

        def play(first: int, last: int) -> None:
            """Let all islands contribute to these rounds, and wait until each has closed."""
            for goal in range(first, last + 1):
                played.publish(payloads, sequence=goal, round=goal, base=goal - 1, global_step=goal)
                while played.hear(Snapshot).round < goal:
                    continue

        play(1, WARM_UPS)
        before = cpu_seconds(merger.pid)
        play(WARM_UPS + 1, WARM_UPS + rounds)
        return (cpu_seconds(merger.pid) - before) / (rounds * islands)


def _payload(elements: int, number: int) -> bytes:
    shared_N, own_N = (np.random.default_rng(seed).standard_normal(elements, np.float32) for seed in (0, number + 1))
    return pack(SHARED * shared_N + (1.0 - SHARED) * own_N, "int4", 0)
