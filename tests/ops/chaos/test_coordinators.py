"""Coordinators and workers that train in lockstep, without processes: exact results, waits, and random faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.models.registry import Params, build
from archipelago.islands.tasks.ours import our_work
from archipelago.ops.chaos.lockstep.coordinator import METHODS, Bundle, Coordinator, Method, Order
from archipelago.ops.chaos.lockstep.data_parallel import DataParallel, Elastic
from archipelago.ops.chaos.lockstep.diloco import Diloco
from archipelago.ops.chaos.lockstep.files import Slots, params_in, save_first
from archipelago.ops.chaos.lockstep.group import GroupSettings, coordinator_of
from archipelago.ops.chaos.lockstep.trainees import TRAINEES, Trainee
from archipelago.ops.chaos.lockstep.worker import Follower
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import Point
from tests.failing import failing
from tests.small import SMALL
from tests.tiers import examples

NAMES = ("a", "b", "c")
PARALLEL: tuple[Method, ...] = ("data-parallel", "elastic data-parallel")
SAVE_EVERY, INTERVAL = 4, 3
#: Settings whose folders do not exist. All tests share them, so that programs are compiled once.
SETTINGS = GroupSettings(
    "data-parallel", "{}", NAMES, dict.fromkeys(NAMES, 0.1), "/somewhere", "/else",
    baselines.DILOCO_RATE, baselines.DILOCO_MOMENTUM,
)  # fmt: skip


def coordinator(method: Method) -> Coordinator:
    match method:
        case "data-parallel":
            return DataParallel(NAMES, SAVE_EVERY)
        case "elastic data-parallel":
            return Elastic(NAMES, SAVE_EVERY, 1.0)
        case "synchronous DiLoCo":
            return Diloco(NAMES, INTERVAL)


@dataclass
class Workers:
    """The workers of a coordinator in this process. Each carries out its bundles in the order that the test wants."""

    coordinator: Coordinator
    #: Starts a worker of that name and returns the function that carries out its orders.
    make: Callable[[str], Callable[[Order], None]]
    now: float = 0.0
    up: dict[str, Callable[[Order], None]] = field(default_factory=dict)
    waiting: dict[str, list[Bundle]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)

    def start(self, *names: str) -> None:
        for name in names or NAMES:
            self.up[name], self.waiting[name] = self.make(name), []
            self.coordinator.add(name, self.now)
            self.collect()

    def kill(self, name: str) -> None:
        del self.up[name], self.waiting[name]
        self.stopped.discard(name)
        self.coordinator.remove(name, self.now)
        self.collect()

    def collect(self) -> None:
        for bundle in self.coordinator.take():
            self.waiting[bundle.to].append(bundle)

    def able(self) -> list[str]:
        return [name for name in NAMES if self.waiting.get(name) and name not in self.stopped]

    def do(self, name: str, orders: int | None = None) -> None:
        """Carry out its next bundle, or only the first orders of it, without a report."""
        bundle = self.waiting[name].pop(0)
        for order in bundle.orders[:orders]:
            self.up[name](order)
        if orders is None:
            steps = sum(order.what == "step" for order in bundle.orders)
            self.coordinator.complete(name, bundle.ticket, steps, self.now)
            self.collect()

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.tick(self.now)
        self.collect()

    def until(self, n: int) -> None:
        """Let all workers carry out their bundles in turn, until `n` exchanges are done."""
        while self.coordinator.n < n:
            assert self.able(), "no worker can continue"
            self.now += 0.1
            for name in self.able():
                self.do(name)

    def end(self) -> str:
        self.coordinator.end(self.now)
        self.collect()
        while self.coordinator.final is None:
            assert self.able(), "the training does not end"
            for name in self.able():
                self.do(name)
        return self.coordinator.final


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL,
        data=replace(SMALL.data, corpus="small-text", batch_size=2, sequence_length=16),
        inner=replace(SMALL.inner, steps=16, warmup_steps=4),
        sync=replace(SMALL.sync, interval=4),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for slots and files."""
    (tmp_path / "group").mkdir()
    return tmp_path / "group"


class Make:
    """Starts workers with real arithmetic, slots and files. One trainee of each name serves all, to compile once."""

    def __init__(self, config: RunConfig, corpus: OpenCorpus, folder: Path) -> None:
        self._config, self._corpus, self._folder = config, corpus, folder
        self.trainees: dict[str, Trainee] = {}

    def __call__(self, method: Method) -> Callable[[str], Callable[[Order], None]]:
        group_settings = replace(SETTINGS, method=method, config=self._config.to_json())
        first = build(self._config.model).init(self._config.seed)
        self.trainees = {name: TRAINEES[method](group_settings, name, self._corpus, first) for name in NAMES}
        return self._start

    def _start(self, name: str) -> Callable[[Order], None]:
        trainee = self.trainees[name]
        follower = Follower(trainee, Slots(self._folder, name, trainee.vector().size), self._folder)
        follower.warm_up()  # It also resets the trainee, as a new process would.
        return follower.do


