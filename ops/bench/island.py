"""What syncing costs an island: time of its inner steps, processor time a parameter, memory beside the training.

A real island with its link, a merger and a Redis, each a process. In the island's process steps with syncing and steps
without take turns, each over whole intervals, so that what else the machine does weighs on both. Another process only
trains: by how much the island's peak of memory is above that one's is what syncing takes. Merger and Redis keep to one
half of the cores and the island to the other, since elsewhere they are other machines.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from archipelago.broker.config import DataConfig, ModelConfig, RunConfig, WireConfig, checked
from archipelago.broker.errors import BrokerError
from archipelago.broker.manifest import Corpus
from archipelago.broker.process import keep_compiled
from archipelago.broker.redis.transport import connect
from archipelago.ops.bench.output import OutputOptions, finish
from archipelago.ops.bench.process import child, forget_peak, halves_of_the_cores, keep_to, peak_bytes, require_linux
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.inner import InnerState, InnerSteps
    from archipelago.islands.sync.link import Link
    from archipelago.islands.worker import Island

RUN = "bench-island"
GOAL_STEP, GOAL_MEMORY = 1.03, 4.0
TEXT_BYTES = 1 << 22
PAIRS, PAIRS_QUICK = 5, 2
TURN_SECONDS, TURN_SECONDS_QUICK = 2.0, 0.2
"""the least that a turn takes: as many whole intervals as fill it"""
SETTLE_SECONDS = 120.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Turn:
    """Some inner steps in one process."""

    seconds: float
    """of the loop; not of waiting for the merger after its end"""
    cpu_seconds: float
    """of all threads, until everything was merged and adopted"""
    peak_bytes: int
    synced: int = 0
    """parameters that went up and that came down"""


@dataclass(frozen=True)
class Found:
    """What the island's process has measured."""

    backend: str
    scan_steps: int
    steps: int
    """of each turn"""
    parameters: int
    largest: int
    """elements of the largest fragment"""
    on: list[Turn]
    off: list[Turn]
    held_bytes: int
    """of snapshots on the host, which differences add to"""
    reference_bytes: int
    """of what contributions are measured from; 0 where it is on a device of its own"""


@dataclass(frozen=True)
class IslandBenchOptions(OutputOptions):
    """What syncing costs an island: time of its inner steps, processor time a parameter, memory beside the training."""

    quick: bool = False
    """the tiny model, and fewer and shorter turns"""
    config: Path | None = None
    """a TOML file with settings; flags win over it"""
    settings: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def main(options: IslandBenchOptions) -> int:
    """Measure, and write what was found."""
    config = checked(options.settings)
    keep_compiled()
    return finish("island", island(config, options.quick, say), options)


