"""Baselines under the faults of a storm: real processes, the coordinator's socket, and the results."""

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

import jax.numpy as jnp
import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.chaos import main
from archipelago.ops.chaos.lockstep.coordinator import METHODS, Coordinator, Ledger, Method, Order, Step
from archipelago.ops.chaos.lockstep.data_parallel import DataParallel
from archipelago.ops.chaos.lockstep.driver import CoordinatorServer, WorkerGroup, run_baseline, worker_faults
from archipelago.ops.chaos.lockstep.files import first_in, params_in
from archipelago.ops.chaos.lockstep.group import GroupSettings
from archipelago.ops.chaos.lockstep.results import MethodResult, longest_pause, sampled, summarise
from archipelago.ops.chaos.lockstep.worker import WorkerOptions
from archipelago.ops.chaos.lockstep.worker import main as worker_main
from archipelago.ops.chaos.main import ChaosOptions
from archipelago.ops.chaos.processes import Plan, await_ready
from archipelago.ops.chaos.report.figures import as_method_result, figures
from archipelago.ops.chaos.report.page import page, write
from archipelago.ops.chaos.report.record import StormRecord
from archipelago.ops.chaos.report.tables import COLUMNS, comparison, methods
from archipelago.ops.chaos.schedule import Fault, Kind
from tests.conftest import Until
from tests.failing import failing
from tests.ops.chaos.test_storm_report import storm
from tests.small import SMALL

NAMES = ("island-0", "island-1")


@pytest.fixture
def config() -> RunConfig:
    data = replace(SMALL.data, corpus="small-text", batch_size=2, sequence_length=16)
    return replace(SMALL, data=data, sync=replace(SMALL.sync, interval=4))


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which compiled programs are shared by all workers."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def keeps_compiled(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("keeps_compiled", "corpus")
@pytest.mark.parametrize("method", METHODS)
def test_real_workers_survive_a_kill_a_stop_and_a_cut(
    method: Method, config: RunConfig, tmp_path: Path, until: Until
) -> None:
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.05), 1.0, checkpoint_seconds=0.1)
    with ExitStack() as stack:
        group = WorkerGroup(plan, method, config, stack)
        for worker in group.workers:
            group.start(worker)
        await_ready(group, group.workers, group.is_training)
        ledger = group.coordinator.ledger

        def polled(holds: Callable[[], bool], what: str) -> None:
            def poll() -> bool:
                group.poll()
                return holds()

            until(poll, what)

        def inject_and_recover(name: str, kind: Kind, seconds: float, over: str) -> None:
            """Inject the fault, and wait for its end, for a step of that worker, and for an exchange."""
            group.inject(group.targets[name], Fault(0.0, kind, name, seconds))
            begun = len(group.events)
            polled(lambda: over in [h.what for h in group.events[begun:]], f"{name} {over}")
            made, merged = len(ledger.made), group.coordinator.n
            polled(lambda: name in {s.worker for s in ledger.made[made:]}, f"a step of {name}")
            polled(lambda: group.coordinator.n > merged, "an exchange")

        inject_and_recover("island-1", "kill", 0.2, "start")
        inject_and_recover("island-0", "stop", 0.2, "continue")
        inject_and_recover("island-1", "partition", 0.2, "partition over")
        group.end_faults()
        final = group.finish()
    files = plan.folder / "files"
    first, last = first_in(files), params_in(files, final)
    assert {name: tensor.shape for name, tensor in last.items()} == {n: tensor.shape for n, tensor in first.items()}
    assert all(bool(jnp.all(jnp.isfinite(last[name])) and jnp.any(last[name] != first[name])) for name in last)
    exchange = json.loads((plan.folder / "settings.json").read_text())["exchange"]
    assert not Path(exchange).exists(), "the memory was not freed"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("keeps_compiled", "corpus")
