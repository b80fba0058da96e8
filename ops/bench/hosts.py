"""`archipelago bench hosts`: what it costs an island to have two hosts.

An island of two processes, connected as two hosts are, and an island of one process with as many devices. Each has its
own run, merger and Redis. The two islands take turns, so that other work on the machine slows both. All devices are
made of CPU cores, and all processes of an island share the same half of the cores, so a step of two processes has no
more processors than one of one process. No network lies between the processes.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from archipelago.broker.config import DataConfig, RunConfig, checked
from archipelago.broker.errors import require_number
from archipelago.broker.machine import LOOPBACK, free_port
from archipelago.broker.process import keep_compiled
from archipelago.islands.hosts.membership import Membership
from archipelago.ops.bench.host_processes import HostTurn, follow_leader, lead_host, take_turns_alone
from archipelago.ops.bench.island import settled
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import Child, child, halves_of_the_cores, keep_to, require_linux
from archipelago.ops.bench.turns import serve_run
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.settings import say

ROUNDS, ROUNDS_QUICK = 5, 3
#: The shortest turn. It takes as many whole intervals as fill this time.
TURN_SECONDS, TURN_SECONDS_QUICK = 4.0, 1.0
HOSTS = 2


@dataclass(frozen=True)
class HostsBenchOptions(OutputOptions):
    """Measure what two hosts cost an island: steps a second, the leader's messages, and syncs, beside one process."""

    quick: bool = False
    """Use the tiny model, and fewer and shorter turns."""
    devices: int = 1
    """The CPU devices of each of the two processes. The one process has twice as many."""
    config: Path | None = None
    """A TOML file with settings. Flags win over it."""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: HostsBenchOptions) -> int:
    """Measure, and write the results."""
    config = checked(options.settings)
    require_number("--devices", options.devices, "Give 1 or more.", "bench.devices", 1)
    keep_compiled()
    return finish("hosts", hosts(config, options.quick, options.devices, say), options)


