"""A worker of the baselines that storms are held against (`ops.chaos_lockstep`): it trains in step with others.

It decides nothing: it connects to a socket, says that it is ready, and does the orders of `ops.chaos_rendezvous` that
come there. What it shares goes through memory that all workers of the group map: a vector of float32 [N] in one of two
places, by the parity of the exchange. What is to be there after a kill goes into files, each whole or not at all.

Steps are those of an island: its compiled arithmetic, its batches, and the same minimum duration, behind which the
exchange hides as long as both together take no longer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.flatten_util import ravel_pytree
from safetensors import safe_open
from safetensors.numpy import save_file

from archipelago.broker.codecs import Vector
from archipelago.broker.config import RunConfig, from_json
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import guarded
from archipelago.islands.data.batches import Batches, alone, shared_out
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.inner import InnerState, InnerSteps, begin, compile_steps, descent, gradient
from archipelago.islands.models.interface import Params
from archipelago.islands.models.registry import build
from archipelago.islands.step_throttle import Pacer
from archipelago.islands.sync.arrays import device_copy
from archipelago.ops.chaos.rendezvous import Order, Setting, Way

Saved = tuple[Any, dict[str, int | str]]
"""a tree of arrays, and where the supply of batches is"""


OuterStep = Callable[[Params, optax.OptState, jax.Array], tuple[Params, optax.OptState]]


class Trainee(Protocol):
    """The arithmetic of one worker. Every method follows one kind of order."""

    def begin(self) -> None:
        """Anew, from the run's first parameters."""

    def work(self, n: int) -> None:
        """A step on the next batch, of which n were made before."""

    def vector(self) -> Vector:
        """What it has to share after that; float32 [N]."""

    def merge(self, mean_N: Vector, n: int) -> None:
        """Goes on with the mean of what was shared, for the n-th time."""

    def common(self) -> Saved:
        """What all workers have alike."""

    def own(self) -> Saved:
        """What is this worker's own."""

    def load(self, common: Saved, own: Saved | None) -> None:
        """Goes on from there. Raises DataError where it is of another run."""


@cache
def _gradient(config: RunConfig) -> Callable[[Params, jax.Array], jax.Array]:
    """From parameters and tokens [B, T + 1] to the gradient, float32 [N]."""
    of = gradient(build(config.model))
    return jax.jit(lambda params, tokens_BxT1: ravel_pytree(of(params, tokens_BxT1)[0])[0])


@cache
def _descent(config: RunConfig) -> Callable[[InnerState, jax.Array, jax.Array], InnerState]:
    """From a state, a mean gradient [N] and the steps before to the state after. The state that goes in is donated."""
    descend = descent(config.inner)

    def step(state: InnerState, mean_N: jax.Array, n: jax.Array) -> InnerState:
        return descend(state, ravel_pytree(state.params)[1](mean_N), n)

    return jax.jit(step, donate_argnums=0)


@cache
def _inner(config: RunConfig) -> InnerSteps:
    return compile_steps(build(config.model), config.inner)


@cache
def _outer(rate: float, momentum: float) -> tuple[optax.GradientTransformation, OuterStep]:
    """Nesterov's step from parameters, its momentum and the mean of everybody's parameters, float32 [N]."""
    outer = optax.sgd(rate, momentum=momentum, nesterov=True)

    def step(params: Params, momentum: optax.OptState, mean_N: jax.Array) -> tuple[Params, optax.OptState]:
        delta = jax.tree.map(lambda p, mean: p - mean, params, ravel_pytree(params)[1](mean_N))
        updates, after = outer.update(delta, momentum, params)
        return optax.apply_updates(params, updates), after

    return outer, jax.jit(step)


class Parallel:
    """Data-parallel: everybody draws the batch of all, takes its own rows of it, and shares their gradient."""

    def __init__(self, setting: Setting, name: str, corpus: OpenCorpus, first: Params) -> None:
        config, number, workers = from_json(setting.config), setting.names.index(name), len(setting.names)
        size = config.data.batch_size
        data = dataclasses.replace(config.data, batch_size=size * workers)
        self._config, self._corpus = dataclasses.replace(config, data=data), corpus
        self._rows = slice(number * size, (number + 1) * size)
        self._first = first
        self._gradient_N: Vector = np.asarray(ravel_pytree(first)[0])
        self._gradient, self._descend = _gradient(config), _descent(config)
        self.begin()

    def begin(self) -> None:
        """Anew, from the run's first parameters."""
        self.state = begin(self._config.inner, device_copy(self._first))
        self._batches = Batches(self._corpus.train, self._config, alone(self._config.data.shards, self._config.seed))

    def work(self, n: int) -> None:
        """The gradient of its rows."""
        tokens_BxT1 = self._batches.next(1)[0, self._rows]
        self._gradient_N = np.asarray(self._gradient(self.state.params, jnp.asarray(tokens_BxT1)))

    def vector(self) -> Vector:
        """That gradient."""
        return self._gradient_N

    def merge(self, mean_N: Vector, n: int) -> None:
        """The inner optimiser's step on the mean gradient."""
        self.state = self._descend(self.state, jnp.asarray(mean_N), jnp.asarray(n - 1, jnp.int32))

    def common(self) -> Saved:
        """Parameters, moments, and the place in the text: of all workers alike."""
        return self.state, self._batches.state()

    def own(self) -> Saved:
        """Nothing."""
        return (), {}

    def load(self, common: Saved, own: Saved | None) -> None:
        """Goes on from there."""
        self.state = _like(self.state, common[0])
        self._batches.restore(common[1])


