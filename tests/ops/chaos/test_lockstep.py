"""Workers that train in lockstep under faults: exact results, real processes, the coordinator's socket, the figures."""

from __future__ import annotations

import json
import math
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.models.registry import Params, build
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.chaos.lockstep.coordinator import METHODS, Coordinator, Ledger, Method, Order, Step
from archipelago.ops.chaos.lockstep.data_parallel import DataParallel
from archipelago.ops.chaos.lockstep.driver import CoordinatorServer, WorkerGroup, run_baseline, worker_faults
from archipelago.ops.chaos.lockstep.files import Slots, first_in, params_in, save_first
from archipelago.ops.chaos.lockstep.group import GroupSettings, coordinator_of
from archipelago.ops.chaos.lockstep.results import longest_pause, sampled, summarise
from archipelago.ops.chaos.lockstep.trainees import TRAINEES, Trainee
from archipelago.ops.chaos.lockstep.worker import Follower, WorkerOptions
from archipelago.ops.chaos.lockstep.worker import main as worker_main
from archipelago.ops.chaos.processes import Plan, await_ready
from archipelago.ops.chaos.schedule import Fault
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import Point
from tests.conftest import Until
from tests.failing import failing
from tests.ops.chaos.test_coordinators import INTERVAL, NAMES, Workers, coordinator, exhaust
from tests.small import SMALL

ISLANDS = ("island-0", "island-1")
#: Settings whose folders do not exist. All tests share them, so that programs are compiled once.
SETTINGS = GroupSettings(
    "data-parallel", "{}", NAMES, dict.fromkeys(NAMES, 0.1), "/somewhere", "/else",
    0.7, 0.9,
)  # fmt: skip


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL,
        data=replace(SMALL.data, corpus="small-text", batch_size=2, sequence_length=16),
        inner=replace(SMALL.inner, steps=16, warmup_steps=4),
        sync=replace(SMALL.sync, interval=INTERVAL),
    )


# -- numbers ----------------------------------------------------------------------------------------------------------


class Group:
    """Workers with real arithmetic, slots and files. A new process of a name has its trainee again, to compile once."""

    def __init__(self, method: Method, config: RunConfig, corpus: OpenCorpus, folder: Path) -> None:
        folder.mkdir()
        settings = replace(SETTINGS, method=method, config=config.to_json())
        first = build(config.model).init(config.seed)
        save_first(folder, first)
        self.trainees: dict[str, Trainee] = {name: TRAINEES[method](settings, name, corpus, first) for name in NAMES}
        self._folder = folder
        self.workers = Workers(coordinator(method), self._start)
        self.workers.start()

    def _start(self, name: str) -> Callable[[Order], None]:
        trainee = self.trainees[name]
        follower = Follower(trainee, Slots(self._folder, name, trainee.vector().size), self._folder)
        follower.warm_up()  # It also resets the trainee, as a new process would.
        return follower.do

    def end(self) -> Params:
        """End the training, and return the parameters."""
        return params_in(self._folder, self.workers.end())


