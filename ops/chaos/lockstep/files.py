"""Saved states of a group's workers, and the slots of memory through which they share vectors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import safe_open
from safetensors.numpy import save_file

from archipelago.broker.codecs import Vector
from archipelago.broker.files import write_atomically
from archipelago.islands.models.interface import Params

#: A tree of arrays, and the position in the text.
Saved = tuple[Any, dict[str, int | str]]
#: The file with the run's first parameters.
FIRST = "first"


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """Put leaves into the structure of `tree`, on the device."""
    return jax.tree.unflatten(jax.tree.structure(tree), [jnp.asarray(leaf) for leaf in leaves])


def save(path: Path, saved: Saved) -> None:
    """Write a state. A reader sees the whole file or the previous one."""
    tree, batches = saved
    leaves = {f"{number:05d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(tree))}
    write_atomically(path, safetensors.numpy.save(leaves, {"batches": json.dumps(batches)}))


def load(path: Path) -> Saved:
    """Return the leaves of the tree that `save` wrote, in order, and the position in the text. Raise OSError."""
    with safe_open(path, framework="numpy") as file:
        return [file.get_tensor(name) for name in sorted(file.keys())], json.loads(file.metadata()["batches"])


def save_first(folder: Path, params: Params) -> None:
    """Write the run's first parameters under their names, for `first_in`."""
    save_file({name: np.asarray(tensor) for name, tensor in params.items()}, path_of(folder, FIRST))


def first_in(folder: Path) -> Params:
    """Return the run's first parameters. Raise OSError."""
    with safe_open(path_of(folder, FIRST), framework="numpy") as file:
        return {name: jnp.asarray(file.get_tensor(name)) for name in sorted(file.keys())}


def params_in(folder: Path, name: str) -> Params:
    """Return the parameters of the shared state of that name; the first parameters for "". Raise OSError.

    The parameters come first in the shared state of every method.
    """
    first = first_in(folder)
    if not name:
        return first
    params: Params = like(first, load(path_of(folder, name))[0][: len(first)])
    return params


def path_of(folder: Path, name: str) -> Path:
    """Return the path of the state of that name."""
    return folder / f"{name}.safetensors"


class Slots:
    """The shared vectors of a worker: float32 [2, N] in its own file, which the other workers map into their memory."""

    def __init__(self, folder: Path, name: str, size_N: int) -> None:
        self._folder, self._size_N = folder, size_N
        with (folder / name).open("ab") as file:
            file.truncate(2 * 4 * size_N)  # An existing file keeps its length and content: others may be reading it.
        self._mine = self._map(name, "r+")
        self._others: dict[str, Vector] = {}

    def _map(self, name: str, mode: Literal["r", "r+"]) -> Vector:
        return np.memmap(self._folder / name, np.float32, mode, shape=(2, self._size_N))

    def share(self, n: int, vector_N: Vector) -> None:
        """Write this worker's vector for the n-th exchange."""
        self._mine[n % 2] = vector_N

    def mean(self, n: int, members: Iterable[str]) -> Vector:
        """Return the mean of the members' vectors for the n-th exchange: float32 [N], summed in their order."""
        total_N: Vector | None = None
        count = 0
        for name in members:
            if name not in self._others:
                self._others[name] = self._map(name, "r")
            other_N = self._others[name][n % 2]
            total_N = np.array(other_N) if total_N is None else total_N + other_N
            count += 1
        assert total_N is not None  # noqa: S101
        return np.asarray(total_N / np.float32(count))
