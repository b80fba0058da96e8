"""`archipelago bench sync`: one outer synchronisation of a whole model, from publishing to adoption, against torchft's.

Islands, merger and Redis are the real ones, each a process; a random walk replaces the inner steps. Both systems
take turns in the same run, so that other work on the machine slows both. The torchft side runs in another
Python environment (the head of `torchft.py` says how to make one).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, MergeConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.machine import return_freed_memory
from archipelago.broker.manifest import Manifest, Tensor, balanced
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Transport
from archipelago.broker.wire import pack
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.inner import InnerState, InnerSteps
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.worker import Island
from archipelago.ops.bench.harness import MeasuredProcess, child, manifest_of, own_run, serve_merger, wait_until
from archipelago.ops.bench.output import OutputOptions, compared, finish, ratio_row, taking_turns
from archipelago.ops.launch.devices import memory_share
from archipelago.ops.launch.supervisor import thread_environment
from archipelago.ops.settings import say

RUN = "sync"
Rule = Literal["average", "rda", "isotropic"]
ISLANDS = ("oslo", "lima")
#: The processes that share this machine's cores.
PROCESSES = 1 + len(ISLANDS)
PARAMETERS = 10_000_000
#: The tensors have one shape, so that each fragment is two of them.
TENSORS, COLUMNS, FRAGMENTS = 12, 1000, 6
WIRE = WireConfig(up="int4", thin="", down="int4")
#: All fragments are due at each inner step, so a sync is of the whole model. The quorum waits for both islands.
AT_ONCE = SyncConfig(interval=1, fragments=FRAGMENTS, window=FRAGMENTS, quorum=len(ISLANDS))
PATIENCE_SECONDS = 120.0
TEXT_BYTES = 1 << 20
NOISE = 1e-3
#: Syncs that are measured, and those before them that do not count.
ROUNDS, ROUNDS_QUICK, WARM_UPS = 9, 3, 2
TORCHFT_PYTHON = "ARCHIPELAGO_TORCHFT_PYTHON"
#: It runs in a Python environment that has torchft.
SCRIPT = Path(__file__).with_name("torchft.py")
END_SECONDS = 10.0


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
    parameters: int = PARAMETERS
    """How many elements the model has."""

    @property
    def rounds(self) -> int:
        """The syncs of which the median counts."""
        return ROUNDS_QUICK if self.quick else ROUNDS

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """TENSORS of one shape, with `parameters` elements in all, rounded to whole rows."""
        return tuple(Tensor(f"layers.{n:02}", self.shape) for n in range(TENSORS))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each tensor."""
        return (max(1, round(self.parameters / TENSORS / COLUMNS)), COLUMNS)


def main(options: SyncOptions) -> int:
    return finish("sync", sync(options), options)


class Synced(NamedTuple):
    """One sync of the whole model: whether both islands or replicas took part, and the traffic of one, both ways."""

    seconds: float
    committed: bool
    megabytes: float = math.nan


def sync(options: SyncOptions) -> dict[str, Any]:
    """Measure both systems. Return plain data with `rows`.

    Seconds and traffic are medians over syncs, and a sync is timed from the start of the first process to the end of
    the last one.
    """
    python, against = options.torchft_python or os.environ.get(TORCHFT_PYTHON, ""), ""
    with contextlib.ExitStack() as held:
        others = []
        if python:
            against, theirs = held.enter_context(torchft(options, python))
            others.append(theirs)
        else:
            say(f"torchft is left out: give --torchft-python, or ${TORCHFT_PYTHON}")
        ours = held.enter_context(two_islands(options))
        found = taking_turns([ours, *others], options.rounds, WARM_UPS)
    return {
        "parameters": sum(tensor.size for tensor in options.tensors),
        "fragments": FRAGMENTS,
        "codecs": f"{WIRE.up} up, {WIRE.down} down; torchft float32",
        "torchft": against,
        "rows": rows_of(found, against),
    }


def rows_of(found: Sequence[Sequence[Synced]], against: str) -> list[dict[str, Any]]:
    """Return the lines of the table from the syncs of our side, and of torchft if it ran."""

    def row(what: str, of: Callable[[Sequence[Synced]], float], ratio: float | str = "") -> dict[str, Any]:
        return ratio_row(what, of(found[0]), against, of(found[1]) if against else "", ratio)

    ratio = compared(*([each.seconds for each in side] for side in found)).ratio if against else ""
    return [
        row("a sync, s", lambda side: statistics.median(each.seconds for each in side), ratio),
        row(f"  of {len(found[0])} syncs, both took part in", lambda side: sum(each.committed for each in side)),
        row("  traffic of a process, both ways, MB", lambda side: statistics.median(each.megabytes for each in side)),
    ]


# -- a run of two islands ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_islands(options: SyncOptions) -> Iterator[Callable[[], Synced]]:
    """Start a Redis as `up` does, a merger and two islands. Yield what syncs them once, when they are ready to."""
    with contextlib.ExitStack() as held:
        manifest, random = _manifest(options), np.random.default_rng(0)
        first = [pack(random.standard_normal(elements, np.float32), "float32", 0) for elements in manifest.sizes]
        server, made = held.enter_context(own_run(manifest, first))
        # While the merger works, the islands wait, so its spectra may use all cores.
        merger = held.enter_context(child(serve_merger, server.url, RUN))
        merger.receive(PATIENCE_SECONDS)
        islands = [held.enter_context(child(_train, server.url, name, options)) for name in ISLANDS]
        for island in islands:
            island.receive(2 * PATIENCE_SECONDS)
        wait_until(lambda: len(made.reader.presences()) == len(ISLANDS), "heartbeat of both islands", PATIENCE_SECONDS)
        sync_once = partial(_sync_both, made, islands)
        # The merger may close the first rounds before it knows both islands.
        wait_until(lambda: sync_once().committed, "sync of both islands", PATIENCE_SECONDS)
        yield sync_once


