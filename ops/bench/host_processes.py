"""The processes of `archipelago bench hosts`: the two of an island over two hosts, and one with as many devices."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from archipelago.broker.process import return_freed_memory
from archipelago.broker.redis.transport import connect
from archipelago.islands.hosts.frames import Frame
from archipelago.islands.hosts.membership import Membership
from archipelago.islands.hosts.processes import Leading, come, connect_devices
from archipelago.islands.hosts.seat import Seat
from archipelago.islands.hosts.team import Team
from archipelago.ops.bench.process import keep_to
from archipelago.ops.bench.turns import RUN, join_run, random_text, synced_turn

if TYPE_CHECKING:
    from archipelago.islands.worker import Island

#: All processes of the measurement know it.
KEY = b"bench"
COME_SECONDS = 300.0
#: How often steps with messages and steps without alternate in a turn.
CHUNKS = 4
IDLE_SECONDS = 0.001


@dataclass(frozen=True)
class Cost:
    """What an inner step costs.

    Attributes:
        seconds: Its time.
        cpu_seconds: The processor time of all threads of one process, in two processes that of the leader.
    """

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class HostTurn:
    """What an island did in its turn.

    Attributes:
        steps: The number of inner steps with syncing, and without.
        on: A step with syncing.
        off: A step without.
        syncs: The contributions that the steps with syncing sent.
        untold: A step without syncing and without any message of the leader; None in one process.
        tell_seconds: How long the leader's thread takes to tell the others of a step, median.
        longest_tell: The longest of all its messages, also of syncs.
        step_bytes: What each other process is sent for a step without syncing.
        sync_bytes: What it is sent for a sync of a fragment, beside that.
    """

    steps: int
    on: Cost
    off: Cost
    syncs: int
    untold: Cost | None = None
    tell_seconds: float = 0.0
    longest_tell: float = 0.0
    step_bytes: float = 0.0
    sync_bytes: float = 0.0


class TimedTeam(Team):
    """A team that notes how long its leader takes to tell the others something."""

    seconds: list[float]

    def tell(self, *about: Any) -> None:
        """Tell the other process what to do next."""
        began = time.perf_counter()
        super().tell(*about)
        self.seconds.append(time.perf_counter() - began)

    def tell_each(self, frame: Callable[[int], Frame]) -> None:
        """Tell the other process of the batches of the next steps."""
        began = time.perf_counter()
        super().tell_each(frame)
        self.seconds.append(time.perf_counter() - began)


def _prepare(cores: set[int], devices: int) -> None:
    keep_to(cores)
    return_freed_memory()  # as `archipelago island` does
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"


def take_turns_alone(pipe: Connection, url: str, cores: set[int], devices: int) -> None:
    """Take turns as an island of one process."""
    _prepare(cores, devices)
    _take_turns(pipe, join_run(url, f"data={devices}"), None)


def lead_host(pipe: Connection, url: str, cores: set[int], devices: int, place: Membership) -> None:
    """Take turns as the leader of an island of several processes."""
    _prepare(cores, devices)
    leading = Leading(place, {}, KEY)
    team = leading.team = TimedTeam(place, {}, KEY)
    team.seconds = []
    leading.assemble(connect(url, RUN).reader.manifest(), COME_SECONDS, lambda: False)
    leading.island = join_run(url, f"data={place.hosts * devices}", team)
    _take_turns(pipe, leading.island, team)
    leading.end()


def follow_leader(pipe: Connection, url: str, cores: set[int], devices: int, place: Membership) -> None:
    """Do what the leader says, and sometimes the same without being told."""
    _prepare(cores, devices)
    seat = come(place, {}, KEY, COME_SECONDS, lambda: False)
    manifest, _ = connect_devices(place, seat)

    from functools import partial

    import jax

    from archipelago.islands.data.batches import Batches
    from archipelago.islands.data.sharding import lease_all
    from archipelago.islands.hosts.computing import SharedComputation, follow
    from archipelago.islands.hosts.coordinator import leave
    from archipelago.islands.inner import begin, compile_steps
    from archipelago.islands.mesh.placement import placement_of
    from archipelago.islands.mesh.shape import MeshShape
    from archipelago.islands.models.registry import build

    config = manifest.config
    shape = MeshShape(data=place.hosts * devices)
    placement = placement_of(shape, manifest, config.data.batch_size, jax.devices())
    assert placement is not None  # noqa: S101 - several hosts have several devices
    steps = placement.steps(compile_steps(build(config.model), config.inner))
    computation = SharedComputation(manifest, steps, partial(begin, config.inner), placement)
    batches = Batches(random_text(config), config, lease_all(config.data.shards, config.seed))

    def alone(count: int) -> None:
        _steps(computation.step, batches.next, count, config.inner.steps)

    follow(_Listening(seat, alone), computation, manifest, batches.sample(1))
    leave()
    pipe.poll(None)


class _Listening(Seat):
    """A connection to the leader on which it can also say "alone": the next steps follow without messages."""

    def __init__(self, seat: Seat, alone: Callable[[int], None]) -> None:
        self._seat, self._alone = seat, alone

    def next(self) -> Frame:
        """Wait for the next message to `follow`."""
        while (frame := self._seat.next()).kind == "alone":
            self._alone(frame.number(0))
        return frame


def _take_turns(pipe: Connection, island: Island, team: TimedTeam | None) -> None:
    """Take a turn for each number of steps that comes, until 0."""
    island.link.start()
    island.scan_steps = 1
    island.warm_up()
    interval = island.config.sync.interval
    synced_turn(island, interval)  # This turn pays for everything that happens only once.
    pipe.send(synced_turn(island, interval).seconds / interval)
    while steps := int(pipe.recv()):
        pipe.send(_turn(island, team, steps))
    island.link.stop()


def _turn(island: Island, team: TimedTeam | None, steps: int) -> HostTurn:
    sent, bytes_before = island.sequence, _told_bytes(team)
    synced = synced_turn(island, steps)
    bytes_on = _told_bytes(team) - bytes_before
    on, syncs = Cost(synced.seconds / steps, synced.cpu_seconds / steps), island.sequence - sent
    told, untold = [], []
    tells = list(team.seconds) if team is not None else []
    bytes_before, off_bytes = _told_bytes(team), 0
    for _ in range(CHUNKS):  # in turn, so that other work on the machine slows both
        told.append(_steps(island.computation.step, island.batches.next, steps // CHUNKS, island.run_steps))
        off_bytes += _told_bytes(team) - bytes_before
        if team is not None:
            untold.append(_untold_steps(island, team, steps // CHUNKS))
        bytes_before = _told_bytes(team)
    if team is None:
        return HostTurn(steps, on, _mean(told), syncs)
    median, longest = statistics.median(team.seconds[len(tells) :]), max(team.seconds)
    team.seconds.clear()
    step_bytes = off_bytes / (steps // CHUNKS * CHUNKS)
    sync_bytes = (bytes_on - step_bytes * steps) / syncs
    return HostTurn(steps, on, _mean(told), syncs, _mean(untold), median, longest, step_bytes, sync_bytes)


def _told_bytes(team: Team | None) -> int:
    """Return what each other process was sent, once all of it is on its way."""
    if team is None:
        return 0
    while not team.is_idle:
        time.sleep(IDLE_SECONDS)
    return team.sent // (team.place.hosts - 1)


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.fmean(c.seconds for c in costs), statistics.fmean(c.cpu_seconds for c in costs))


def _untold_steps(island: Island, team: Team, count: int) -> Cost:
    """Let all processes make inner steps of which the leader does not tell."""
    from archipelago.islands.hosts.computing import SharedComputation

    team.tell("alone", (count,))
    assert isinstance(island.computation, SharedComputation)  # noqa: S101 - this process leads others
    step = SharedComputation.step.__get__(island.computation)
    return _steps(step, island.batches.next, count, island.run_steps)


def _steps(step: Callable[..., Any], batches: Callable[[int], Any], count: int, length: int) -> Cost:
    """Make inner steps and nothing else, one of which is in flight, as in an island."""
    cpu, began = time.process_time(), time.perf_counter()
    in_flight = None
    for at in range(count):
        losses_n = step(batches(1), at, length)
        if in_flight is not None:
            in_flight.block_until_ready()
        in_flight = losses_n
    if in_flight is not None:
        in_flight.block_until_ready()
    return Cost((time.perf_counter() - began) / count, (time.process_time() - cpu) / count)
