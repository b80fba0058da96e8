"""Coordinators of workers that train in lockstep, without processes and numbers: waits, and random faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.ops.chaos.lockstep.coordinator import METHODS, Bundle, Coordinator, Method, Order
from archipelago.ops.chaos.lockstep.data_parallel import DataParallel, Elastic
from archipelago.ops.chaos.lockstep.diloco import Diloco
from tests.tiers import examples

NAMES = ("a", "b", "c")
SAVE_EVERY, INTERVAL = 4, 3


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

    def silence(self, name: str, how: str) -> None:
        """Stop a worker, cut its link, or kill it."""
        if how == "stopped":
            self.stopped.add(name)
        elif how == "cut":
            self.coordinator.cut(name)
        else:
            self.kill(name)

    def wake(self, name: str) -> None:
        """Undo that."""
        if name not in self.up:
            self.start(name)
        self.stopped.discard(name)
        self.coordinator.heal(name, self.now)
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


# -- waits ------------------------------------------------------------------------------------------------------------


def idle(method: Method, *names: str) -> Workers:
    """Return started workers whose orders do nothing."""
    workers = Workers(coordinator(method), lambda name: lambda order: None)
    workers.start(*names)
    return workers


def exhaust(workers: Workers) -> None:
    """Let all workers carry out bundles until no worker has another one."""
    while able := workers.able():
        for name in able:
            workers.do(name)


def useful(workers: Workers) -> list[str]:
    """Return the worker of each step that is in the parameters."""
    return [step.worker for step in workers.coordinator.ledger.useful]


def test_data_parallel_waits_for_all_and_rolls_back_to_its_checkpoint() -> None:
    workers = idle("data-parallel", "a", "b")
    assert not workers.able()
    workers.start("c")
    workers.until(2)
    for how in ("stopped", "cut"):
        began = workers.coordinator.n
        workers.silence("c", how)
        exhaust(workers)
        workers.pass_seconds(60.0)
        assert (workers.coordinator.n, workers.able()) == (began, []), how
        workers.wake("c")
        workers.until(began + 1)
    workers.until(2 * SAVE_EVERY + 3)
    workers.kill("a")
    assert workers.coordinator.n == 2 * SAVE_EVERY
    assert len(useful(workers)) == 3 * 2 * SAVE_EVERY
    counts = [count for _, count in workers.coordinator.ledger.curve]
    assert counts[-2:] == [3 * (2 * SAVE_EVERY + 3), 3 * 2 * SAVE_EVERY]


@pytest.mark.parametrize("how", ["stopped", "cut", "killed"])
def test_an_elastic_group_continues_with_fewer(how: str) -> None:
    """It begins with all workers, waits a second for a silent one, and admits it again.

    It loads the checkpoint only if all workers have died.
    """
    workers = idle("elastic data-parallel", "a", "b")
    workers.pass_seconds(60.0)
    assert not workers.able()
    workers.start("c")
    workers.until(2)
    workers.silence("b", how)
    if how != "killed":
        exhaust(workers)
        workers.pass_seconds(0.9)
        assert (workers.coordinator.n, workers.able()) == (2, [])
        workers.pass_seconds(0.2)
    workers.until(5)
    assert useful(workers)[:12] == [*NAMES, *NAMES, *"acacac"]
    workers.wake("b")
    workers.until(2 * SAVE_EVERY + 2)
    assert useful(workers)[-3:] == [*NAMES]
    for name in NAMES:
        workers.kill(name)
    assert workers.coordinator.n == 2 * SAVE_EVERY, "all have died, so the checkpoint is loaded"
    workers.start("b")
    workers.until(2 * SAVE_EVERY + 1)
    assert useful(workers)[-1:] == ["b"]


def test_diloco_waits_at_the_end_of_a_round_and_repeats_only_that() -> None:
    workers = idle("synchronous DiLoCo", "a", "b")
    exhaust(workers)
    assert Counter(step.worker for step in workers.coordinator.ledger.made) == {"a": INTERVAL, "b": INTERVAL}
    assert workers.coordinator.n == 0
    workers.start("c")
    workers.until(2)
    for how, steps in (("stopped", 0), ("cut", INTERVAL)):
        began = workers.coordinator.n
        workers.silence("c", how)
        exhaust(workers)
        workers.pass_seconds(60.0)
        assert (workers.coordinator.n, workers.able()) == (began, []), how
        extra = [step.worker for step in workers.coordinator.ledger.made[len(useful(workers)) :]]
        assert extra.count("c") == steps, "a cut worker makes its own steps, and a stopped one none"
        workers.wake("c")
        workers.until(began + 1)
    n = workers.coordinator.n
    workers.do("a")
    workers.kill("a")
    assert workers.coordinator.n == n
    workers.start("a")
    first, _ = workers.waiting["a"][0].orders
    assert (first.what, first.own) == ("load", f"own-a-{n % 2}")


def test_the_last_round_of_diloco_closes_early() -> None:
    workers = idle("synchronous DiLoCo")
    workers.until(2)
    workers.do("a")
    workers.do("b")
    workers.do("b")
    workers.kill("c")
    assert workers.end().startswith("shared-")
    late = useful(workers)[2 * 3 * INTERVAL :]
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


ACTIONS = ("do", "do", "do", "do", "do", "half", "kill", "start", "start", "stopped", "go", "cut", "heal", "wait")


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
    elif (action == "stopped" and up) or action == "cut":
        workers.silence(name, action)
    elif action == "go":
        workers.stopped.discard(name)
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
        if continues or name in workers.up:
            workers.wake(name)
        else:
            workers.coordinator.heal(name, workers.now)
    if continues:
        workers.until(workers.coordinator.n + 3)
    file = workers.end()
    held = memory.files[file][1] if file else ()
    assert held is not None
    steps: Counter[str] = Counter()
    for _, made in held:
        for who, count in made:
            steps[who] += count
    ledger = workers.coordinator.ledger
    assert steps == Counter(useful(workers)), "the parameters hold other steps than the ledger"
    assert not ledger.curve or ledger.curve[-1][1] == steps.total()
    assert [number for number, _ in held] == list(range(1, workers.coordinator.n + 1))
    assert steps.total() <= len(ledger.made)
