"""A script of two processes with two devices each, whose parameters are on a mesh of all four.

`test_two_scripts.py` runs it as `two_scripts.py RANK PORT FOLDER URL`. Each process writes what it found to a file of
JSON for each scenario, whose run has its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import archipelago
from archipelago.broker.errors import ArchipelagoError

SYNC = archipelago.SyncConfig(interval=4, fragments=2)
STEPS = 160
OPTIMIZER = optax.adam(1e-2)
#: How each leaf is split over the devices, and in which dtype it is. Of the first, `base` is not trained.
KINDS: dict[str, dict[str, tuple[Any, Any]]] = {
    "sharded": {"base": ((None, "d"), jnp.float32), "own.bias": ((), jnp.float32), "own.kernel": (("d",), jnp.float32)},
    "whole": {"own.bias": ((), jnp.float32), "own.kernel": ((), jnp.bfloat16)},
}
SHAPES = {"base": (6, 8), "own.bias": (6,), "own.kernel": (8, 6)}


def values(kind: str) -> dict[str, Any]:
    """Return the first parameters in the memory of the host."""
    random = np.random.default_rng(0)
    return {name: random.standard_normal(SHAPES[name]).astype(dtype) for name, (_, dtype) in KINDS[kind].items()}


@jax.jit
def step(params: dict[str, Any], state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Return the parameters and the optimiser's state after a step, and its loss."""
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("own")}

    def loss_of(own: dict[str, Any]) -> Any:
        hidden = batch @ own["own.kernel"].astype(jnp.float32) + own["own.bias"][None, :]
        return jnp.mean(jnp.square(hidden @ rest["base"] - batch if rest else hidden - 1.0))

    own = {name: leaf for name, leaf in params.items() if name not in rest}
    loss, gradients = jax.value_and_grad(loss_of)(own)
    updates, state = OPTIMIZER.update(gradients, state)
    return {**rest, **optax.apply_updates(own, updates)}, state, loss


@jax.jit
def mean_square(values: Any) -> Any:
    return jnp.mean(jnp.square(values.astype(jnp.float32)))


def first_state(params: dict[str, Any]) -> Any:
    return OPTIMIZER.init({name: leaf for name, leaf in params.items() if name.startswith("own")})


def batch_of(number: int) -> Any:
    return np.random.default_rng(number).standard_normal((8, 8)).astype(np.float32)


# -- in two processes --------------------------------------------------------------------------------------------------


def placed(values: Any, *spec: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def tree(kind: str) -> dict[str, Any]:
    return {name: placed(leaf, *KINDS[kind][name][0]) for name, leaf in values(kind).items()}


class Training:
    """The parameters and the optimiser's state of a script, and what it found."""

    def __init__(self, kind: str) -> None:
        self.params = tree(kind)
        self.state = jax.jit(first_state)(self.params)
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self._seen = hashlib.sha256()

    def join(self, url: str, run: str, island: str) -> Any:
        return archipelago.join(url, run, self.params, state=lambda: self.state, island=island, evaluate=self.evaluate)

    def evaluate(self, params: dict[str, Any]) -> float:
        self.evaluated.append(float(mean_square(params["own.kernel"])))
        return self.evaluated[-1]

    def train(self, run: Any, is_enough: Callable[[], bool]) -> None:
        """Train until there is enough, which all processes must find at the same step."""
        self.params, self.state = run.params, run.state
        while not is_enough():
            batch = placed(batch_of(len(self.losses)), "d")
            self.params, self.state, loss = step(self.params, self.state, batch)
            self.params = run.sync(self.params, tokens=8, loss=loss)
            self.losses.append(float(loss))
            for name in ("own.bias", "own.kernel"):
                if self.params[name].is_fully_replicated:
                    self._seen.update(np.asarray(self.params[name]).tobytes())

    @property
    def seen(self) -> str:
        """The digest of all parameters after each `sync`, in so far as this process has them whole."""
        return self._seen.hexdigest()


def awaited(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def trained(folder: Path, url: str, kind: str) -> dict[str, Any]:
    """Create a run, train beside an island of one process, take its optimiser's state, and train to the end."""
    mine = Training(kind)
    created = [
        archipelago.create(url, kind, mine.params, steps=STEPS, sync=SYNC, trained="own") for _ in range(2)
    ]  # fmt: skip
    awaited(folder / f"{kind}.begun")
    with mine.join(url, kind, "both") as run:
        (folder / f"{kind}.both").touch()
        origins = [run.optimizer_origin]
        mine.train(run, lambda: run.step > STEPS // 2)
    with mine.join(url, kind, "again") as run:
        (folder / f"{kind}.again").touch()
        origins.append(run.optimizer_origin)
        counts = int(run.state[0].count), float(jnp.max(run.state[0].nu["own.bias"]))
        mine.train(run, lambda: run.finished)
    params, reason = run.final(), run.reason
    final = {name: np.asarray(gathered(leaf), np.float32).tolist() for name, leaf in params.items()}
    specs = [str(leaf.sharding.spec) for leaf in params.values()]
    return {"created": created, "origins": origins, "counts": counts, "losses": mine.losses, "seen": mine.seen,
            "evaluated": mine.evaluated, "reason": reason, "final": final, "specs": specs}  # fmt: skip


def gathered(leaf: Any) -> Any:
    """Return a leaf that each device has whole."""
    place = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    return jax.jit(lambda x: x, out_shardings=place)(leaf)


def sharded(folder: Path, url: str) -> dict[str, Any]:
    return trained(folder, url, "sharded")


def whole(folder: Path, url: str) -> dict[str, Any]:
    return trained(folder, url, "whole")


def refused(folder: Path, url: str) -> dict[str, Any]:
    """Return the codes of the errors of wrong use."""
    spread = placed(np.ones(3, np.float32))
    memory = "fakeredis://refused"
    return {
        "mixed": code(lambda: archipelago.join(memory, "own", {"a": spread, "b": jnp.zeros(3)})),
        "alone": code(lambda: archipelago.join(memory, "own", {"a": jnp.zeros(3)})),
        "nan": code(lambda: archipelago.create(memory, "nan", {"a": spread * jnp.nan}, steps=10)),
        "early": code(lambda: archipelago.join(memory, "own", {"a": spread}).sync({"a": spread})),
        "no run": code(lambda: archipelago.join(memory, "none", {"a": spread}).__enter__()),
    }


def code(call: Callable[[], object]) -> str:
    try:
        call()
    except ArchipelagoError as error:
        return error.code
    return ""


def lost(folder: Path, url: str) -> dict[str, Any]:
    """End the second process without a word. The first one ends too."""
    mine = Training("sharded")
    archipelago.create(url, "lost", mine.params, steps=100_000, sync=SYNC)
    with mine.join(url, "lost", "both") as run:
        mine.train(run, lambda: len(mine.losses) > 20)
        if jax.process_index() == 1:
            os._exit(0)
        mine.train(run, lambda: False)
    return {}


SCENARIOS = [refused, sharded, whole, lost]


def main(rank: int, port: int, folder: Path, url: str) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=15, shutdown_timeout_seconds=5
    )  # fmt: skip
    for scenario in SCENARIOS:
        found = scenario(folder, url)
        written = folder / f"{scenario.__name__}-{rank}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
