"""Baselines under a storm's faults: real processes, the socket between them, and what is made of what they did."""

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
from archipelago.ops.chaos.baselines import Ran, longest_pause, ran, sampled
from archipelago.ops.chaos.lockstep import Fleet, Hub, ride_in_step, theirs
from archipelago.ops.chaos.lockstep_worker import LockstepOptions, first_in, params_in
from archipelago.ops.chaos.lockstep_worker import main as follow
from archipelago.ops.chaos.main import ChaosOptions
from archipelago.ops.chaos.page import COLUMNS, compared, page, ways, write
from archipelago.ops.chaos.rendezvous import WAYS, DataParallel, Group, Ledger, Order, Setting, Step, Way
from archipelago.ops.chaos.report import Storm, as_ran, figures
from archipelago.ops.chaos.schedule import Fault, Kind
from archipelago.ops.chaos.storm import Plan, await_training
from tests.conftest import Until
from tests.ops.chaos.test_chaos_report import storm
from tests.small import SMALL

NAMES = ("island-0", "island-1")


@pytest.fixture
def config() -> RunConfig:
    data = replace(SMALL.data, corpus="small-text", batch_size=2, sequence_length=16)
    return replace(SMALL, data=data, sync=replace(SMALL.sync, interval=4))


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs outlive their workers."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def keeps_compiled(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))


@pytest.mark.processes
@pytest.mark.usefixtures("keeps_compiled", "corpus")
@pytest.mark.parametrize("way", WAYS)
def test_real_workers_come_through_a_kill_a_stop_and_a_cut(
    way: Way, config: RunConfig, tmp_path: Path, until: Until
) -> None:
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.05), 1.0, checkpoint_seconds=0.1)
    with ExitStack() as stack:
        fleet = Fleet(plan, way, config, stack)
        for worker in fleet.workers:
            fleet.start(worker)
        await_training(fleet, fleet.workers, fleet.trains)
        ledger = fleet.group.ledger

        def tended(holds: Callable[[], bool], what: str) -> None:
            def look() -> bool:
                fleet.tend()
                return holds()

            until(look, what, 60)

        def meets(name: str, kind: Kind, seconds: float, over: str) -> None:
            """The fault, its end, a step of that worker's own after it, and one that is in the parameters."""
            fleet.befall(fleet.targets[name], Fault(0.0, kind, name, seconds))
            begun = len(fleet.happenings)
            tended(lambda: over in [h.what for h in fleet.happenings[begun:]], f"{name} {over}")
            made, merged = len(ledger.made), fleet.group.n
            tended(lambda: name in {s.worker for s in ledger.made[made:]}, f"a step of {name}")
            tended(lambda: fleet.group.n > merged, "an exchange")

        meets("island-1", "kill", 0.2, "start")
        meets("island-0", "stop", 0.2, "continue")
        meets("island-1", "partition", 0.2, "partition over")
        fleet.calm()
        final = fleet.finish()
    files = plan.folder / "files"
    first, last = first_in(files), params_in(files, final)
    assert {name: tensor.shape for name, tensor in last.items()} == {n: tensor.shape for n, tensor in first.items()}
    assert all(bool(jnp.all(jnp.isfinite(last[name])) and jnp.any(last[name] != first[name])) for name in last)
    exchange = json.loads((plan.folder / "setting.json").read_text())["exchange"]
    assert not Path(exchange).exists(), "memory is given back"


@pytest.mark.processes
@pytest.mark.usefixtures("keeps_compiled", "corpus")
def test_a_ride_is_told_in_figures(config: RunConfig, tmp_path: Path) -> None:
    """What they come to, not how fast: that depends on what else the machine does."""
    faults = (Fault(0.2, "throttle", "island-0", 5.0), Fault(0.3, "kill", "merger", 0.2),
              Fault(0.5, "stop", "island-0", 0.5))  # fmt: skip
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.05), 3.0, faults, checkpoint_seconds=0.1)
    found = ride_in_step(plan, "data-parallel", lambda: False)
    assert found.seconds >= 3.0
    assert 0 < found.steps_useful <= found.steps_made
    assert found.goodput == pytest.approx(found.steps_useful * 0.05 / (2 * found.seconds))
    assert found.tokens >= found.steps_useful * config.tokens_per_step
    assert math.isfinite(found.bits_per_byte)
    assert found.pause_seconds_worst >= 0.4, "all wait for one that is stopped"
    assert found.curve[-1][1] == found.steps_useful


