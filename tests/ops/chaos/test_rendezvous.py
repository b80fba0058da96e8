"""Groups that train in step, without processes: numbers first, then who waits for whom, and whatever comes first."""

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
from archipelago.ops.chaos.lockstep_worker import WAYS as WAYS_OF
from archipelago.ops.chaos.lockstep_worker import Follower, Slots, Trainee, params_in, save_first
from archipelago.ops.chaos.rendezvous import (
    WAYS,
    Bundle,
    DataParallel,
    Diloco,
    Elastic,
    Group,
    Order,
    Setting,
    Way,
    group_of,
)
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import Point
from tests.small import SMALL

NAMES = ("a", "b", "c")
PARALLEL: tuple[Way, ...] = ("data-parallel", "elastic data-parallel")
KEEP_EVERY, INTERVAL = 4, 3
SETTING = Setting(
    "data-parallel", "{}", NAMES, dict.fromkeys(NAMES, 0.1), "/somewhere", "/else",
    baselines.DILOCO_RATE, baselines.DILOCO_MOMENTUM,
)  # fmt: skip
"""kept nowhere; and what is compiled for one test serves another"""


def group(way: Way) -> Group:
    match way:
        case "data-parallel":
            return DataParallel(NAMES, KEEP_EVERY)
        case "elastic data-parallel":
            return Elastic(NAMES, KEEP_EVERY, 1.0)
        case "synchronous DiLoCo":
            return Diloco(NAMES, INTERVAL)


@dataclass
class Hands:
    """Workers of a group in this process: each does its bundles in the order that the test wants."""

    group: Group
    make: Callable[[str], Callable[[Order], None]]
    """a new worker by that name: it does orders"""
    now: float = 0.0
    up: dict[str, Callable[[Order], None]] = field(default_factory=dict)
    waiting: dict[str, list[Bundle]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)

    def start(self, *names: str) -> None:
        for name in names or NAMES:
            self.up[name], self.waiting[name] = self.make(name), []
            self.group.comes(name, self.now)
            self.collect()

    def kill(self, name: str) -> None:
        del self.up[name], self.waiting[name]
        self.stopped.discard(name)
        self.group.goes(name, self.now)
        self.collect()

    def collect(self) -> None:
        for bundle in self.group.take():
            self.waiting[bundle.to].append(bundle)

    def able(self) -> list[str]:
        return [name for name in NAMES if self.waiting.get(name) and name not in self.stopped]

    def do(self, name: str, orders: int | None = None) -> None:
        """Its next bundle, or the first orders of it: then it does not live to say so."""
        bundle = self.waiting[name].pop(0)
        for order in bundle.orders[:orders]:
            self.up[name](order)
        if orders is None:
            steps = sum(order.what == "work" for order in bundle.orders)
            self.group.done(name, bundle.ticket, steps, self.now)
            self.collect()

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        self.group.tick(self.now)
        self.collect()

    def until(self, n: int) -> None:
        """Everybody who can does what it is given, in turn, until so many exchanges."""
        while self.group.n < n:
            assert self.able(), "nobody can go on"
            self.now += 0.1
            for name in self.able():
                self.do(name)

    def end(self) -> str:
        self.group.end(self.now)
        self.collect()
        while self.group.final is None:
            assert self.able(), "it never ends"
            for name in self.able():
                self.do(name)
        return self.group.final


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
    """For slots and files."""
    (tmp_path / "group").mkdir()
    return tmp_path / "group"


class Make:
    """Workers with real arithmetic, slots and files. One trainee a name: another would only compile once more."""

    def __init__(self, config: RunConfig, corpus: OpenCorpus, folder: Path) -> None:
        self._config, self._corpus, self._folder = config, corpus, folder
        self.trainees: dict[str, Trainee] = {}

    def __call__(self, way: Way) -> Callable[[str], Callable[[Order], None]]:
        setting = replace(SETTING, way=way, config=self._config.to_json())
        first = build(self._config.model).init(self._config.seed)
        self.trainees = {name: WAYS_OF[way](setting, name, self._corpus, first) for name in NAMES}
        return self._start

    def _start(self, name: str) -> Callable[[Order], None]:
        trainee = self.trainees[name]
        follower = Follower(trainee, Slots(self._folder, name, trainee.vector().size), self._folder)
        follower.warm_up()  # as a new process does; nothing of the one before is left
        return follower.do


@pytest.fixture
def make(config: RunConfig, corpus: OpenCorpus, folder: Path) -> Make:
    return Make(config, corpus, folder)