def hosts(config: RunConfig, quick: bool, devices: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both islands in turn. Return plain data with `rows`."""
    require_linux()
    own_batch = config.data != DataConfig()
    config = settled(config, quick, "cpu")
    if not own_batch:
        config = replace(config, data=replace(config.data, batch_size=HOSTS * devices))
    rounds, seconds = (ROUNDS_QUICK, TURN_SECONDS_QUICK) if quick else (ROUNDS, TURN_SECONDS)
    load = os.getloadavg()[0]
    with _two_processes(config, devices) as two, _one_process(config, devices) as one:
        say(
            f"{HOSTS} processes of {devices} CPU devices and 1 of {HOSTS * devices} take turns, at a load of {load:.1f}"
        )
        slowest = max(two.receive(), one.receive())
        interval = config.sync.interval
        steps = interval * max(1, math.ceil(seconds / (interval * slowest)))
        turns = []
        for number in range(rounds):
            turns.append(tuple(_turn(side, steps) for side in (two, one)))
            own, beside = turns[-1]
            speed = beside.off.seconds / own.off.seconds
            say(f"{number + 1} of {rounds}: {speed:.3f} of the steps a second of one process")
        for side in (two, one):
            side.pipe.send(0)
    found = summary([own for own, _ in turns], [beside for _, beside in turns])
    return {"devices": devices, "load": load, "turn_steps": steps, **found, "rows": rows(found)}


def _turn(side: Child, steps: int) -> HostTurn:
    side.pipe.send(steps)
    found: HostTurn = side.receive()
    return found


@contextmanager
def _run(config: RunConfig) -> Iterator[tuple[str, set[int]]]:
    """Serve a run on one half of the cores. Return its URL and the other half."""
    mine, others = halves_of_the_cores()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        keep_to(others, server.pid)
        held.enter_context(child(serve_run, server.url, config, others)).receive()
        yield server.url, mine


@contextmanager
def _two_processes(config: RunConfig, devices: int) -> Iterator[Child]:
    """Start an island of two processes, and return its leader."""
    place = Membership(LOOPBACK, free_port(2), HOSTS, 0)
    with (
        _run(config) as (url, cores),
        child(lead_host, url, cores, devices, place) as leader,
        child(follow_leader, url, cores, devices, replace(place, rank=1)),
    ):
        yield leader


@contextmanager
def _one_process(config: RunConfig, devices: int) -> Iterator[Child]:
    with _run(config) as (url, cores), child(take_turns_alone, url, cores, HOSTS * devices) as island:
        yield island


def summary(two: list[HostTurn], one: list[HostTurn]) -> dict[str, Any]:
    """Return the figures: medians over rounds.

    Args:
        two: The turns of the island of two processes.
        one: The turns of the island of one process.
    """

    found: dict[str, Any] = {}
    for name, turns in (("two", two), ("one", one)):
        found[f"{name}_steps_a_second_on"] = 1 / statistics.median(turn.on.seconds for turn in turns)
        found[f"{name}_steps_a_second_off"] = 1 / statistics.median(turn.off.seconds for turn in turns)
        for kind in ("seconds", "cpu_seconds"):
            found[f"{name}_{kind}_a_sync"] = statistics.median(
                (getattr(turn.on, kind) - getattr(turn.off, kind)) * turn.steps / turn.syncs for turn in turns
            )
    told = [(turn.off, turn.untold) for turn in two if turn.untold is not None]
    for kind in ("seconds", "cpu_seconds"):
        found[f"untold_step_{kind}"] = statistics.median(getattr(untold, kind) for _, untold in told)
        found[f"boundary_{kind}"] = statistics.median(getattr(off, kind) - getattr(un, kind) for off, un in told)
    found["tell_seconds"] = statistics.median(turn.tell_seconds for turn in two)
    found["tell_seconds_longest"] = max(turn.longest_tell for turn in two)
    found["step_bytes"] = statistics.median(turn.step_bytes for turn in two)
    found["sync_bytes"] = statistics.median(turn.sync_bytes for turn in two)
    return found


def rows(s: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures as a table for people."""

    def row(what: str, ours: float, against: str, theirs: float, ratio: float) -> dict[str, Any]:
        return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio}

    def steps(what: str, which: str) -> dict[str, Any]:
        on, off = s[f"{which}_steps_a_second_on"], s[f"{which}_steps_a_second_off"]
        return row(f"{what}: steps a second", on, "no sync", off, on / off)

    def boundary(what: str, kind: str) -> dict[str, Any]:
        own, step = 1e3 * s[f"boundary_{kind}"], 1e3 * s[f"untold_step_{kind}"]
        return row(f"messages of a boundary, {what}, ms", own, "a step without", step, own / step)

    def sync(what: str, kind: str) -> dict[str, Any]:
        own, alone = (1e3 * s[f"{which}_{kind}_a_sync"] for which in ("two", "one"))
        return row(f"a sync of a fragment, {what}, ms", own, "one process", alone, own / alone)

    two, one = s["two_steps_a_second_off"], s["one_steps_a_second_off"]
    step_bytes, sync_bytes = s["step_bytes"], s["sync_bytes"]
    tell, longest = 1e6 * s["tell_seconds"], 1e6 * s["tell_seconds_longest"]
    return [
        steps("two processes", "two"),
        steps("one process", "one"),
        row("two processes: steps a second, no sync", two, "one process", one, two / one),
        boundary("time", "seconds"),
        boundary("leader's processor time", "cpu_seconds"),
        row("  of which the leader's main thread, µs", tell, "the longest", longest, tell / longest),
        row(
            "bytes of a step to each other process",
            step_bytes,
            "of a sync, besides",
            sync_bytes,
            sync_bytes / step_bytes,
        ),
        sync("time", "seconds"),
        sync("a process's processor time", "cpu_seconds"),
    ]
