"""`archipelago bench sync`: one outer synchronisation of a whole model, from publishing to adoption, against torchft's.

Islands, merger and Redis are the real ones, each a process; a random walk replaces the inner steps. Both systems
take turns in the same run, so that other work on the machine slows both. The torchft side runs in another
Python environment (the head of `torchft.py` says how to make one). Without it, its rows name the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from archipelago.broker.errors import BrokerError
from archipelago.ops.bench.output import OutputOptions, compared, finish, taking_turns
from archipelago.ops.bench.two_islands import (
    FRAGMENTS,
    PARAMETERS,
    PATIENCE_SECONDS,
    TENSORS,
    WIRE,
    Rule,
    Synced,
    SyncSize,
    TwoIslands,
    two_islands,
)
from archipelago.ops.launch.supervisor import Child
from archipelago.ops.settings import say

TORCHFT_PYTHON = "ARCHIPELAGO_TORCHFT_PYTHON"
#: It runs in a Python environment that has torchft.
SCRIPT = Path(__file__).with_name("torchft.py")
END_SECONDS = 10.0
QUICK = SyncSize(rounds=3)
#: Rounds at the beginning that do not count.
WARM_UPS = 2


@dataclass(frozen=True)
class SyncOptions(OutputOptions):
    """Measure one outer synchronisation of 10 M parameters on loopback, against torchft's."""

    torchft_python: str = ""
    """A Python that has torchft (the head of `ops/bench/torchft.py` says how to make it). The default is
    $ARCHIPELAGO_TORCHFT_PYTHON.
    """
    quick: bool = False
    """Play fewer rounds."""
    rule: Rule = "isotropic"
    """The merge rule. torchft's is `average`."""
    merger_rtt_ms: float = 0.0
    """The round trip between the merger and Redis, in milliseconds: a merger should be close to its Redis."""
    pieces: bool = False
    """Show where the time of a sync on loopback goes, instead of a comparison."""
    parameters: int = PARAMETERS
    """How many elements the model has."""


def main(options: SyncOptions) -> int:
    """Measure, and write the results."""
    size = replace(
        QUICK if options.quick else SyncSize(),
        rule=options.rule,
        pieces=options.pieces,
        merger_rtt_ms=options.merger_rtt_ms,
        parameters=options.parameters,
    )
    if options.pieces:
        return finish("sync-pieces", in_pieces(size), options)
    return finish("sync", sync(options.torchft_python, size), options)


def in_pieces(size: SyncSize) -> dict[str, Any]:
    """Measure where the time of a sync goes.

    Returns:
        Plain data with `rows`: for each piece of the merger and of one island, the calls, the milliseconds and the
        milliseconds of processor time of a sync, and the milliseconds as a share of a sync. Pieces of several threads
        and processes run at the same time.
    """
    with two_islands(size) as ours:
        for _ in range(WARM_UPS):
            ours.sync()
        before = ours.spent()
        seconds = statistics.fmean(ours.sync().seconds for _ in range(size.rounds))
        after = ours.spent()
    say(f"a sync takes {seconds:.3f} s, mean of {size.rounds}")
    rows = []
    for process, earlier, later in zip(("merger", "island"), before, after, strict=True):
        for piece, spent in later.items():
            calls, wall, cpu = (each / size.rounds for each in spent - earlier[piece])
            rows.append({
                "process": process, "piece": piece, "calls": calls, "ms": 1e3 * wall, "cpu_ms": 1e3 * cpu,
                "share": wall / seconds,
            })  # fmt: skip
    return {"parameters": sum(tensor.size for tensor in size.tensors), "seconds": seconds, "rows": rows}


