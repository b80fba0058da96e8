"""`archipelago bench sync --listeners N`: what listeners of a run download, and how soon they have each version."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from archipelago.islands.user_loop.following import follow
from archipelago.ops.bench.harness import MeasuredProcess, child
from archipelago.ops.bench.two_islands import PATIENCE_SECONDS, RUN, SyncSize, two_islands
from archipelago.ops.settings import say

#: How many processes share the listeners, so that their start does not take longer than the measurement.
PROCESSES = 5


class Heard(NamedTuple):
    """A version that the listeners of a process have loaded.

    Attributes:
        round: Its last round.
        unix_seconds: When each listener had it.
        cpu_seconds: What all versions so far have taken, for a listener.
        bytes: What a listener has downloaded so far.
    """

    round: int
    unix_seconds: Sequence[float]
    cpu_seconds: float
    bytes: float


def listened(size: SyncSize, count: int) -> dict[str, Any]:
    """Let listeners follow a run of two islands.

    Returns:
        Plain data with `rows`, medians over versions: the `seconds` from the merger's last round of a version until a
        listener has it in arrays of numpy, of the median listener and of the slowest; a listener's `cpu_seconds` and
        `bytes` for a version.
    """
    rows = []
    with two_islands(replace(size, rule="average")) as ours, contextlib.ExitStack() as held:
        shares = [count // PROCESSES + (n < count % PROCESSES) for n in range(min(count, PROCESSES))]
        listeners = [held.enter_context(child(_listen, ours.url, share)) for share in shares]
        before = [_heard(each, 0) for each in listeners]
        for _ in range(size.rounds + 1):
            ours.sync()
            last = ours.transport.reader.tape(1)[-1]
            found = [_heard(each, last.round) for each in listeners]
            late = sorted(at - last.unix_seconds for heard in found for at in heard.unix_seconds)
            both = list(zip(found, before, strict=True))
            cpu = statistics.median(now.cpu_seconds - was.cpu_seconds for now, was in both)
            rows.append((statistics.median(late), late[-1], cpu, statistics.median(n.bytes - w.bytes for n, w in both)))
            before = found
            say(f"round {last.round}: {rows[-1][0]:.3f} s, the slowest {rows[-1][1]:.3f} s")
    names = ("seconds", "slowest_seconds", "cpu_seconds", "bytes")
    medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]  # the first sync warms up
    parameters = sum(tensor.size for tensor in size.tensors)
    return {"parameters": parameters, "rows": [{"listeners": count, **dict(zip(names, medians, strict=True))}]}


def _heard(listeners: MeasuredProcess, number: int) -> Heard:
    """Return the first version with this round in it that all listeners of a process have loaded."""
    while (heard := Heard(*listeners.receive(PATIENCE_SECONDS))).round < number:
        pass
    return heard


def _listen(pipe: Connection, url: str, count: int) -> None:
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(follow(url, RUN)) for _ in range(count)]
        while True:
            found = [(next(each).round, time.time()) for each in listeners]
            size = sum(each.bytes_down for each in listeners) / count
            number = min(number for number, _ in found)
            pipe.send((number, [at for _, at in found], time.process_time() / count, size))