class Replica:
    """Synchronous DiLoCo: inner steps of its own, and one outer step on the mean of everybody's parameters."""

    def __init__(self, setting: Setting, name: str, corpus: OpenCorpus, first: Params) -> None:
        self._config, self._corpus = from_json(setting.config), corpus
        self._place = setting.names.index(name), len(setting.names)
        self._first = first
        self._inner = _inner(self._config)
        self._nesterov, self._outer = _outer(setting.outer_rate, setting.outer_momentum)
        self.begin()

    def begin(self) -> None:
        """Anew, from the run's first parameters."""
        self.params, self._momentum = self._first, self._nesterov.init(self._first)
        self._state = begin(self._config.inner, device_copy(self.params))
        lease = shared_out(self._config.data.shards, self._config.seed, *self._place)
        self._batches = Batches(self._corpus.train, self._config, lease)

    def work(self, n: int) -> None:
        """An inner step."""
        self._state, losses_n = self._inner(self._state, jnp.asarray(self._batches.next(1)), jnp.asarray(n, jnp.int32))
        losses_n.block_until_ready()

    def vector(self) -> Vector:
        """Its own parameters."""
        return np.asarray(ravel_pytree(self._state.params)[0])

    def merge(self, mean_N: Vector, n: int) -> None:
        """The outer step; inner moments stay."""
        self.params, self._momentum = self._outer(self.params, self._momentum, jnp.asarray(mean_N))
        self._state = self._state._replace(params=device_copy(self.params))  # the steps use them up

    def common(self) -> Saved:
        """The round's parameters and the outer momentum."""
        return (self.params, self._momentum), {}

    def own(self) -> Saved:
        """Inner moments, and the place in its own shards."""
        return self._state.optimizer, self._batches.state()

    def load(self, common: Saved, own: Saved | None) -> None:
        """Begins the round."""
        assert own is not None  # noqa: S101
        self.params, self._momentum = _like((self.params, self._momentum), common[0])
        self._state = InnerState(device_copy(self.params), _like(self._state.optimizer, own[0]))
        self._batches.restore(own[1])


WAYS: dict[Way, Callable[[Setting, str, OpenCorpus, Params], Trainee]] = {
    "data-parallel": Parallel,
    "elastic data-parallel": Parallel,
    "synchronous DiLoCo": Replica,
}


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), [jnp.asarray(leaf) for leaf in leaves])


# -- files and shared memory ------------------------------------------------------------------------------------------