def sync(torchft_python: str, size: SyncSize) -> dict[str, Any]:
    """Measure both systems.

    Returns:
        Plain data with `rows`. `seconds` are medians over syncs, from the start of the first process to the end of the
        last one; `MB` is the traffic of one process in a sync, both ways; `speed_to_torchft` is the median ratio of
        torchft's seconds to ours, round by round. `committed` counts the syncs in which both processes took part.
    """
    python = torchft_python or os.environ.get(TORCHFT_PYTHON, "")
    with two_islands(size) as ours, Torchft(size, python) as theirs:
        rows = _turns(size, ours, theirs)
    return {
        "parameters": sum(tensor.size for tensor in size.tensors),
        "fragments": FRAGMENTS,
        "codecs": f"{WIRE.up} up, {WIRE.down} down; torchft float32",
        "rows": rows,
    }


def _turns(size: SyncSize, ours: TwoIslands, theirs: Torchft) -> list[dict[str, Any]]:
    """Let both systems sync in turn."""
    sides: list[Callable[[], Synced]] = [ours.sync, theirs.sync] if not theirs.reason else [ours.sync]
    mine, *others = taking_turns(sides, size.rounds, WARM_UPS)
    rows = [_row("archipelago", mine)]
    say(f"{rows[0]['seconds']:.3f} s a sync, median of {size.rounds}")
    if not others:
        missing = _row("torchft", [Synced(math.nan, committed=False)], theirs.reason)
        return [*rows, {**missing, "committed": "not run"}]
    rows[0]["speed_to_torchft"] = compared([each.seconds for each in others[0]], [each.seconds for each in mine]).ratio
    return [*rows, _row(theirs.name, others[0])]


def _row(what: str, syncs: Sequence[Synced], note: str = "") -> dict[str, Any]:
    seconds = [s.seconds for s in syncs]
    return {
        "what": what,
        "seconds": statistics.median(seconds),
        "from": min(seconds),
        "to": max(seconds),
        "committed": f"{sum(s.committed for s in syncs)} of {len(syncs)}",
        "MB": round(statistics.median(s.megabytes for s in syncs), 1),
        "speed_to_torchft": math.nan,
        "note": note,
    }


# -- torchft's side ----------------------------------------------------------------------------------------------------


class Torchft:
    """Two replicas and a lighthouse in another Python environment, in its `with` block.

    Args:
        size: The number and the shapes of the tensors.
        python: Path of a Python that has torchft; empty for none.

    Attributes:
        name: torchft, with its version if it runs.
        reason: Why it cannot sync; empty if it can.
    """

    def __init__(self, size: SyncSize, python: str) -> None:
        options = json.dumps({"tensors": TENSORS, "shape": size.shape, "timeout_seconds": PATIENCE_SECONDS})
        self.name, self.reason = "torchft", f"no environment: give --torchft-python, or ${TORCHFT_PYTHON}"
        self._folder = tempfile.TemporaryDirectory()
        # -P: without it, Python would put the folder of the script, and so our modules, before its own packages.
        self._child = Child(
            "torchft", [str(SCRIPT), options], {}, Path(self._folder.name) / "torchft.log", program=[python, "-P"],
            is_piped=True,
        )  # fmt: skip
        self._has_python = bool(python)

    def __enter__(self) -> Self:
        if self._has_python:
            self._child.launch()
            found = self._answer("")
            self.name = f"torchft {found.get('torchft', '')}".strip()
            self.reason = f"{found['error']} ({self._child.last_words():.200})" if "error" in found else ""
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close_pipes()  # Its replicas end when its standard input does.
        self._child.wait(END_SECONDS)
        self._folder.cleanup()

    def sync(self) -> Synced:
        """Synchronise all parameters once. Raise BrokerError if the process ends instead."""
        found = self._answer("\n")
        if "seconds" not in found:
            raise BrokerError(
                f"torchft ended: {found['error']}",
                "Leave --torchft-python out to measure without it.",
                code="bench.process-failed",
            )
        return Synced(found["seconds"], found["committed"])

    def _answer(self, line: str) -> dict[str, Any]:
        """Send the process a line and return its next answer, or an `error` if it has ended."""
        process = self._child.process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line.encode())
            process.stdin.flush()
        answer = process.stdout.readline()
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError:
            return {"error": f"it answered {answer!r:.80}" if answer else f"it ended with status {process.wait()}"}
        return found