@pytest.fixture
def make(config: RunConfig, corpus: OpenCorpus, folder: Path) -> Make:
    return Make(config, corpus, folder)


Ended = Callable[[Workers], Params]


@pytest.fixture
def ended(config: RunConfig, folder: Path) -> Ended:
    """Return a function that ends the training and returns the parameters."""
    save_first(folder, build(config.model).init(config.seed))
    return lambda workers: params_in(folder, workers.end())


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


def same(found: Params, wanted: Params) -> bool:
    return all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.full
def test_lockstep_equals_data_parallel_in_one_process(
    make: Make, config: RunConfig, corpus: OpenCorpus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = in_one_process(monkeypatch, baselines.data_parallel, our_work(config, corpus))
    first = build(config.model).init(config.seed)
    for method in PARALLEL:
        workers = Workers(coordinator(method), make(method))
        workers.start()
        workers.until(config.inner.steps)
        found = ended(workers)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], atol=2e-5)
        assert max(np.abs(wanted[name] - first[name]).max() for name in wanted) > 1e-2, "the parameters did not change"


@pytest.mark.full
def test_lockstep_equals_diloco_in_one_process(
    make: Make, config: RunConfig, corpus: OpenCorpus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, sync=replace(config.sync, interval=INTERVAL))
    wanted = in_one_process(monkeypatch, baselines.diloco, our_work(config, corpus))
    workers = Workers(coordinator("synchronous DiLoCo"), make("synchronous DiLoCo"))
    workers.start()
    workers.until(config.inner.steps // INTERVAL)
    found = ended(workers)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("method", ["data-parallel", "synchronous DiLoCo"])
def test_kills_change_no_bit_of_the_parameters(method: Method, make: Make, ended: Ended) -> None:
    """The text position and the moments roll back with the parameters."""
    total = 7 if method == "data-parallel" else 3
    undisturbed = Workers(coordinator(method), make(method))
    undisturbed.start()
    undisturbed.until(total)
    wanted = ended(undisturbed)
    workers = Workers(coordinator(method), make(method))
    workers.start()
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
    assert same(ended(workers), wanted)
    assert (
        len(workers.coordinator.ledger.made)
        > len(workers.coordinator.ledger.useful)
        == len(undisturbed.coordinator.ledger.useful)
    )


def test_an_elastic_group_continues_with_fewer_and_admits_a_returning_worker(make: Make, ended: Ended) -> None:
    workers = Workers(coordinator("elastic data-parallel"), make("elastic data-parallel"))
    workers.start()
    workers.until(2)
    workers.kill("b")
    workers.until(5)
    assert [step.worker for step in workers.coordinator.ledger.useful] == [*NAMES, *NAMES, *"acacac"]
    workers.start("b")
    workers.until(8)
    assert [step.worker for step in workers.coordinator.ledger.useful][-3:] == [*NAMES]
    params = ended(workers)
    while able := workers.able():
        for name in able:
            workers.do(name)
    alike = [make.trainees[name].shared_state()[0] for name in NAMES]
    assert all(jax.tree.all(jax.tree.map(np.array_equal, alike[0], other)) for other in alike[1:])
    assert same(params, alike[0].params)


# -- waits ------------------------------------------------------------------------------------------------------------


def idle(method: Method) -> Workers:
    """Return started workers whose orders do nothing."""
    workers = Workers(coordinator(method), lambda name: lambda order: None)
    workers.start()
    return workers


@pytest.mark.parametrize("method", METHODS)
def test_only_diloco_begins_before_all_workers_are_there(method: Method) -> None:
    workers = Workers(coordinator(method), lambda name: lambda order: None)
    workers.start("a", "b")
    for _ in range(10):
        for name in workers.able():
            workers.do(name)
    workers.pass_seconds(60.0)
    assert workers.coordinator.n == 0
    made = {step.worker for step in workers.coordinator.ledger.made}
    assert made == ({"a", "b"} if method == "synchronous DiLoCo" else set())
    workers.start("c")
    workers.until(2)


@pytest.mark.parametrize("method", ["data-parallel", "synchronous DiLoCo"])
@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_a_stopped_or_cut_worker_stalls_all(method: Method, how: str) -> None:
    workers = idle(method)
    workers.until(2)
    if how == "stopped":
        workers.stopped.add("c")
    else:
        workers.coordinator.cut("c")
    while able := workers.able():
        for name in able:
            workers.do(name)
    workers.pass_seconds(60.0)
    assert (workers.coordinator.n, workers.able()) == (2, [])
    extra = [step.worker for step in workers.coordinator.ledger.made[len(workers.coordinator.ledger.useful) :]]
    if method == "synchronous DiLoCo":
        assert extra.count("c") == (0 if how == "stopped" else INTERVAL), (
            "a cut worker must make its own steps, and a stopped one none"
        )
    workers.stopped.clear()
    workers.coordinator.heal("c", workers.now)
    workers.collect()
    workers.until(4)


@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_an_elastic_group_waits_a_second_for_a_silent_worker(how: str) -> None:
    workers = idle("elastic data-parallel")
    workers.until(2)
    if how == "stopped":
        workers.stopped.add("a")
    else:
        workers.coordinator.cut("a")
    while able := workers.able():
        for name in able:
            workers.do(name)
    workers.pass_seconds(0.9)
    assert (workers.coordinator.n, workers.able()) == (2, [])
    workers.pass_seconds(0.2)
    workers.until(5)
    assert [step.worker for step in workers.coordinator.ledger.useful][6:] == [*"bcbcbc"]
    workers.stopped.clear()
    workers.coordinator.heal("a", workers.now)
    workers.until(8)
    assert [step.worker for step in workers.coordinator.ledger.useful][-3:] == [*NAMES]


def test_a_death_rolls_data_parallel_back_to_the_checkpoint_and_diloco_to_the_round() -> None:
    workers = idle("data-parallel")
    workers.until(2 * SAVE_EVERY + 3)
    workers.kill("a")
    assert workers.coordinator.n == 2 * SAVE_EVERY
    assert len(workers.coordinator.ledger.useful) == 3 * 2 * SAVE_EVERY
    assert [count for _, count in workers.coordinator.ledger.curve][-2:] == [
        3 * (2 * SAVE_EVERY + 3),
        3 * 2 * SAVE_EVERY,
    ]
    rounds = idle("synchronous DiLoCo")
    rounds.until(2)
    rounds.do("a")
    rounds.do("a")
    rounds.kill("a")
    assert rounds.coordinator.n == 2
    rounds.start("a")
    assert [o.what for o in rounds.waiting["a"][0].orders] == ["load", "step"]
    assert rounds.waiting["a"][0].orders[0].own == "own-a-0"


def test_after_the_death_of_all_workers_the_checkpoint_is_loaded() -> None:
    workers = idle("elastic data-parallel")
    workers.until(SAVE_EVERY + 2)
    for name in NAMES:
        workers.kill(name)
    assert workers.coordinator.n == SAVE_EVERY
    workers.start("b")
    workers.until(SAVE_EVERY + 1)
    assert [step.worker for step in workers.coordinator.ledger.useful][-1:] == ["b"]


def test_the_last_round_closes_early() -> None:
    workers = idle("synchronous DiLoCo")
    workers.until(2)
    workers.do("a")
    workers.do("b")
    workers.do("b")
    workers.kill("c")
    assert workers.end().startswith("shared-")
    late = [step.worker for step in workers.coordinator.ledger.useful][2 * 3 * INTERVAL :]
    # Each has received its next step already, and makes it.
    assert sorted(late) == ["a", "a", "b", "b", "b"]


# -- random faults ----------------------------------------------------------------------------------------------------

#: The provenance of parameters: the number of each exchange, and the steps of each worker in it; None if unusable.
Provenance = tuple[tuple[int, tuple[tuple[str, int], ...]], ...] | None


@dataclass
class Memory:
    """Slots and files that hold the provenance of parameters instead of numbers."""

    slots: dict[tuple[str, int], tuple[int, Provenance, int]] = field(default_factory=dict)
    files: dict[str, tuple[str, Provenance, int]] = field(default_factory=dict)


class Tracer:
    """A worker that traces the provenance of its parameters, and detects wrong orders."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name, self.memory = name, memory
        self.held: Provenance = ()
        self.drawn = self.since = 0

    def do(self, order: Order) -> None:
        files, slots = self.memory.files, self.memory.slots
        match order.what:
            case "begin":
                self.held, self.drawn, self.since = (), 0, 0
            case "load":
                who, self.held, self.drawn = files[order.file]
                assert who in order.file
                if self.held is None or (self.held[-1][0] if self.held else 0) != order.n:
                    self.held = None  # It was stopped, and the others continued without it.
                if order.own:
                    who, _, self.drawn = files[order.own]
                    assert who == self.name
                self.since = 0
            case "step":
                assert self.held is None or self.drawn == order.n, "it must read on at its position"
                self.drawn, self.since = self.drawn + 1, self.since + 1
            case "share":
                slots[self.name, order.n % 2] = order.n, self.held, self.since
            case "merge":
                offered = {who: slots[who, order.n % 2] for who in order.members}
                whole = all(number == order.n and held == self.held for number, held, _ in offered.values())
                steps = tuple((who, since) for who, (_, _, since) in offered.items())
                self.held = (*self.held, (order.n, steps)) if whole and self.held is not None else None
                self.since = 0
            case "save" | "save own":
                files[order.file] = self.name, self.held, self.drawn


ACTIONS = ("do", "do", "do", "do", "do", "half", "kill", "start", "start", "stop", "go", "cut", "heal", "wait")


def play(workers: Workers, name: str, action: str, orders: int) -> None:
    """Perform that action if it is possible."""
    up, workers.now = name in workers.up, workers.now + 0.01
    if action == "do" and name in workers.able():
        workers.do(name)
    elif action == "half" and name in workers.able():
        workers.do(name, orders)
        workers.kill(name)
    elif action == "kill" and up:
        workers.kill(name)
    elif action == "start" and not up:
        workers.start(name)
    elif action == "stop" and up:
        workers.stopped.add(name)
    elif action == "go":
        workers.stopped.discard(name)
    elif action == "cut":
        workers.coordinator.cut(name)
    elif action == "heal":
        workers.coordinator.heal(name, workers.now)
    elif action == "wait":
        workers.pass_seconds(1.1)
    workers.collect()


def test_a_round_that_no_worker_saved_is_repeated() -> None:
    """A worker saved it but died before its report, so the previous round is loaded."""
    memory = Memory()
    workers = Workers(coordinator("synchronous DiLoCo"), lambda name: Tracer(name, memory).do)
    workers.start()
    workers.until(2)
    workers.do("a", orders=2)
    for name in NAMES:
        workers.kill(name)
    workers.start()
    assert workers.coordinator.n == 1
    assert len(workers.coordinator.ledger.useful) == 3 * INTERVAL
    workers.until(3)
    held = memory.files[workers.end()][1]
    assert held is not None
    assert [number for number, _ in held] == [1, 2, 3, 4]


@settings(max_examples=examples(150))
@given(
    st.sampled_from(METHODS),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=200),
    st.booleans(),
)
def test_the_ledger_matches_the_parameters_after_any_faults(
    method: Method, actions: Sequence[tuple[str, str, int]], continues: bool
) -> None:
    memory = Memory()
    workers = Workers(coordinator(method), lambda name: Tracer(name, memory).do)
    workers.start()
    for name, action, orders in actions:
        play(workers, name, action, orders)
    for name in NAMES:
        play(workers, name, "go", 0)
        play(workers, name, "heal", 0)
        if continues:
            play(workers, name, "start", 0)
    if continues:
        workers.until(workers.coordinator.n + 3)
    file = workers.end()
    held = memory.files[file][1] if file else ()
    assert held is not None
    steps = sorted((who, count) for _, made in held for who, count in made)
    useful = [step.worker for step in workers.coordinator.ledger.useful]
    assert (
        sum(count for _, count in steps) == len(useful) == workers.coordinator.ledger.curve[-1][1]
        if useful
        else not steps
    )
    assert {who: useful.count(who) for who in useful} == {
        who: sum(count for other, count in steps if other == who) for who, _ in steps
    }
    assert [number for number, _ in held] == list(range(1, workers.coordinator.n + 1))
    assert len(useful) <= len(workers.coordinator.ledger.made)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_read_back_and_other_text_is_refused() -> None:
    assert GroupSettings.from_text(SETTINGS.to_text()) == SETTINGS
    for text in ("", "[]", "{}", '{"names": 3}', '{"method": "x", "names": [], "more": 1}'):
        with failing(ConfigError, "chaos.group-settings"):
            GroupSettings.from_text(text)


@pytest.mark.parametrize(("method", "kind"), list(zip(METHODS, (DataParallel, Elastic, Diloco), strict=True)))
def test_each_method_has_its_coordinator(method: Method, kind: type[Coordinator]) -> None:
    found = coordinator_of(replace(SETTINGS, method=method), INTERVAL, 10.0)
    assert type(found) is kind
    assert found.names == NAMES