def save(path: Path, saved: Saved) -> None:
    """Whole or not at all, also for who reads meanwhile."""
    tree, batches = saved
    leaves = {f"{number:05d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(tree))}
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(leaves, partial, {"batches": json.dumps(batches)})
    partial.replace(path)


def saved_in(path: Path) -> Saved:
    """The leaves of a tree that `save` wrote, in order, and where the batches were. Raises OSError."""
    with safe_open(path, framework="numpy") as file:
        return [file.get_tensor(name) for name in sorted(file.keys())], json.loads(file.metadata()["batches"])


FIRST = "first"
"""the file with the run's first parameters"""


def save_first(folder: Path, params: Params) -> None:
    """For `first_in`. Parameters keep their names."""
    save_file({name: np.asarray(tensor) for name, tensor in params.items()}, folder / f"{FIRST}.safetensors")


def first_in(folder: Path) -> Params:
    """The run's first parameters. Raises OSError."""
    with safe_open(folder / f"{FIRST}.safetensors", framework="numpy") as file:
        return {name: jnp.asarray(file.get_tensor(name)) for name in sorted(file.keys())}


def params_in(folder: Path, name: str) -> Params:
    """Of what all workers had alike when one of them saved it; parameters come first in it, in either way.

    The first ones for ``. Raises OSError.
    """
    first = first_in(folder)
    if not name:
        return first
    params: Params = _like(first, saved_in(path_of(folder, name))[0][: len(first)])
    return params


def path_of(folder: Path, name: str) -> Path:
    """Of what is kept under that name."""
    return folder / f"{name}.safetensors"


class Slots:
    """What each worker shares: float32 [2, N] in a file of its own, which others map."""

    def __init__(self, folder: Path, name: str, size_N: int) -> None:
        self._folder, self._size_N = folder, size_N
        with (folder / name).open("ab") as file:
            file.truncate(2 * 4 * size_N)  # of the same length where it is there: others may be reading it
        self._mine = self._map(name, "r+")
        self._theirs: dict[str, Vector] = {}

    def _map(self, name: str, mode: Literal["r", "r+"]) -> Vector:
        return np.memmap(self._folder / name, np.float32, mode, shape=(2, self._size_N))

    def offer(self, n: int, vector_N: Vector) -> None:
        """For the n-th exchange."""
        self._mine[n % 2] = vector_N

    def mean(self, n: int, members: Iterable[str]) -> Vector:
        """Of what they offered for the n-th exchange: float32 [N], summed in the order of the members."""
        total_N: Vector | None = None
        count = 0
        for name in members:
            if name not in self._theirs:
                self._theirs[name] = self._map(name, "r")
            theirs_N = self._theirs[name][n % 2]
            total_N = np.array(theirs_N) if total_N is None else total_N + theirs_N
            count += 1
        assert total_N is not None  # noqa: S101
        return np.asarray(total_N / np.float32(count))


# -- the worker -------------------------------------------------------------------------------------------------------


class Follower:
    """Does orders. `clock` and `sleep` are for the duration of steps."""

    def __init__(
        self,
        trainee: Trainee,
        slots: Slots,
        folder: Path,
        step_seconds_min: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._trainee, self._slots, self._folder = trainee, slots, folder
        self._step_seconds_min, self._clock, self._sleep = step_seconds_min, clock, sleep
        self._pacer = Pacer(step_seconds_min)

    def warm_up(self) -> None:
        """Compiles all that it will run, so that nobody waits for that."""
        self._trainee.work(0)
        self._trainee.merge(self._trainee.vector(), 1)
        self._trainee.begin()

    def do(self, order: Order) -> None:
        """One order."""
        trainee = self._trainee
        match order.what:
            case "begin":
                self._pacer = Pacer(self._step_seconds_min)
                trainee.begin()
            case "load":
                self._pacer = Pacer(self._step_seconds_min)
                own = saved_in(self._path(order.own)) if order.own else None
                trainee.load(saved_in(self._path(order.file)), own)
            case "work":
                self._pacer.dispatched(1, self._clock())
                trainee.work(order.n)
                if nap := self._pacer.nap_seconds(self._clock()):
                    self._sleep(nap)
            case "offer":
                self._slots.offer(order.n, trainee.vector())
            case "merge":
                trainee.merge(self._slots.mean(order.n, order.members), order.n)
            case "keep":
                save(self._path(order.file), trainee.common())
            case "keep own":
                save(self._path(order.file), trainee.own())

    def _path(self, name: str) -> Path:
        return path_of(self._folder, name)


def trainee_of(setting: Setting, name: str) -> Trainee:
    """The arithmetic of the worker of that name."""
    corpus = open_corpus(from_json(setting.config).data.corpus)
    return WAYS[setting.way](setting, name, corpus, first_in(Path(setting.folder)))


@dataclass(frozen=True)
class LockstepOptions:
    """A worker of a group that trains in step, for `archipelago chaos --baselines`."""

    setting: Path
    """the group's"""
    name: str
    """of this worker"""


def main(options: LockstepOptions) -> int:
    """Until its socket ends."""
    setting = Setting.from_text(_text(options.setting))
    trainee = trainee_of(setting, options.name)
    slots = Slots(Path(setting.exchange), options.name, trainee.vector().size)
    follower = Follower(trainee, slots, Path(setting.folder), setting.step_seconds[options.name])
    follower.warm_up()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(setting.socket)
        connection.sendall(_line({"name": options.name}))
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                orders = [Order(**{**order, "members": tuple(order["members"])}) for order in message["orders"]]
                for order in orders:
                    follower.do(order)
                steps = sum(order.what == "work" for order in orders)
                connection.sendall(_line({"ticket": message["ticket"], "steps": steps}))
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})", "`archipelago chaos --baselines` writes it.") from None


def _line(message: dict[str, object]) -> bytes:
    return (json.dumps(message) + "\n").encode()


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(tyro.cli(LockstepOptions, args=sys.argv[1:]))))