def island(config: RunConfig, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Rows of time, processor time and memory."""
    require_linux()
    with child(_say_backend) as probe:
        backend = str(probe.says())
    config = settled(config, quick, backend)
    mine, others = halves_of_the_cores()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        keep_to(others, server.pid)
        merger = held.enter_context(child(_serve, server.url, config, others))
        merger.says()
        say(f"{_what(config)} on {backend}: steps with syncing and without take turns")
        pairs, seconds = (PAIRS_QUICK, TURN_SECONDS_QUICK) if quick else (PAIRS, TURN_SECONDS)
        with child(_sync_and_not, server.url, mine, pairs, seconds) as trainer:
            for number in range(pairs):
                say(f"{number + 1} of {pairs}: {float(trainer.says()):.3f} of the time without")
            found = trainer.says()
    say("the same training alone, for its memory")
    with child(_train_alone, config, mine, found.scan_steps, found.steps) as trainer:
        alone_peak = int(trainer.says())
    return {**summary(found, alone_peak), "what": _what(config), "rows": rows(found, alone_peak, _what(config))}


def settled(config: RunConfig, quick: bool, backend: str) -> RunConfig:
    """The config with what this measurement sets where it says nothing: `base` (unless `quick`), int4 both ways, and
    batches to suit the backend.
    """
    short = backend == "cpu"
    data = replace(config.data, batch_size=1 if short else 16, sequence_length=64 if short else 512)
    return replace(
        config,
        model=ModelConfig("base") if config.model == ModelConfig() and not quick else config.model,
        data=data if config.data == DataConfig() else config.data,
        wire=replace(config.wire, up="int4", down="int4") if config.wire == WireConfig() else config.wire,
        inner=replace(config.inner, steps=1 << 30),
    )


def _what(config: RunConfig) -> str:
    data, sync, wire = config.data, config.sync, config.wire
    sizes = f"{config.model.size} {data.batch_size} × {data.sequence_length}, H = {sync.interval}, P = {sync.fragments}"
    return f"{sizes}, {wire.up}/{wire.down}"


# -- what came out ----------------------------------------------------------------------------------------------------


def summary(found: Found, alone_peak: int) -> dict[str, Any]:
    """The figures; medians over pairs of neighbouring turns. `alone_peak`: bytes of the process that only trains."""
    pairs = list(zip(found.on, found.off, strict=True))
    ratios = [on.seconds / off.seconds for on, off in pairs]
    beside = max(turn.peak_bytes for turn in found.on) - alone_peak
    always = max(turn.peak_bytes for turn in found.off) - alone_peak
    return {
        "backend": found.backend,
        "scan_steps": found.scan_steps,
        "turn_steps": found.steps,
        "parameters": found.parameters,
        "step_seconds_on": statistics.median(on.seconds for on in found.on) / found.steps,
        "step_seconds_off": statistics.median(off.seconds for off in found.off) / found.steps,
        "step_ratio": statistics.median(ratios),
        "step_ratio_from": min(ratios),
        "step_ratio_to": max(ratios),
        "cpu_seconds_a_synced_parameter": statistics.median(
            (on.cpu_seconds - off.cpu_seconds) / on.synced for on, off in pairs
        ),
        "cpu_ratio": statistics.median(on.cpu_seconds / off.cpu_seconds for on, off in pairs),
        "synced_parameters_a_turn": statistics.median(on.synced for on in found.on),
        "largest_fragment_bytes": 4 * found.largest,
        "peak_bytes_alone": alone_peak,
        "peak_bytes_beside": beside,
        "peak_bytes_beside_between_syncs": always,
        "held_bytes": found.held_bytes,
        "reference_bytes": found.reference_bytes,
    }


def rows(found: Found, alone_peak: int, what: str) -> list[dict[str, Any]]:
    """The same for people."""
    s = summary(found, alone_peak)
    largest = s["largest_fragment_bytes"]

    def memory(name: str, size: int, goal: float | str = "") -> dict[str, Any]:
        return _row(f"{name}, MiB", size / 2**20, "largest fragment", largest / 2**20, size / largest, goal)

    goal = GOAL_STEP if found.backend != "cpu" else ""  # steps on a CPU share its cores with what syncs
    on, off = 1e3 * s["step_seconds_on"], 1e3 * s["step_seconds_off"]
    on_cpu, off_cpu = (
        1e3 * statistics.median(turn.cpu_seconds for turn in turns) / found.steps for turns in (found.on, found.off)
    )
    cpu = 1e9 * s["cpu_seconds_a_synced_parameter"]
    return [
        _row(f"{what}: a step, ms", on, "no sync", off, s["step_ratio"], goal),
        _row("  its processor time, ms", on_cpu, "no sync", off_cpu, s["cpu_ratio"], ""),
        _row("processor time a synced parameter, ns", cpu, "", "", "", ""),
        memory("peak memory beside the training", s["peak_bytes_beside"], GOAL_MEMORY),
        memory("  between syncs, too", s["peak_bytes_beside_between_syncs"]),
        memory("  snapshots held for differences", s["held_bytes"]),
        memory("  references of contributions", s["reference_bytes"]),
    ]


def _row(what: str, ours: float, against: str, theirs: float | str, ratio: float | str, goal: Any) -> dict[str, Any]:
    return {"what": what, "ours": ours, "against": against, "theirs": theirs, "ratio": ratio, "goal": goal}


# -- in processes of their own ----------------------------------------------------------------------------------------


def _say_backend(pipe: Connection) -> None:
    """In a process that ends: one that goes on would keep the accelerator from the island."""
    import jax

    pipe.send(jax.default_backend())


def _serve(pipe: Connection, url: str, config: RunConfig, cores: set[int]) -> None:
    """Creates the run, says so, and merges."""
    keep_to(cores)
    os.environ["JAX_PLATFORMS"] = "cpu"

    from archipelago.islands.creation import describe, first_snapshots
    from archipelago.merger.service import Merger, serve

    transport = connect(url, RUN)
    manifest = describe(RUN, config, Corpus("none", "0" * 32, TEXT_BYTES))
    transport.create(manifest, first_snapshots(manifest))
    pipe.send("created")
    serve(Merger(transport), pipe.poll)


def _text(config: RunConfig) -> NDArray[np.uint8]:
    """No text: what a sync costs hardly depends on what is learnt."""
    size = max(TEXT_BYTES, 4 * config.data.sequence_length * (config.data.shards + 1))
    return np.random.default_rng(config.seed).integers(0, 256, size, np.uint8)


def _sync_and_not(pipe: Connection, url: str, cores: set[int], pairs: int, turn_seconds: float) -> None:
    """Steps with syncing and steps without, in turns; says what it `Found`."""
    keep_to(cores)
    import jax

    from archipelago.islands.device import best_scan_steps

    made = _join(url)
    made.link.start()
    made.scan_steps = best_scan_steps(made)
    made.warm_up()
    interval = max(1, made.config.sync.interval // made.scan_steps) * made.scan_steps
    first = _synced_turn(made, interval)  # whatever happens once has happened
    steps = interval * max(1, math.ceil(turn_seconds / first.seconds))
    turns = []
    for _ in range(pairs):
        on, off = _synced_turn(made, steps), _plain_turn(made, steps)
        turns.append((on, off))
        pipe.send(on.seconds / off.seconds)
    on_host = jax.default_backend() == "cpu"
    found = Found(
        backend=jax.default_backend(),
        scan_steps=made.scan_steps,
        steps=steps,
        parameters=made.manifest.parameters,
        largest=max(made.manifest.sizes),
        on=[on for on, _ in turns],
        off=[off for _, off in turns],
        held_bytes=sum(arrival.params_N.nbytes for arrival in made.link._held.values()),
        reference_bytes=sum(reference_N.nbytes for reference_N in made.replica.references) if on_host else 0,
    )
    made.link.stop()
    pipe.send(found)


def _join(url: str) -> Island:
    """An island as `archipelago island` makes it, on random bytes."""
    from archipelago.islands.data.batches import Batches
    from archipelago.islands.inner import compile_steps
    from archipelago.islands.models.registry import build
    from archipelago.islands.sync.link import Link
    from archipelago.islands.worker import Island

    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    config = manifest.config
    link = Link(transport, manifest, "island/bench")
    steps = compile_steps(build(config.model), config.inner)
    batches = Batches(_text(config), config, link.lease)
    return Island("island", manifest, steps, batches, link, link.join(), incarnation="bench")


def _synced_turn(made: Island, steps: int) -> Turn:
    """So many steps as an island makes them, until all that they sent was merged and has come back."""
    import jax

    synced = _Synced(made)
    jax.block_until_ready(made.inner)  # type: ignore[no-untyped-call]
    forget_peak()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(steps // made.scan_steps):
        made.advance()
        made.boundary()
    jax.block_until_ready(made.inner)  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    while _is_busy(made):
        _settle(made)
        began = time.perf_counter()
        made.boundary()  # adopts what came, and may send what the window held back
        jax.block_until_ready(made.inner)  # type: ignore[no-untyped-call]
        seconds += time.perf_counter() - began
    return Turn(seconds, time.process_time() - cpu, peak_bytes(os.getpid()), synced.parameters())


class _Synced:
    """Counts parameters that an island sends and adopts, from the ledgers of the run: versions and rounds."""

    def __init__(self, made: Island) -> None:
        self._made = made
        self._sent, self._versions = made.sequence, self._now()

    def _now(self) -> list[int]:
        return [count.version for count in self._made.ledger.counts]

    def parameters(self) -> int:
        """Since this was made. What goes up comes down: one island alone is all of every round."""
        sizes = self._made.manifest.sizes
        closed = [new - old for new, old in zip(self._now(), self._versions, strict=True)]
        if sum(closed) != self._made.sequence - self._sent or not sum(closed):
            raise BrokerError(
                f"{self._made.sequence - self._sent} contributions went up and {sum(closed)} snapshots came down",
                "A turn is to hold whole syncs: is the machine too busy? Try again.",
            )
        return 2 * sum(size * count for size, count in zip(sizes, closed, strict=True))


def _settle(made: Island) -> None:
    """Waits until the link has nothing more to do."""
    link, deadline = made.link, time.monotonic() + SETTLE_SECONDS
    while _has_work(link):
        if link.failure is not None:
            raise link.failure
        if time.monotonic() > deadline:
            raise BrokerError(f"the merger did not answer for {SETTLE_SECONDS:g} s", "See what it wrote above.")
        time.sleep(POLL_SECONDS)


def _has_work(link: Link) -> bool:
    return bool(link.unresolved_rounds() or link._wanted)


def _is_busy(made: Island) -> bool:
    """Whether anything that it sent is not back in its parameters."""
    return _has_work(made.link) or made.ledger.staleness > 0 or bool(made.link._arrivals)


def _plain_turn(made: Island, steps: int) -> Turn:
    """So many steps of the same island without a look at the link."""
    made.inner, turn = plain(made.steps, made.inner, made.batches.next, steps, made.scan_steps)
    return turn


def plain(
    steps: InnerSteps, state: InnerState, batches: Callable[[int], NDArray[np.uint8]], count: int, scan_steps: int
) -> tuple[InnerState, Turn]:
    """Training and nothing else, with one stretch of steps in flight as in an island."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(state)  # type: ignore[no-untyped-call]
    forget_peak()
    cpu, began = time.process_time(), time.perf_counter()
    in_flight: jax.Array | None = None
    for at in range(0, count, scan_steps):
        state, losses_n = steps(state, jnp.asarray(batches(scan_steps)), jnp.asarray(at, jnp.int32))
        if in_flight is not None:
            in_flight.block_until_ready()
        in_flight = losses_n
    jax.block_until_ready(state)  # type: ignore[no-untyped-call]
    return state, Turn(time.perf_counter() - began, time.process_time() - cpu, peak_bytes(os.getpid()))


def _train_alone(pipe: Connection, config: RunConfig, cores: set[int], scan_steps: int, count: int) -> None:
    """The same training in a process that has everything loaded and syncs nothing; says its peak in bytes."""
    keep_to(cores)
    import archipelago.islands.worker  # noqa: F401 - as much code as an island has in memory
    from archipelago.islands.data.batches import Batches
    from archipelago.islands.data.sharding import lease_all
    from archipelago.islands.inner import begin, compile_steps
    from archipelago.islands.models.registry import build

    model = build(config.model)
    steps = compile_steps(model, config.inner)
    batches = Batches(_text(config), config, lease_all(config.data.shards, config.seed))
    state, _ = plain(steps, begin(config.inner, model.init(config.seed)), batches.next, scan_steps, scan_steps)
    _, turn = plain(steps, state, batches.next, count, scan_steps)
    pipe.send(turn.peak_bytes)