@pytest.mark.processes
def test_a_worker_that_cannot_begin_ends_it_with_its_last_words(
    config: RunConfig, corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("storm", tmp_path / "storm", config, dict.fromkeys(NAMES, 0.02), 5.0)
    monkeypatch.setattr(Setting, "to_text", lambda self: "{}")
    with pytest.raises(ArchipelagoError, match=r"does not train.*no setting of a group"):
        ride_in_step(plan, "data-parallel", lambda: False)


def test_a_worker_without_its_setting_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        follow(LockstepOptions(tmp_path / "none.json", "island-0"))


# -- which faults are theirs ------------------------------------------------------------------------------------------


def test_only_kills_stops_and_cuts_of_workers_are_theirs() -> None:
    kinds = ("kill", "stop", "partition", "reset", "half-open", "throttle", "delay", "disk")
    faults = [Fault(float(n), kind, "island-0", 30.0) for n, kind in enumerate(kinds)]  # type: ignore[arg-type]
    others = [Fault(1.0, "kill", "redis", 1.0), Fault(1.0, "stop", "merger", 1.0), Fault(2.0, "clock", "redis", 1.0)]
    found = theirs([*faults, *others], NAMES)
    assert [(fault.kind, fault.seconds) for fault in found] == [
        ("kill", 30.0), ("stop", 30.0), ("partition", 30.0), ("reset", 30.0), ("half-open", 20.0),
    ]  # fmt: skip


# -- the socket -------------------------------------------------------------------------------------------------------


class Client:
    """What a worker is to the hub."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30.0)
        self.socket.connect(address)
        self.lines = self.socket.makefile("r")

    def say(self, **message: object) -> None:
        self.socket.sendall((json.dumps(message) + "\n").encode())

    def hear(self) -> Any:
        return json.loads(self.lines.readline())

    def end(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hub-") as folder:  # a socket's path is to be short
        yield f"{folder}/socket"


@pytest.fixture
def group() -> Group:
    return DataParallel(("a", "b"), 10)


def test_workers_hear_what_to_do_and_are_heard(address: str, group: Group, until: Until) -> None:
    with Hub(group, address) as hub:
        a, b = Client(address), Client(address)
        a.say(name="a")
        b.say(name="b")
        first = [a.hear(), b.hear()]
        assert [order["what"] for order in first[0]["orders"]] == ["begin", "work", "offer"]
        for client, bundle in zip((a, b), first, strict=True):
            client.say(ticket=bundle["ticket"], steps=1)
        merge = Order(**a.hear()["orders"][0])
        assert (merge.what, merge.n, tuple(merge.members)) == ("merge", 1, ("a", "b"))
        assert b.hear()["orders"][0]["what"] == "merge"
        a.socket.sendall(b'{"ticket": ')  # killed in the middle of a word
        a.end()
        until(lambda: group.n == 0, "the group has noticed")
        again = Client(address)
        again.say(name="a")
        assert [order["what"] for order in again.hear()["orders"]] == ["begin", "work", "offer"]
        hub.tell(lambda group, now: group.end(now))
        assert [order["what"] for order in again.hear()["orders"]] == ["keep"]
        for client in (again, b):
            client.end()


def test_a_new_process_may_come_before_the_end_of_the_old_one_is_seen(address: str, group: Group) -> None:
    with Hub(group, address):
        clients = [Client(address) for _ in range(3)]
        for client, name in zip(clients, "aba", strict=True):
            client.say(name=name)
            if name == "b":
                clients[0].hear()
                client.hear()
        assert clients[2].hear()["orders"][0]["what"] == "begin"
        clients[0].say(ticket=1, steps=0)
        clients[0].end()  # whoever that was: it is not the one of today
        assert clients[1].hear()["orders"][0]["what"] == "begin"
        for client in clients[1:]:
            client.end()


def test_a_stranger_and_noise_are_nobody(address: str, group: Group, until: Until) -> None:
    with Hub(group, address):
        for noise in (b'{"name": "z"}\n', b"noise\n", b""):
            client = Client(address)
            client.socket.sendall(noise)
            client.end()
        a, b = Client(address), Client(address)
        a.say(name="a")
        b.say(name="b")
        assert a.hear()["ticket"] == 1
        for client in (a, b):
            client.end()
        until(lambda: not group._up, "both are gone")


# -- what is made of it -----------------------------------------------------------------------------------------------


def ledger() -> Ledger:
    """Two workers, steps of 1 s from second 10 on; at 15 it goes back to what was at 12, and on from 17."""
    found = Ledger()
    for n in range(1, 6):
        steps = [Step(9.0 + n, name) for name in "ab"]
        found.made += steps
        found.put(n, steps, 9.0 + n)
    found.back_to(3, 15.0)
    for n in (4, 5):
        steps = [Step(13.0 + n, name) for name in "ab"]
        found.made += steps
        found.put(n, steps, 13.0 + n)
    return found


def test_what_was_taken_back_is_not_useful() -> None:
    found = ran("data-parallel", ledger(), [(14.5, "b")], 10.5, 18.5, {"a": 1.0, "b": 2.0}, 7, 3.0)
    # Of the window: seconds 11, 12, 17 and 18 of both; 13 and 14 went with the kill; second 10 is before it.
    assert (found.steps_useful, found.steps_made) == (8, 12)
    assert found.goodput == pytest.approx(8 * 1.0 / (8.0 * 2))
    assert found.tokens == 10 * 7
    assert found.return_seconds_median == found.return_seconds_worst == 2.5
    assert found.pause_seconds_worst == 3.0
    by_second = dict(found.curve)
    assert (by_second[0.0], by_second[4.0], by_second[4.8], by_second[8.0]) == (0, 8, 4, 8)


def test_who_was_not_killed_or_did_not_return_has_no_time_for_it() -> None:
    for kills in ([], [(18.2, "a")], [(15.0, "c")]):
        assert math.isnan(ran("x", ledger(), kills, 10.5, 18.5, {"a": 1.0, "b": 1.0}, 7, 3.0).return_seconds_median)
    twice = ran("x", ledger(), [(14.5, "b"), (16.0, "b")], 10.5, 18.5, {"a": 1.0, "b": 1.0}, 7, 3.0)
    assert twice.return_seconds_worst == 1.0


def test_a_pause_may_be_at_an_edge() -> None:
    assert longest_pause([1.0, 2.0], 0.0, 5.0) == 3.0
    assert longest_pause([], 0.0, 5.0) == 5.0
    assert longest_pause([-1.0, 4.5, 9.0], 0.0, 5.0) == 4.5
    assert sampled([], 0.0, 1.0, 3)[-1] == (1.0, 3)


def test_ours_is_told_as_theirs_are() -> None:
    one = storm()
    found = as_ran(one, figures(one))
    assert (found.steps_useful, found.steps_made, found.tokens) == (170, 180, 1900)
    assert found.goodput == pytest.approx(0.85)
    assert found.return_seconds_median == pytest.approx(2.05)
    assert found.pause_seconds_worst == pytest.approx(0.1)
    assert found.curve[-1][1] == 170
    assert found.curve[-2][1] == 140, "of 190 that were seen to be merged 50 were so before the window"


def theirs_ran(storm: Storm) -> list[Ran]:
    return [replace(as_ran(storm, figures(storm)), way=way, goodput=0.1 * n) for n, way in enumerate(WAYS, 2)]


def test_report_and_page_have_a_row_for_each_that_ran(tmp_path: Path) -> None:
    one = storm()
    found = figures(one, None, theirs_ran(one))
    assert [way.way for way in ways(one, found)] == ["islands", *reversed(WAYS)]
    rows = compared(one, found)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[1] for row in rows] == ["85.0%", "40.0%", "30.0%", "20.0%"]
    write(tmp_path, one, found, "archipelago chaos --baselines")
    data = json.loads((tmp_path / "report.json").read_text())
    assert [entry["way"] for entry in data["baselines"]] == list(WAYS)
    assert (tmp_path / "baselines.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "storm.html").read_text()
    assert text.count("data:image/png") == 2
    assert "computed" not in text
    for row in rows:
        assert all(cell in text for cell in row)


def test_where_none_ran_the_computed_ones_are_called_that(tmp_path: Path) -> None:
    one = storm()
    write(tmp_path, one, figures(one), "archipelago chaos")
    assert not (tmp_path / "baselines.png").exists()
    text = page(one, figures(one), [b""], "archipelago chaos")
    assert "synchronous DiLoCo, computed" in text
    assert json.loads((tmp_path / "report.json").read_text())["baselines"] == []


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("asked", [False, True])
def test_the_command_rides_them_under_the_storms_own_faults(
    asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []

    def ride(plan: Plan, stopped: Callable[[], bool]) -> Storm:
        plans.append(plan)
        return storm()

    def in_step(plan: Plan, way: Way, stopped: Callable[[], bool]) -> Ran:
        plans.append(plan)
        return theirs_ran(storm())[WAYS.index(way)]

    monkeypatch.setattr(main, "ride", ride)
    monkeypatch.setattr(main, "ride_in_step", in_step)
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
def test_a_baseline_that_fails_leaves_the_storms_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def in_step(plan: Plan, way: Way, stopped: Callable[[], bool]) -> Ran:
        raise ArchipelagoError("the storm was interrupted")

    monkeypatch.setattr(main, "ride", lambda plan, stopped: storm())
    monkeypatch.setattr(main, "ride_in_step", in_step)
    monkeypatch.setattr(main, "require_usable", lambda config: None)
    with pytest.raises(ArchipelagoError, match="interrupted"):
        main.main(ChaosOptions(islands=2, undisturbed=False, baselines=True))
    assert json.loads((tmp_path / "runs/chaos/report.json").read_text())["goodput"] == pytest.approx(0.85)


def test_without_a_steps_duration_there_is_nothing_to_count_by() -> None:
    with pytest.raises(ConfigError, match="--baselines"):
        main.main(ChaosOptions(step_seconds=0.0, baselines=True))