def test_a_baseline_has_a_result(config: RunConfig, tmp_path: Path) -> None:
    """The test asserts no speed, which depends on the load of the machine."""
    faults = (Fault(0.2, "throttle", "island-0", 5.0), Fault(0.3, "kill", "merger", 0.2),
              Fault(0.5, "stop", "island-0", 0.5))  # fmt: skip
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.05), 3.0, faults, checkpoint_seconds=0.1)
    found = run_baseline(plan, "data-parallel", lambda: False)
    assert found.seconds >= 3.0
    assert 0 < found.steps_useful <= found.steps_made
    assert found.goodput == pytest.approx(found.steps_useful * 0.05 / (2 * found.seconds))
    assert found.tokens >= found.steps_useful * config.tokens_per_step
    assert math.isfinite(found.bits_per_byte)
    assert found.pause_seconds_worst >= 0.4, "the others did not wait for the stopped worker"
    assert found.curve[-1][1] == found.steps_useful


@pytest.mark.processes
def test_a_worker_that_cannot_start_ends_the_baseline(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.02), 5.0)
    monkeypatch.setattr(GroupSettings, "to_text", lambda self: "{}")
    with failing(ArchipelagoError, "chaos.not-ready"):
        run_baseline(plan, "data-parallel", lambda: False)


def test_a_worker_needs_its_settings(tmp_path: Path) -> None:
    with failing(ConfigError, "chaos.unreadable-file"):
        worker_main(WorkerOptions(tmp_path / "none.json", "island-0"))


# -- faults of workers ------------------------------------------------------------------------------------------------