def _manifest(options: SyncOptions) -> Manifest:
    settings = RunConfig(
        data=DataConfig(sequence_length=64, batch_size=4, shards=8),
        inner=InnerConfig(steps=1 << 30),
        sync=AT_ONCE,
        merge=MergeConfig(embedding=options.rule, rest=options.rule),
        wire=WIRE,
    )
    return manifest_of(RUN, settings, options.tensors, balanced(options.tensors, FRAGMENTS))


def _sync_both(transport: Transport, islands: Sequence[MeasuredProcess]) -> Synced:
    """Let both islands move all parameters, then sync them. Time from the first publishing to the last adoption."""
    _ask(islands, "advance")
    ends = _ask(islands, "sync")
    seconds = max(end.at for end in ends) - min(end.began for end in ends)
    newest = transport.reader.tape(FRAGMENTS)
    return Synced(seconds, all(len(entry.members) == len(ISLANDS) for entry in newest), ends[-1].bytes / 1e6)


# -- the processes ----------------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """An island's answer: when its sync began and ended, and the bytes of it."""

    began: float
    at: float
    bytes: int


def _ask(processes: Sequence[MeasuredProcess], command: str) -> list[Any]:
    """Send all processes a command at once, and collect their answers."""
    for process in processes:
        process.pipe.send(command)
    return [process.receive(2 * PATIENCE_SECONDS) for process in processes]


def _train(pipe: Connection, url: str, name: str, options: SyncOptions) -> None:
    """An island's process: obey commands."""
    # as the launcher does, and before JAX looks at its devices
    os.environ |= {**thread_environment(PROCESSES), **memory_share(len(ISLANDS))}
    return_freed_memory()  # The real island does this too.
    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    link = Link(transport, manifest, f"{name}/bench", range_order(manifest.config.data.shards, manifest.config.seed))
    batches = Batches(np.zeros(TEXT_BYTES, np.uint8), manifest.config, link.lease)
    steps = stand_in(manifest, sum(name.encode()))
    island = Island(name, manifest, Computation(manifest, steps), batches, link, link.join(), incarnation="bench")
    link.pumps.start()
    island.warm_up()
    island.beat("training")
    pipe.send("ready")
    while True:
        if pipe.recv() == "sync":
            pipe.send(_synced(island))
        else:
            island.advance()
            jax.block_until_ready(island.inner.params)  # type: ignore[no-untyped-call]
            pipe.send("advanced")


def _synced(island: Island) -> Counts:
    """Publish all fragments, and pass step boundaries until the merged version of each is adopted."""
    goal = [count.version + 1 for count in island.ledger.counts]
    uplink = island.link.uplink
    before, began = uplink.bytes_up + uplink.bytes_down, time.monotonic()

    def adopted() -> bool:
        island.boundary()
        return all(count.version >= version for count, version in zip(island.ledger.counts, goal, strict=True))

    wait_until(adopted, "merged version of all fragments", PATIENCE_SECONDS)
    jax.block_until_ready((island.inner.params, island.computation.replica.references))  # type: ignore[no-untyped-call]
    return Counts(began, time.monotonic(), uplink.bytes_up + uplink.bytes_down - before)


def stand_in(manifest: Manifest, seed: int) -> InnerSteps:
    """Return inner steps that make a random walk, because noise does not compress."""
    random = np.random.default_rng(seed)
    noise = {t.name: jnp.asarray(random.standard_normal(t.shape, np.float32) * NOISE) for t in manifest.tensors}
    walked = jax.jit(lambda params: jax.tree.map(jnp.add, params, noise), donate_argnums=0)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, *clock: jax.Array) -> tuple[InnerState, jax.Array]:
        params = walked(state.params)
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps


# -- torchft's side ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torchft(options: SyncOptions, python: str) -> Iterator[tuple[str, Callable[[], Synced]]]:
    """Start two replicas and a lighthouse by a Python that has torchft. Yield its version, and what syncs them once.

    Raises BrokerError (`bench.process-failed`) if the process cannot be started, or gives no answer.
    """

    def failed(why: str) -> BrokerError:
        remedy = "See its output above, or leave --torchft-python out."
        return BrokerError(f"torchft by {python} {why}", remedy, code="bench.process-failed")

    asked = json.dumps({"tensors": TENSORS, "shape": options.shape, "timeout_seconds": PATIENCE_SECONDS})
    # -P: without it, Python would put the folder of the script, and so our modules, before its own packages.
    command = [python, "-P", str(SCRIPT), asked]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise failed(f"cannot be started ({error.strerror})") from None
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    send, answers = process.stdin, process.stdout

    def answer(line: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            send.write(line)
            send.flush()
        try:
            found: dict[str, Any] = json.loads(answers.readline())
        except ValueError:
            raise failed("gave no answer") from None
        return found

    def sync_once() -> Synced:
        found = answer("\n")
        return Synced(found["seconds"], found["committed"])

    try:
        yield f"torchft {answer('')['torchft']}", sync_once
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            send.close()  # Its replicas end when its standard input does.
            process.wait(END_SECONDS)
        process.kill()
        process.wait()
        answers.close()