def in_one_process(monkeypatch: pytest.MonkeyPatch, train: Callable[..., list[Point]], *args: object) -> Params:
    """Return the parameters that a baseline in one process evaluates at its end."""
    seen: list[Params] = []

    def point(tokens: int, params: Params) -> Point:
        seen.append({name: jnp.array(tensor) for name, tensor in params.items()})
        return Point(tokens, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(baselines, "scoring", lambda work: point)
        train(*args, len(NAMES), lambda point: None)
    return seen[-1]


@pytest.mark.full
def test_workers_that_are_killed_train_as_one_process_does(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, the position in the text and the moments roll back with the parameters."""
    total = config.inner.steps
    wanted = in_one_process(monkeypatch, baselines.data_parallel, our_work(config, corpus))
    group = Group("data-parallel", config, corpus, tmp_path / "group")
    workers = group.workers
    workers.until(total - 2)
    workers.do("b")
    workers.kill("b")
    for name in workers.able():
        workers.do(name)
    workers.start("b")
    workers.until(total - 1)
    workers.do("a", orders=2)  # It dies in the middle of a bundle.
    workers.kill("a")
    workers.start("a")
    workers.until(total)
    found = group.end()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-5, err_msg=name)
    first = build(config.model).init(config.seed)
    assert max(np.abs(wanted[name] - first[name]).max() for name in wanted) > 1e-2, "the parameters did not change"
    assert len(workers.coordinator.ledger.made) > len(workers.coordinator.ledger.useful)


@pytest.mark.full
def test_a_worker_that_returns_to_an_elastic_group_takes_over_its_state(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path
) -> None:
    group = Group("elastic data-parallel", config, corpus, tmp_path / "group")
    group.workers.until(2)
    group.workers.kill("b")
    group.workers.until(5)
    group.workers.start("b")
    group.workers.until(8)
    params = group.end()
    exhaust(group.workers)
    first, *others = (group.trainees[name].shared_state()[0] for name in NAMES)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    jax.tree.map(np.testing.assert_array_equal, first.params, params)


# -- real processes ---------------------------------------------------------------------------------------------------


def plan_of(folder: Path, config: RunConfig, seconds: float, *faults: Fault) -> Plan:
    return Plan("storm", folder, config, dict.fromkeys(ISLANDS, 0.05), seconds, faults, checkpoint_seconds=0.1)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("corpus")
def test_a_worker_that_is_killed_trains_again(config: RunConfig, tmp_path: Path, until: Until) -> None:
    plan = plan_of(tmp_path / "storm", config, 1.0)
    with ExitStack() as stack:
        group = WorkerGroup(plan, "synchronous DiLoCo", config, stack)
        for worker in group.workers:
            group.start(worker)
        await_ready(group, group.workers, group.is_training)
        group.inject(group.targets["island-1"], Fault(0.0, "kill", "island-1", 0.2))
        ledger, made, merged = group.coordinator.ledger, len(group.coordinator.ledger.made), group.coordinator.n

        def recovered() -> bool:
            group.poll()
            back = "island-1" in {step.worker for step in ledger.made[made:]}
            return back and group.coordinator.n > merged and group.events[-1].what == "start"

        until(recovered, "a step of the worker, and an exchange")
        final = group.finish()
    first, last = first_in(plan.folder / "files"), params_in(plan.folder / "files", final)
    assert all(bool(jnp.all(jnp.isfinite(last[name])) and jnp.any(last[name] != first[name])) for name in first)
    exchange = json.loads((plan.folder / "settings.json").read_text())["exchange"]
    assert not Path(exchange).exists(), "the memory was not freed"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("corpus")
def test_a_baseline_has_a_result(config: RunConfig, tmp_path: Path) -> None:
    """The test asserts no speed, which depends on the load of the machine."""
    faults = (
        Fault(0.2, "throttle", "island-0", 5.0), Fault(0.3, "kill", "merger", 0.2),
        Fault(0.5, "stop", "island-0", 0.5), Fault(1.2, "partition", "island-1", 0.2),
    )  # fmt: skip
    found = run_baseline(plan_of(tmp_path / "storm", config, 3.0, *faults), "data-parallel", lambda: False)
    assert found.seconds >= 3.0
    assert 0 < found.steps_useful <= found.steps_made
    assert found.goodput == pytest.approx(found.steps_useful * 0.05 / (2 * found.seconds))
    assert found.tokens >= found.steps_useful * config.tokens_per_step
    assert math.isfinite(found.bits_per_byte)
    assert found.pause_seconds_worst >= 0.4, "the others did not wait for the stopped worker"
    assert found.curve[-1][1] == found.steps_useful


@pytest.mark.full
@pytest.mark.processes
def test_a_worker_that_cannot_start_ends_the_baseline(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupSettings, "to_text", lambda self: "{}")
    with failing(ArchipelagoError, "chaos.not-ready"):
        run_baseline(plan_of(tmp_path / "storm", config, 5.0), "data-parallel", lambda: False)


# -- settings and faults ----------------------------------------------------------------------------------------------


def test_settings_are_read_back_and_other_text_is_refused(tmp_path: Path) -> None:
    assert GroupSettings.from_text(SETTINGS.to_text()) == SETTINGS
    for text in ("", "[]", "{}", '{"names": 3}', '{"method": "x", "names": [], "more": 1}'):
        with failing(ConfigError, "chaos.group-settings"):
            GroupSettings.from_text(text)
    with failing(ConfigError, "chaos.unreadable-file"):
        worker_main(WorkerOptions(tmp_path / "none.json", "island-0"))
    for method in METHODS:
        found = coordinator_of(replace(SETTINGS, method=method), INTERVAL, 10.0)
        assert type(found) is type(coordinator(method)), method
        assert found.names == NAMES


def test_only_kills_stops_and_cuts_apply_to_workers() -> None:
    kinds = ("kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk")
    faults = [Fault(float(n), kind, "island-0", 30.0) for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    others = [Fault(1.0, "kill", "redis", 1.0), Fault(1.0, "stop", "merger", 1.0), Fault(2.0, "clock", "redis", 1.0)]
    found = worker_faults([*faults, *others], ISLANDS)
    assert [(fault.kind, fault.seconds) for fault in found] == [
        ("kill", 30.0), ("stop", 30.0), ("partition", 30.0), ("reset", 30.0), ("half-open", 20.0),
    ]  # fmt: skip


# -- the socket -------------------------------------------------------------------------------------------------------


class Client:
    """A client that speaks the protocol of a worker."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30.0)
        self.socket.connect(address)
        self.lines = self.socket.makefile("r")

    def send(self, **message: object) -> None:
        self.socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> Any:
        return json.loads(self.lines.readline())

    def end(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="socket-") as folder:  # The path of a socket must be short.
        yield f"{folder}/socket"


@pytest.fixture
def pair() -> Coordinator:
    return DataParallel(("a", "b"), 10)


def test_workers_receive_orders_and_report(address: str, pair: Coordinator, until: Until) -> None:
    with CoordinatorServer(pair, address) as server:
        for noise in (b'{"name": "z"}\n', b"noise\n", b""):  # They change nothing.
            client = Client(address)
            client.socket.sendall(noise)
            client.end()
        a, b = Client(address), Client(address)
        a.send(name="a")
        b.send(name="b")
        first = [a.receive(), b.receive()]
        assert [order["what"] for order in first[0]["orders"]] == ["begin", "step", "share"]
        for client, bundle in zip((a, b), first, strict=True):
            client.send(ticket=bundle["ticket"], steps=1)
        merge = Order(**a.receive()["orders"][0])
        assert (merge.what, merge.n, tuple(merge.members)) == ("merge", 1, ("a", "b"))
        assert b.receive()["orders"][0]["what"] == "merge"
        a.socket.sendall(b'{"ticket": ')  # It is killed in the middle of a message.
        a.end()
        until(lambda: pair.n == 0, "the coordinator to notice")
        again = Client(address)
        again.send(name="a")
        assert [order["what"] for order in again.receive()["orders"]] == ["begin", "step", "share"]
        server.call(lambda coordinator, now: coordinator.end(now))
        assert [order["what"] for order in again.receive()["orders"]] == ["save"]
        for client in (again, b):
            client.end()


def test_a_new_process_may_connect_before_the_old_one_has_ended(address: str, pair: Coordinator) -> None:
    with CoordinatorServer(pair, address):
        clients = [Client(address) for _ in range(3)]
        for client, name in zip(clients, "aba", strict=True):
            client.send(name=name)
            if name == "b":
                clients[0].receive()
                client.receive()
        assert clients[2].receive()["orders"][0]["what"] == "begin"
        clients[0].send(ticket=1, steps=0)
        clients[0].end()  # This connection was replaced already.
        assert clients[1].receive()["orders"][0]["what"] == "begin"
        for client in clients[1:]:
            client.end()


# -- results ----------------------------------------------------------------------------------------------------------


def ledger() -> Ledger:
    """Return two workers' steps of 1 s from 10 s on. At 15 s they return to the state of 12 s, and continue at 17 s."""
    found = Ledger()
    for n in range(1, 6):
        steps = [Step(9.0 + n, name) for name in "ab"]
        found.made += steps
        found.commit(n, steps, 9.0 + n)
    found.roll_back(3, 15.0)
    for n in (4, 5):
        steps = [Step(13.0 + n, name) for name in "ab"]
        found.made += steps
        found.commit(n, steps, 13.0 + n)
    return found


def test_steps_that_were_rolled_back_are_not_useful() -> None:
    found = summarise("data-parallel", ledger(), [(14.5, "b")], 10.5, 18.5, {"a": 1.0, "b": 2.0}, 7, 3.0)
    # The steps of seconds 11, 12, 17 and 18 count. Those of 13 and 14 were rolled back, and that of 10 is too early.
    assert (found.steps_useful, found.steps_made) == (8, 12)
    assert found.goodput == pytest.approx(8 * 1.0 / (8.0 * 2))
    assert found.tokens == 10 * 7
    assert found.return_seconds_median == found.return_seconds_worst == 2.5
    assert found.pause_seconds_worst == 3.0
    by_second = dict(found.curve)
    assert (by_second[0.0], by_second[4.0], by_second[4.8], by_second[8.0]) == (0, 8, 4, 8)


def test_a_worker_returns_with_its_next_step() -> None:
    for kills, worst in (
        ([], math.nan),
        ([(18.2, "a")], math.nan),
        ([(15.0, "c")], math.nan),
        ([(14.5, "b"), (16.0, "b")], 1.0),
    ):
        found = summarise("x", ledger(), kills, 10.5, 18.5, {"a": 1.0, "b": 1.0}, 7, 3.0)
        assert found.return_seconds_worst == pytest.approx(worst, nan_ok=True), kills


def test_a_pause_may_touch_the_edge_of_the_window() -> None:
    assert longest_pause([1.0, 2.0], 0.0, 5.0) == 3.0
    assert longest_pause([], 0.0, 5.0) == 5.0
    assert longest_pause([-1.0, 4.5, 9.0], 0.0, 5.0) == 4.5
    assert sampled([], 0.0, 1.0, 3)[-1] == (1.0, 3)
