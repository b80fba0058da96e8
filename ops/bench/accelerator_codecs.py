"""The processes of `archipelago bench accelerator` for codecs: their speed on the device, and their bits."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from archipelago.broker.codecs import CODECS, Codec, Vector, body_of, codec
from archipelago.ops.bench.output import seconds_of, taking_turns

CODEC = "int4"
#: How often a program of the quantiser runs, after one run that compiles.
TIMES = 20


def quantise_and_copy(pipe: Connection, elements: int) -> None:
    """Send the median seconds to quantise a vector where it lies, and to copy it."""
    import jax
    import jax.numpy as jnp

    values_N = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    quantise = jax.jit(lambda values_N: codec(CODEC).quantise(values_N, jnp))
    copy = jax.jit(jnp.copy)

    def seconds(program: Callable[[jax.Array], Any]) -> float:
        return seconds_of(lambda: jax.block_until_ready(program(values_N)))  # type: ignore[no-untyped-call]

    both = taking_turns([lambda: seconds(quantise), lambda: seconds(copy)], TIMES)
    pipe.send([statistics.median(each) for each in both])


def compare_bits(pipe: Connection, elements: int) -> None:
    """Send (framework, codec, bytes that differ, bytes) of each codec on the device, compared with numpy."""
    import jax
    import jax.numpy as jnp

    found = []
    for name, chosen in CODECS.items():
        program = jax.jit(lambda values_N, chosen=chosen: chosen.quantise(values_N, jnp))
        found.append(("JAX", name, *_differing(chosen, elements, program)))
    if importlib.util.find_spec("torch") is not None:
        from archipelago.islands.pytorch.codecs import CODECS as TORCH_CODECS

        for name, theirs in TORCH_CODECS.items():
            found.append(("PyTorch", name, *_differing(CODECS[name], elements, partial(_by_torch, theirs))))
    pipe.send(found)


def _by_torch(theirs: Any, values_N: Vector) -> list[np.ndarray]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [part.cpu().numpy() for part in theirs.quantise(torch.from_numpy(values_N.copy()).to(device))]


def _differing(chosen: Codec, elements: int, quantise: Callable[[Vector], Any]) -> tuple[int, int]:
    """Return how many bytes differ between what a device sends and what numpy does, and of how many."""
    differing, total = 0, 0
    for values_N in _hard_values(elements):
        wanted = np.frombuffer(chosen.encode(values_N), np.uint8)
        found = np.frombuffer(body_of(tuple(quantise(values_N))), np.uint8)
        differing += int((wanted != found).sum())
        total += wanted.size
    return differing, total


def _hard_values(elements: int) -> Iterator[Vector]:
    """Yield normal values, values of very different sizes, and some with NaN, infinity, zeros and subnormal numbers."""
    random = np.random.default_rng(1)
    yield random.standard_normal(elements, np.float32)
    yield random.standard_normal(elements, np.float32) * np.exp2(random.integers(-60, 60, elements)).astype(np.float32)
    odd_N = random.standard_normal(100_003).astype(np.float32)
    odd_N[[5, 300, 70_000]], odd_N[1000:1300], odd_N[2000:2200] = [np.nan, np.inf, 0], 0, 1e-39
    yield odd_N
