"""The processes of `archipelago bench accelerator`: an island that syncs in every other turn, and others to compare.

Only these processes load JAX, so that each of them has the accelerator to itself.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import BrokerError
from archipelago.broker.machine import return_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.islands.sync.connection.link import Link
from archipelago.ops.bench.harness import INCARNATION, OF_ISLAND, Pieces, Spent, forget_peak, peak_bytes, wait_until
from archipelago.ops.bench.profile import DeviceTimes, device_times

if TYPE_CHECKING:
    import jax

    from archipelago.broker.transport import Transport
    from archipelago.islands.computation import Computation
    from archipelago.islands.prepared import PreparedIsland
    from archipelago.islands.worker import Island

RUN = "bench-island"
SETTLE_SECONDS, POLL_SECONDS = 120.0, 0.02


@dataclass(frozen=True)
class TimedTurn:
    """A number of inner steps in one process.

    Attributes:
        seconds: Time of the loop, without waiting for the merger after its end.
        cpu_seconds: Processor time of all threads, until everything was merged and adopted.
        peak_bytes: The process's peak of memory in this turn.
        synced: Parameters that went up and that came down.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    synced: int = 0


@dataclass(frozen=True)
class IslandTurns:
    """The measurements of the island's process.

    Attributes:
        steps: Inner steps of each turn.
        largest: Elements of its largest fragment.
        on: The turns with syncing.
        off: The turns without, each right after one with.
        held_bytes: Size of the snapshots on the host, to which differences are added.
        device: What the profile of two intervals with syncing says of the accelerator; None without one.
        pieces: The time of the pieces of syncs, in all turns with syncing but the first; empty unless counted.
    """

    steps: int
    parameters: int
    largest: int
    on: list[TimedTurn]
    off: list[TimedTurn]
    held_bytes: int
    device: DeviceTimes | None = None
    pieces: dict[str, Spent] = field(default_factory=dict)


def create_run(pipe: Connection, url: str, config: RunConfig) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"

    from archipelago.ops.launch.init import create

    create(connect(url, RUN), config)
    pipe.send("created")


def sync_and_not(
    pipe: Connection,
    url: str,
    cores: set[int],
    pairs: int,
    turn_seconds: float,
    mesh: str | None,
    profile: str,
    counts_pieces: bool,
) -> None:
    """Take turns with syncing and without, each over whole intervals. Send each pair, then an `IslandTurns`.

    `mesh` is None for one device. JAX's profile of two more intervals with syncing goes to the folder `profile`.
    """
    os.sched_setaffinity(0, cores)
    return_freed_memory()  # as `archipelago island` does
    import jax

    pieces = Pieces(OF_ISLAND if counts_pieces else {})
    transport, prepared = _prepared(url, mesh)
    link = Link(transport, prepared.manifest, f"island/{INCARNATION}", ())
    island = prepared.island("island", INCARNATION, link, link.join())
    link.pumps.start()
    island.warm_up()
    interval = island.config.sync.interval
    first = _synced_turn(island, interval)  # This turn pays for everything that happens only once.
    steps = interval * max(1, math.ceil(turn_seconds / first.seconds))
    turns, spent = [], pieces.spent()
    for _ in range(pairs):
        on = _synced_turn(island, steps)
        off = plain(island.computation, island.batches.next, steps)
        turns.append((on, off))
        spent = pieces.spent() if len(turns) == 1 else spent
        pipe.send((on, off))
    later = pieces.spent()
    _synced_turn(island, 2 * interval, jax.profiler.trace(profile))
    found = IslandTurns(
        steps=steps,
        parameters=island.manifest.parameters,
        largest=max(island.manifest.sizes),
        on=[on for on, _ in turns],
        off=[off for _, off in turns],
        held_bytes=sum(arrival.params_N.nbytes for arrival in island.link.channels[0].inbox.held.values()),
        device=device_times(Path(profile)),
        pieces={piece: each - spent[piece] for piece, each in later.items()} if counts_pieces else {},
    )
    island.link.pumps.stop()
    pipe.send(found)


def _prepared(url: str, mesh: str | None) -> tuple[Transport, PreparedIsland]:
    """Prepare an island as `archipelago island` does."""
    import jax

    from archipelago.islands.mesh import MeshShape, parsed
    from archipelago.islands.placement import placement_of
    from archipelago.islands.prepared import prepare

    transport = connect(url, RUN)
    manifest = transport.reader.manifest()
    shape = parsed(mesh) if mesh is not None else MeshShape()
    batch_size = manifest.config.data.batch_size // manifest.config.inner.micro_batches
    return transport, prepare(manifest, None, placement_of(shape, manifest, batch_size, jax.devices()))


