"""The baseline of a storm: its rules, its hub over real sockets, its arithmetic, and real processes under faults."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError
from archipelago.ops.chaos.baseline import (
    DataParallelWorker,
    Hub,
    run_baseline,
    summarise,
    worker_faults,
)
from archipelago.ops.chaos.injection import FaultInjector, FaultTarget
from archipelago.ops.chaos.processes import StormPlan, await_ready
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.experiments.baselines import scoring, train
from archipelago.ops.experiments.trial import CurvePoint
from archipelago.ops.launch.init import workload_of
from archipelago.ops.launch.supervisor import Child
from tests.failing import failing
from tests.small import SMALL

ISLANDS = ("island-0", "island-1")
WORKERS = 2
SECONDS = 6.0


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL,
        data=replace(SMALL.data, corpus="small-text", batch_size=2, sequence_length=16),
        inner=replace(SMALL.inner, steps=16, warmup_steps=4),
    )


# -- rules ------------------------------------------------------------------------------------------------------------


def test_steps_that_were_rolled_back_are_lost() -> None:
    """Two workers make a step a second, lose three steps at 10 s, and go on at 14 s."""
    made = [*map(float, range(-2, 11)), *map(float, range(14, 20))]
    found = summarise(made, [], 17 - 3, 0.0, 20.0, 2, 1.0)
    assert [*found.values()] == pytest.approx([14 / 20, 16 / 20, 28, 6, 4.0])
    lost = summarise(made, [1.5], 17 - 3, 0.0, 20.0, 1, 1.0)
    assert lost["uptime"] == pytest.approx(15 / 20), "a time in which a connection was lost is downtime, however short"
    none = summarise([], [], 0, 0.0, 20.0, 1, 1.0)
    assert [*none.values()] == [0.0, 0.0, 0, 0, 20.0]


def test_faults_of_processes_and_links_apply_to_workers() -> None:
    kinds = ("kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk")
    faults = [Fault(float(n), kind, "island-0", 30.0) for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    others = [Fault(1.0, "kill", "redis", 1.0), Fault(1.0, "stop", "merger", 1.0)]
    found = worker_faults([*faults, *others], ISLANDS)
    assert [(fault.kind, fault.seconds) for fault in found] == [
        ("kill", 30.0), ("stop", 30.0), ("partition", 30.0), ("reset", 30.0), ("reset", 0.0), ("throttle", 30.0),
        ("delay", 30.0),
    ]  # fmt: skip


# -- the hub ----------------------------------------------------------------------------------------------------------


class Client:
    """A client that speaks the protocol of a worker. A hub that has dropped it answers with nothing."""

    def __init__(self, port: int, name: str) -> None:
        self.saved = 0
        self.socket = socket.create_connection(("127.0.0.1", port), 30.0)
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(f"{name}\n".encode())

    def first_step(self) -> int:
        return int(self.stream.readline())

    def send(self, *gradient: float) -> None:
        message = np.array(gradient, np.float32).tobytes()
        self.socket.sendall(b"%d %d\n" % (self.saved, len(message)) + message)

    def mean(self, count: int = 2) -> list[float]:
        try:
            return [float(x) for x in np.frombuffer(self.stream.read(4 * count), np.float32)]
        except ConnectionResetError:
            return []

    def end(self) -> None:
        self.stream.close()
        self.socket.close()


@contextmanager
def connected(port: int, *names: str) -> Iterator[list[Client]]:
    clients = [Client(port, name) for name in names]
    yield clients
    for client in clients:
        client.end()


def test_a_hub_averages_gradients_and_forms_the_group_again_after_a_loss() -> None:
    with Hub(("a", "b")) as hub:
        with connected(hub.port, "stranger", "a", "a", "b") as (stranger, old, a, b):
            assert stranger.mean() == old.mean() == [], "a new connection replaces the old one of its name"
            assert (a.first_step(), b.first_step()) == (0, 0)
            for number in range(3):
                a.saved = number  # Only the checkpoints of the first worker count.
                a.send(1.0, number)
                b.send(3.0, 0.0)
                assert a.mean() == b.mean() == [2.0, number / 2]
            a.send(1.0, 1.0)
            b.socket.sendall(b"half of a")  # It is killed in the middle of a message.
            b.end()
            assert a.mean() == []
        assert (hub.step, len(hub.made)) == (2, 3)
        with connected(hub.port, "b") as (b,):
            pass  # It is killed while it waits for the others.
        with connected(hub.port, "b", "a") as (b, a):
            assert (a.first_step(), b.first_step()) == (2, 2)
            with connected(hub.port, "b", "a") as (again, late):
                assert a.mean() == b.mean() == [], "a worker that comes back ends the exchange of its old connection"
                assert (late.first_step(), again.first_step()) == (2, 2)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("corpus")
def test_workers_that_load_checkpoints_train_as_one_process_does(config: RunConfig, tmp_path: Path) -> None:
    """The position in the text and the moments roll back with the parameters. The last two checkpoints are kept."""
    work = workload_of(config, None)
    workers = [DataParallelWorker(work, number, WORKERS, tmp_path, 0.0) for number in range(WORKERS)]
    for first, last in ((0, 6), (5, 11), (11, 16)):
        for worker in workers:
            worker.load(first)
        for _ in range(first, last):
            mean_N = np.mean([worker.gradient() for worker in workers], axis=0)
            for worker in workers:
                worker.apply(mean_N)
    points: list[CurvePoint] = []
    train(work, WORKERS, work.config.inner.steps, points.append)
    untrained, *_, wanted = points
    for worker in workers:
        found = scoring(work)(0, worker.state.params)
        assert found.bits_per_byte == pytest.approx(wanted.bits_per_byte, rel=1e-5)
        assert found.bits_per_byte < 0.99 * untrained.bits_per_byte, "the workers learnt nothing"


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_worker_that_ends_before_it_is_ready_is_an_error(tmp_path: Path) -> None:
    injector = FaultInjector()
    child = Child("island-0", ["-c", "raise SystemExit('no text')"], {}, tmp_path / "island-0.log")
    injector.targets["island-0"] = FaultTarget("island-0", child)
    injector.start(injector.targets["island-0"])
    with failing(ArchipelagoError, "chaos.not-ready"):
        await_ready(injector, {"island-0": lambda: False})


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("corpus")
def test_a_group_survives_a_storm(config: RunConfig, tmp_path: Path) -> None:
    """The test asserts no speed, which depends on the load of the machine."""
    faults = (
        Fault(0.1, "throttle", "island-0", 60.0, 50.0), Fault(0.3, "kill", "merger", 0.2),
        Fault(0.5, "stop", "island-0", 0.5), Fault(1.2, "half-open", "island-0"),
        Fault(2.0, "partition", "island-0", 0.5), Fault(3.0, "kill", "island-1", 0.2),
    )  # fmt: skip
    folder = tmp_path / "storm"
    plan = StormPlan("storm", folder, config, tuple(ISLANDS), 0.05, SECONDS, faults, checkpoint_seconds=0.1)
    found = run_baseline(plan, lambda: False)
    assert found["steps_useful"] > 0 and found["steps_lost"] >= 0
    assert found["goodput"] == pytest.approx(found["steps_useful"] * 0.05 / (2 * SECONDS), rel=0.03)
    assert 0 < found["uptime"] < 1
    assert found["pause_seconds_worst"] >= 0.4, "the others did not wait for the stopped worker"
    log = (folder / "logs" / "island-0.log").read_text()
    assert log.count("connecting again") >= 2, "the group did not form again"