def test_only_kills_stops_and_cuts_apply_to_workers() -> None:
    kinds = ("kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk")
    faults = [Fault(float(n), kind, "island-0", 30.0) for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    others = [Fault(1.0, "kill", "redis", 1.0), Fault(1.0, "stop", "merger", 1.0), Fault(2.0, "clock", "redis", 1.0)]
    found = worker_faults([*faults, *others], NAMES)
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
def coordinator() -> Coordinator:
    return DataParallel(("a", "b"), 10)


def test_workers_receive_orders_and_report(address: str, coordinator: Coordinator, until: Until) -> None:
    with CoordinatorServer(coordinator, address) as server:
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
        until(lambda: coordinator.n == 0, "the coordinator to notice")
        again = Client(address)
        again.send(name="a")
        assert [order["what"] for order in again.receive()["orders"]] == ["begin", "step", "share"]
        server.call(lambda coordinator, now: coordinator.end(now))
        assert [order["what"] for order in again.receive()["orders"]] == ["save"]
        for client in (again, b):
            client.end()


def test_a_new_process_may_connect_before_the_old_one_has_ended(address: str, coordinator: Coordinator) -> None:
    with CoordinatorServer(coordinator, address):
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


def test_unknown_workers_and_noise_are_ignored(address: str, coordinator: Coordinator, until: Until) -> None:
    with CoordinatorServer(coordinator, address):
        for noise in (b'{"name": "z"}\n', b"noise\n", b""):
            client = Client(address)
            client.socket.sendall(noise)
            client.end()
        a, b = Client(address), Client(address)
        a.send(name="a")
        b.send(name="b")
        assert a.receive()["ticket"] == 1
        for client in (a, b):
            client.end()
        until(lambda: not coordinator._up, "both to be removed")


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


def test_without_a_return_there_is_no_return_time() -> None:
    for kills in ([], [(18.2, "a")], [(15.0, "c")]):
        assert math.isnan(
            summarise("x", ledger(), kills, 10.5, 18.5, {"a": 1.0, "b": 1.0}, 7, 3.0).return_seconds_median
        )
    twice = summarise("x", ledger(), [(14.5, "b"), (16.0, "b")], 10.5, 18.5, {"a": 1.0, "b": 1.0}, 7, 3.0)
    assert twice.return_seconds_worst == 1.0


def test_a_pause_may_touch_the_edge_of_the_window() -> None:
    assert longest_pause([1.0, 2.0], 0.0, 5.0) == 3.0
    assert longest_pause([], 0.0, 5.0) == 5.0
    assert longest_pause([-1.0, 4.5, 9.0], 0.0, 5.0) == 4.5
    assert sampled([], 0.0, 1.0, 3)[-1] == (1.0, 3)


def test_our_run_has_the_same_figures_as_baselines() -> None:
    one = storm()
    found = as_method_result(one, figures(one))
    assert (found.steps_useful, found.steps_made, found.tokens) == (170, 180, 1900)
    assert found.goodput == pytest.approx(0.85)
    assert found.return_seconds_median == pytest.approx(2.05)
    assert found.pause_seconds_worst == pytest.approx(0.1)
    assert found.curve[-1][1] == 170
    assert found.curve[-2][1] == 140, "50 of the 190 steps were merged before the window"


def baseline_results(storm: StormRecord) -> list[MethodResult]:
    return [
        replace(as_method_result(storm, figures(storm)), method=method, goodput=0.1 * n)
        for n, method in enumerate(METHODS, 2)
    ]


def test_report_and_page_have_a_row_for_each_method(tmp_path: Path) -> None:
    one = storm()
    found = figures(one, None, baseline_results(one))
    assert [result.method for result in methods(one, found)] == ["islands", *reversed(METHODS)]
    rows = comparison(one, found)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[1] for row in rows] == ["85.0%", "40.0%", "30.0%", "20.0%"]
    write(tmp_path, one, found, "archipelago chaos --baselines")
    data = json.loads((tmp_path / "report.json").read_text())
    assert [entry["method"] for entry in data["baselines"]] == list(METHODS)
    assert (tmp_path / "baselines.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "storm.html").read_text()
    assert text.count("data:image/png") == 2
    for row in rows:
        assert all(cell in text for cell in row)


def test_without_baselines_the_page_shows_estimates(tmp_path: Path) -> None:
    one = storm()
    write(tmp_path, one, figures(one), "archipelago chaos")
    assert not (tmp_path / "baselines.png").exists()
    text = page(one, figures(one), [b""], "archipelago chaos")
    found = figures(one).estimates
    assert found is not None
    assert f"<td class=n>{found.diloco:.1%}</td>" in text
    assert json.loads((tmp_path / "report.json").read_text())["baselines"] == []


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("asked", [False, True])
def test_the_command_runs_baselines_under_the_faults_of_the_storm(
    asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []

    def run(plan: Plan, stopped: Callable[[], bool]) -> StormRecord:
        plans.append(plan)
        return storm()

    def baseline(plan: Plan, method: Method, stopped: Callable[[], bool]) -> MethodResult:
        plans.append(plan)
        return baseline_results(storm())[METHODS.index(method)]

    monkeypatch.setattr(main, "run_storm", run)
    monkeypatch.setattr(main, "run_baseline", baseline)
    monkeypatch.setattr(main, "require_usable", lambda config: None)
    assert main.main(ChaosOptions(islands=2, slow=2.0, undisturbed=False, baselines=asked)) == 0
    ours, *others = plans
    assert len(others) == (3 if asked else 0)
    assert len({plan.folder for plan in plans}) == len(plans)
    for plan in others:
        assert plan.faults == ours.faults and plan.faults
        assert plan.step_seconds == ours.step_seconds
        assert plan.config == ours.config
    said = capsys.readouterr().err
    assert ("elastic data-parallel   30.0%" in said) == asked
    assert (tmp_path / "runs/chaos/baselines.png").exists() == asked


@pytest.mark.usefixtures("handlers")
def test_a_failed_baseline_leaves_the_report_of_the_storm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def baseline(plan: Plan, method: Method, stopped: Callable[[], bool]) -> MethodResult:
        raise ArchipelagoError("interrupted", code="chaos.interrupted")

    monkeypatch.setattr(main, "run_storm", lambda plan, stopped: storm())
    monkeypatch.setattr(main, "run_baseline", baseline)
    monkeypatch.setattr(main, "require_usable", lambda config: None)
    with failing(ArchipelagoError, "chaos.interrupted"):
        main.main(ChaosOptions(islands=2, undisturbed=False, baselines=True))
    assert json.loads((tmp_path / "runs/chaos/report.json").read_text())["goodput"] == pytest.approx(0.85)


def test_baselines_need_a_step_duration() -> None:
    with failing(ConfigError, "chaos.no-step-seconds"):
        main.main(ChaosOptions(step_seconds=0.0, baselines=True))