def _synced_turn(island: Island, steps: int, around: AbstractContextManager[Any] | None = None) -> TimedTurn:
    """Make `steps` inner steps with syncing, in a context, and wait until all that was sent is merged and adopted."""
    import jax

    sequence, versions = island.sequence, [count.version for count in island.ledger.counts]
    jax.block_until_ready(island.inner)  # type: ignore[no-untyped-call]
    forget_peak()
    cpu, began = time.process_time(), time.perf_counter()
    with around or nullcontext():
        for _ in range(steps):
            island.advance()
            island.boundary()
        jax.block_until_ready(island.inner)  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    inbox = island.link.channels[0].inbox
    while _has_work(island.link) or island.ledger.staleness > 0 or inbox._arrivals:  # until all is merged and adopted
        settle(island.link)
        began = time.perf_counter()
        island.boundary()  # It adopts what has arrived, and may send contributions that the window held back.
        jax.block_until_ready(island.inner)  # type: ignore[no-untyped-call]
        seconds += time.perf_counter() - began
    sent = island.sequence - sequence
    closed = [count.version - version for count, version in zip(island.ledger.counts, versions, strict=True)]
    if sum(closed) != sent or not sent:  # The only island of a run adopts all that it sends.
        raise BrokerError(
            f"{sent} contributions went up and {sum(closed)} snapshots came down",
            "A turn must hold whole syncs. Run the measurement again when the machine is less busy.",
            code="bench.timeout",
        )
    synced = 2 * sum(size * count for size, count in zip(island.manifest.sizes, closed, strict=True))
    return TimedTurn(seconds, time.process_time() - cpu, peak_bytes(os.getpid()), synced)


def settle(link: Link) -> None:
    """Wait until the link has nothing more to do."""

    def is_settled() -> bool:
        if link.pumps.failure is not None:
            raise link.pumps.failure
        return not _has_work(link)

    wait_until(is_settled, "answer of the merger", SETTLE_SECONDS, POLL_SECONDS)


def _has_work(link: Link) -> bool:
    return bool(link.channels[0].outbox.unresolved_rounds() or link.channels[0].inbox._wanted)


def plain(computation: Computation, batches: Callable[[int], Any], count: int) -> TimedTurn:
    """Train `count` steps, and do nothing else. One step is in flight, as in an island."""
    import jax

    jax.block_until_ready(computation.inner)  # type: ignore[no-untyped-call]
    forget_peak()
    cpu, began = time.process_time(), time.perf_counter()
    in_flight: jax.Array | None = None
    for at in range(count):
        losses_n = computation.step(batches(1), at, count)
        if in_flight is not None:
            in_flight.block_until_ready()
        in_flight = losses_n
    jax.block_until_ready(computation.inner)  # type: ignore[no-untyped-call]
    return TimedTurn(time.perf_counter() - began, time.process_time() - cpu, peak_bytes(os.getpid()))


def train_only(pipe: Connection, url: str, cores: set[int], count: int) -> None:
    """Train the same in a process that loads an island's code but syncs nothing. Send its turn."""
    os.sched_setaffinity(0, cores)
    return_freed_memory()
    from archipelago.islands.models.registry import build
    from archipelago.islands.tasks.batches import TaskRun

    _, prepared = _prepared(url, None)
    work, config = prepared.workload, prepared.manifest.config
    batches, computation = work.supply(TaskRun("alone", 0, config.seed)).next, work.computation(prepared.manifest)
    computation.inner = work.begin(build(config.model).init(config.seed))
    plain(computation, batches, 1)
    pipe.send(plain(computation, batches, count))


# -- PyTorch ---------------------------------------------------------------------------------------------------------


class TorchTurns(NamedTuple):
    """Turns in PyTorch: the steps of each, the seconds with `sync` and without, and the syncs of the model."""

    steps: int
    on: list[float]
    off: list[float]
    syncs: list[float]


def sync_in_torch(
    pipe: Connection, url: str, cores: set[int], config: RunConfig, pairs: int, turn_seconds: float
) -> None:
    """Create a run and join it as a user's script does. Turns of steps with `sync` and without follow each other.

    The model is a Llama of the dimensions that the config names. The process says that the run is created, waits for
    an answer when a merger serves it, and sends a `TorchTurns`.
    """
    os.sched_setaffinity(0, cores)
    import torch
    import transformers

    from archipelago.islands.models import llama
    from archipelago.islands.pytorch.joining import create, join

    size, data, is_cuda = llama.DENSE[config.model.size], config.data, torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    settings = llama.config_of(size, config.model.vocabulary, data.sequence_length, "float32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(config.model.vocabulary, (data.batch_size, data.sequence_length), device=device)
    sections: dict[str, Any] = {name: getattr(config, name) for name in ("sync", "merge", "outer", "adopt", "wire")}
    create(url, RUN, model, steps=config.inner.steps, names=llama.from_llama, **sections)
    pipe.send("created")
    pipe.recv()
    joined: Any = join(url, RUN, model, optimizer, names=llama.from_llama, island=INCARNATION)
    with joined as run:

        def turn(steps: int, *, syncs: bool) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
                    loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if syncs:
                    run.sync(tokens=batch.numel(), loss=loss)
            if is_cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        def adopted() -> int:
            return sum(int(count.version) for count in run._loop.ledger.counts)

        interval, found = config.sync.interval, TorchTurns(0, [], [], [])
        turn(interval, syncs=True)  # This turn pays for everything that happens only once.
        settle(run._loop.link)  # or the merger would still compile its programs
        found = found._replace(steps=interval * math.ceil(turn_seconds / turn(interval, syncs=True)))
        for _ in range(pairs):
            before = adopted()
            found.on.append(turn(found.steps, syncs=True))
            settle(run._loop.link)  # or its threads would work during the next turn
            found.syncs.append((adopted() - before) / config.sync.fragments)
            found.off.append(turn(found.steps, syncs=False))
        pipe.send(found)