Ended = Callable[[Hands], Params]


@pytest.fixture
def ended(config: RunConfig, folder: Path) -> Ended:
    """The parameters at the end."""
    save_first(folder, build(config.model).init(config.seed))
    return lambda hands: params_in(folder, hands.end())


def alone(monkeypatch: pytest.MonkeyPatch, train: Callable[..., list[Point]], *args: object) -> Params:
    """The parameters that a baseline in one process evaluates at its end."""
    seen: list[Params] = []

    def point(tokens: int, params: Params) -> Point:
        seen.append({name: jnp.array(tensor) for name, tensor in params.items()})
        return Point(tokens, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(baselines, "scoring", lambda config, corpus: point)
        train(*args, len(NAMES), lambda point: None)
    return seen[-1]


def same(found: Params, wanted: Params) -> bool:
    return all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_in_step_it_is_data_parallel_in_one_process(
    make: Make, config: RunConfig, corpus: OpenCorpus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone(monkeypatch, baselines.data_parallel, config, corpus)
    first = build(config.model).init(config.seed)
    for way in PARALLEL:
        hands = Hands(group(way), make(way))
        hands.start()
        hands.until(config.inner.steps)
        found = ended(hands)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], atol=2e-5)
        assert max(np.abs(wanted[name] - first[name]).max() for name in wanted) > 1e-2, "there is something to compare"


def test_in_step_it_is_diloco_in_one_process(
    make: Make, config: RunConfig, corpus: OpenCorpus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, sync=replace(config.sync, interval=INTERVAL))
    wanted = alone(monkeypatch, baselines.diloco, config, corpus)
    hands = Hands(group("synchronous DiLoCo"), make("synchronous DiLoCo"))
    hands.start()
    hands.until(config.inner.steps // INTERVAL)
    found = ended(hands)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-5)


@pytest.mark.parametrize("way", ["data-parallel", "synchronous DiLoCo"])
def test_kills_take_nothing_but_time(way: Way, make: Make, ended: Ended) -> None:
    """Bit by bit the same parameters, wherever a worker is killed: text and moments go back with it."""
    total = 7 if way == "data-parallel" else 3
    calm = Hands(group(way), make(way))
    calm.start()
    calm.until(total)
    wanted = ended(calm)
    hands = Hands(group(way), make(way))
    hands.start()
    hands.until(total - 2)
    hands.do("b")
    hands.kill("b")
    for name in hands.able():
        hands.do(name)
    hands.start("b")
    hands.until(total - 1)
    hands.do("a", orders=2)  # in the middle of a bundle
    hands.kill("a")
    hands.start("a")
    hands.until(total)
    assert same(ended(hands), wanted)
    assert len(hands.group.ledger.made) > len(hands.group.ledger.useful) == len(calm.group.ledger.useful)


def test_an_elastic_group_goes_on_with_fewer_and_takes_back_who_returns(make: Make, ended: Ended) -> None:
    hands = Hands(group("elastic data-parallel"), make("elastic data-parallel"))
    hands.start()
    hands.until(2)
    hands.kill("b")
    hands.until(5)
    assert [step.worker for step in hands.group.ledger.useful] == [*NAMES, *NAMES, *"acacac"]
    hands.start("b")
    hands.until(8)
    assert [step.worker for step in hands.group.ledger.useful][-3:] == [*NAMES]
    params = ended(hands)
    while able := hands.able():
        for name in able:
            hands.do(name)
    alike = [make.trainees[name].common()[0] for name in NAMES]
    assert all(jax.tree.all(jax.tree.map(np.array_equal, alike[0], other)) for other in alike[1:])
    assert same(params, alike[0].params)


# -- who waits for whom -----------------------------------------------------------------------------------------------


def idle(way: Way) -> Hands:
    """A group whose workers have nothing to do, all of them started."""
    hands = Hands(group(way), lambda name: lambda order: None)
    hands.start()
    return hands


@pytest.mark.parametrize("way", WAYS)
def test_nobody_begins_before_all_are_there_but_diloco(way: Way) -> None:
    hands = Hands(group(way), lambda name: lambda order: None)
    hands.start("a", "b")
    for _ in range(10):
        for name in hands.able():
            hands.do(name)
    hands.pass_seconds(60.0)
    assert hands.group.n == 0
    made = {step.worker for step in hands.group.ledger.made}
    assert made == ({"a", "b"} if way == "synchronous DiLoCo" else set())
    hands.start("c")
    hands.until(2)


@pytest.mark.parametrize("way", ["data-parallel", "synchronous DiLoCo"])
@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_one_that_is_stopped_or_cut_off_stalls_everyone(way: Way, how: str) -> None:
    hands = idle(way)
    hands.until(2)
    if how == "stopped":
        hands.stopped.add("c")
    else:
        hands.group.cut("c")
    while able := hands.able():
        for name in able:
            hands.do(name)
    hands.pass_seconds(60.0)
    assert (hands.group.n, hands.able()) == (2, [])
    alone = [step.worker for step in hands.group.ledger.made[len(hands.group.ledger.useful) :]]
    if way == "synchronous DiLoCo":
        assert alone.count("c") == (0 if how == "stopped" else INTERVAL), "a cut worker makes its own steps"
    hands.stopped.clear()
    hands.group.heal("c", hands.now)
    hands.collect()
    hands.until(4)


@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_an_elastic_group_waits_a_second_for_who_is_silent(how: str) -> None:
    hands = idle("elastic data-parallel")
    hands.until(2)
    if how == "stopped":
        hands.stopped.add("a")
    else:
        hands.group.cut("a")
    while able := hands.able():
        for name in able:
            hands.do(name)
    hands.pass_seconds(0.9)
    assert (hands.group.n, hands.able()) == (2, [])
    hands.pass_seconds(0.2)
    hands.until(5)
    assert [step.worker for step in hands.group.ledger.useful][6:] == [*"bcbcbc"]
    hands.stopped.clear()
    hands.group.heal("a", hands.now)
    hands.until(8)
    assert [step.worker for step in hands.group.ledger.useful][-3:] == [*NAMES]


def test_a_death_takes_data_parallel_back_to_the_checkpoint_and_diloco_to_its_rounds_begin() -> None:
    hands = idle("data-parallel")
    hands.until(2 * KEEP_EVERY + 3)
    hands.kill("a")
    assert hands.group.n == 2 * KEEP_EVERY
    assert len(hands.group.ledger.useful) == 3 * 2 * KEEP_EVERY
    assert [count for _, count in hands.group.ledger.curve][-2:] == [3 * (2 * KEEP_EVERY + 3), 3 * 2 * KEEP_EVERY]
    rounds = idle("synchronous DiLoCo")
    rounds.until(2)
    rounds.do("a")
    rounds.do("a")
    rounds.kill("a")
    assert rounds.group.n == 2
    rounds.start("a")
    assert [o.what for o in rounds.waiting["a"][0].orders] == ["load", "work"]
    assert rounds.waiting["a"][0].orders[0].own == "own-a-0"


def test_where_all_die_the_checkpoint_is_what_is_left() -> None:
    hands = idle("elastic data-parallel")
    hands.until(KEEP_EVERY + 2)
    for name in NAMES:
        hands.kill(name)
    assert hands.group.n == KEEP_EVERY
    hands.start("b")
    hands.until(KEEP_EVERY + 1)
    assert [step.worker for step in hands.group.ledger.useful][-1:] == ["b"]


def test_a_round_ends_early_with_what_everybody_has() -> None:
    hands = idle("synchronous DiLoCo")
    hands.until(2)
    hands.do("a")
    hands.do("b")
    hands.do("b")
    hands.kill("c")
    assert hands.end().startswith("common-")
    late = [step.worker for step in hands.group.ledger.useful][2 * 3 * INTERVAL :]
    # Each was given its next step already, and makes it.
    assert sorted(late) == ["a", "a", "b", "b", "b"]


# -- whatever comes first ---------------------------------------------------------------------------------------------

Held = tuple[tuple[int, tuple[tuple[str, int], ...]], ...] | None
"""what went into parameters: of each exchange its number, and the steps of each; None for what nobody may use"""


@dataclass
class World:
    """Slots and files that hold what went into them instead of numbers."""

    slots: dict[tuple[str, int], tuple[int, Held, int]] = field(default_factory=dict)
    files: dict[str, tuple[str, Held, int]] = field(default_factory=dict)


class Marked:
    """A worker that knows what is in its parameters, and notices when that is not what it should be."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.held: Held = ()
        self.drawn = self.since = 0

    def do(self, order: Order) -> None:
        files, slots = self.world.files, self.world.slots
        match order.what:
            case "begin":
                self.held, self.drawn, self.since = (), 0, 0
            case "load":
                who, self.held, self.drawn = files[order.file]
                assert who in order.file
                if self.held is None or (self.held[-1][0] if self.held else 0) != order.n:
                    self.held = None  # it slept since it was told to, and the others went on without it
                if order.own:
                    who, _, self.drawn = files[order.own]
                    assert who == self.name
                self.since = 0
            case "work":
                assert self.held is None or self.drawn == order.n, "it reads on where it was"
                self.drawn, self.since = self.drawn + 1, self.since + 1
            case "offer":
                slots[self.name, order.n % 2] = order.n, self.held, self.since
            case "merge":
                offered = {who: slots[who, order.n % 2] for who in order.members}
                whole = all(number == order.n and held == self.held for number, held, _ in offered.values())
                steps = tuple((who, since) for who, (_, _, since) in offered.items())
                self.held = (*self.held, (order.n, steps)) if whole and self.held is not None else None
                self.since = 0
            case "keep" | "keep own":
                files[order.file] = self.name, self.held, self.drawn


ACTIONS = ("do", "do", "do", "do", "do", "half", "kill", "start", "start", "stop", "go", "cut", "heal", "wait")


def play(hands: Hands, name: str, action: str, orders: int) -> None:
    """Does that where it can be done."""
    up, hands.now = name in hands.up, hands.now + 0.01
    if action == "do" and name in hands.able():
        hands.do(name)
    elif action == "half" and name in hands.able():
        hands.do(name, orders)
        hands.kill(name)
    elif action == "kill" and up:
        hands.kill(name)
    elif action == "start" and not up:
        hands.start(name)
    elif action == "stop" and up:
        hands.stopped.add(name)
    elif action == "go":
        hands.stopped.discard(name)
    elif action == "cut":
        hands.group.cut(name)
    elif action == "heal":
        hands.group.heal(name, hands.now)
    elif action == "wait":
        hands.pass_seconds(1.1)
    hands.collect()


def test_a_round_that_nobody_lived_to_keep_is_done_again() -> None:
    """One had written it, and did not live to say so: the round before is still there."""
    world = World()
    hands = Hands(group("synchronous DiLoCo"), lambda name: Marked(name, world).do)
    hands.start()
    hands.until(2)
    hands.do("a", orders=2)
    for name in NAMES:
        hands.kill(name)
    hands.start()
    assert hands.group.n == 1
    assert len(hands.group.ledger.useful) == 3 * INTERVAL
    hands.until(3)
    held = world.files[hands.end()][1]
    assert held is not None
    assert [number for number, _ in held] == [1, 2, 3, 4]


@settings(max_examples=150)
@given(
    st.sampled_from(WAYS),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=200),
    st.booleans(),
)
def test_whatever_happens_the_ledger_says_what_is_in_the_parameters(
    way: Way, actions: Sequence[tuple[str, str, int]], goes_on: bool
) -> None:
    world = World()
    hands = Hands(group(way), lambda name: Marked(name, world).do)
    hands.start()
    for name, action, orders in actions:
        play(hands, name, action, orders)
    for name in NAMES:
        play(hands, name, "go", 0)
        play(hands, name, "heal", 0)
        if goes_on:
            play(hands, name, "start", 0)
    if goes_on:
        hands.until(hands.group.n + 3)
    file = hands.end()
    held = world.files[file][1] if file else ()
    assert held is not None
    steps = sorted((who, count) for _, made in held for who, count in made)
    useful = [step.worker for step in hands.group.ledger.useful]
    assert sum(count for _, count in steps) == len(useful) == hands.group.ledger.curve[-1][1] if useful else not steps
    assert {who: useful.count(who) for who in useful} == {
        who: sum(count for other, count in steps if other == who) for who, _ in steps
    }
    assert [number for number, _ in held] == list(range(1, hands.group.n + 1))
    assert len(useful) <= len(hands.group.ledger.made)


# -- the setting ------------------------------------------------------------------------------------------------------


def test_a_setting_is_read_back_and_nothing_else_is() -> None:
    assert Setting.from_text(SETTING.to_text()) == SETTING
    for text in ("", "[]", "{}", '{"names": 3}', '{"way": "x", "names": [], "more": 1}'):
        with pytest.raises(ConfigError, match="no setting"):
            Setting.from_text(text)


@pytest.mark.parametrize(("way", "kind"), list(zip(WAYS, (DataParallel, Elastic, Diloco), strict=True)))
def test_each_way_has_its_group(way: Way, kind: type[Group]) -> None:
    found = group_of(replace(SETTING, way=way), INTERVAL, 10.0)
    assert type(found) is kind
    assert found.names == NAMES
