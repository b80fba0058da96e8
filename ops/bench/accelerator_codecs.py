"""The processes of `archipelago bench accelerator` for codecs and spectra: speed and bits on the device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from archipelago.broker.codecs import CODECS, Vector, body_of, codec
from archipelago.ops.bench.output import ratio_row, seconds_of, taking_turns

CODEC = "int4"
#: Quantising on an accelerator takes at most as long as this many copies of the vector.
GOAL_COPIES = 2.0
#: How often a program of the quantiser runs, after one run that compiles.
TIMES = 20
#: The same for spectra.
SPECTRA_TIMES = 3
#: Hidden matrices and embeddings of models from 1 M to 7 B parameters, with the exponents of their singular values.
MATRICES = (
    ((128, 512), 0.0), ((512, 1408), 0.0), ((1024, 4096), 0.0), ((8192, 512), 0.5), ((50257, 768), 0.5),
    ((4096, 11008), 0.0),
)  # fmt: skip


class OnDevice(NamedTuple):
    """What a framework does on its default device.

    Attributes:
        put: Brings a vector of the host to the device.
        quantise: From the name of a codec and a vector to the codec's parts.
        restore: From the name of a codec, its parts and the number of elements to a vector.
        wait: Waits for a result of these.
        fetch: Brings an array to the host.
    """

    name: str
    put: Callable[[Vector], Any]
    quantise: Callable[[str, Any], Any]
    restore: Callable[[str, Any, int], Any]
    copy: Callable[[Any], Any]
    wait: Callable[[Any], object]
    fetch: Callable[[Any], Vector]


def frameworks() -> Iterator[OnDevice]:
    """Yield JAX, and PyTorch if it is installed."""
    import jax
    import jax.numpy as jnp

    quantise = jax.jit(lambda name, x_N: codec(name).quantise(x_N, jnp), static_argnums=0)
    restore = jax.jit(lambda name, parts, n: codec(name).restore(parts, n, jnp), static_argnums=(0, 2))
    yield OnDevice("JAX", jax.device_put, quantise, restore, jax.jit(jnp.copy), jax.block_until_ready, np.asarray)
    if find_spec("torch") is None:
        return
    import torch

    from archipelago.islands.pytorch.codecs import CODECS as OURS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield OnDevice(
        "PyTorch",
        put=lambda values_N: torch.from_numpy(values_N.copy()).to(device),
        quantise=lambda name, x_N: OURS[name].quantise(x_N),
        restore=lambda name, parts, n: OURS[name].restore(parts, n),
        copy=torch.clone,
        wait=lambda found: torch.cuda.synchronize() if device.type == "cuda" else None,
        fetch=lambda found: found.cpu().numpy(),
    )


def quantise_and_copy(pipe: Connection, elements: int) -> None:
    """Send the row of each framework, quantising a vector where it lies against copying it, and None."""
    import jax

    values_N = np.random.default_rng(0).standard_normal(elements, np.float32)
    goal = GOAL_COPIES if jax.default_backend() != "cpu" else ""
    for each in frameworks():
        ours, copy = (1e3 * statistics.median(turns) for turns in taking_turns(_sides(each, each.put(values_N)), TIMES))
        what = f"{each.name}, {elements / 1e6:g} M elements to {CODEC}, ms"
        pipe.send(ratio_row(what, ours, "a copy", copy, goal=goal))
    pipe.send(None)


def _sides(device: OnDevice, vector_N: Any) -> list[Callable[[], float]]:
    def timed(work: Callable[[], Any]) -> Callable[[], float]:
        return lambda: seconds_of(lambda: device.wait(work()))

    return [timed(lambda: device.quantise(CODEC, vector_N)), timed(lambda: device.copy(vector_N))]


def compare_bits(pipe: Connection, elements: int) -> None:
    """Send the row of each codec and framework, with the bytes on the device that differ from numpy's, and None."""
    values = list(_hard_values(elements))
    for each in frameworks():
        for name in CODECS:
            what = f"{each.name}, {name}: bytes sent and read that differ from numpy's"
            differing, total = _differing(each, name, values)
            pipe.send(ratio_row(what, differing, "all", total, goal=0.0))
    pipe.send(None)


def _differing(device: OnDevice, name: str, values: Sequence[Vector]) -> tuple[int, int]:
    """Return how many bytes differ between what a device sends and reads and what numpy does, and of how many."""
    differing, total = 0, 0
    for values_N in values:
        body = codec(name).encode(values_N)
        parts = device.quantise(name, device.put(values_N))
        read_N = device.fetch(device.restore(name, parts, values_N.size))
        wanted = body + _bytes(codec(name).decode(body, values_N.size))
        found = body_of(tuple(map(device.fetch, parts))) + _bytes(read_N)
        differing += int((np.frombuffer(wanted, np.uint8) != np.frombuffer(found, np.uint8)).sum())
        total += len(wanted)
    return differing, total


def _bytes(read_N: Vector) -> bytes:
    """Return the bytes of values that are read. All NaN have the same bytes, because a vector with NaN is refused."""
    return np.where(np.isnan(read_N), np.float32(np.nan), read_N).tobytes()


def _hard_values(elements: int) -> Iterator[Vector]:
    """Yield normal values, values of very different sizes, and some with NaN, infinity, zeros and subnormal numbers."""
    random = np.random.default_rng(1)
    yield random.standard_normal(elements, np.float32)
    yield random.standard_normal(elements, np.float32) * np.exp2(random.integers(-60, 60, elements)).astype(np.float32)
    odd_N = random.standard_normal(100_003).astype(np.float32)
    odd_N[[5, 300, 70_000]], odd_N[1000:1300], odd_N[2000:2200] = [np.nan, np.inf, 0], 0, 1e-39
    yield odd_N


def change_spectra(pipe: Connection, largest: int) -> None:
    """Send the rows of each of MATRICES with no more elements, and None."""
    import jax

    device = jax.devices()[0]
    for shape, exponent in MATRICES:
        if math.prod(shape) <= largest:
            for row in _changed(shape, exponent, device):
                pipe.send(row)
    pipe.send(None)


def _changed(shape: tuple[int, int], exponent: float, device: Any) -> Iterator[dict[str, Any]]:
    """Yield what JAX on this device and numpy make of a matrix: bits, and the times of both.

    The device's time has the way there and back, as for a merger. Those of numpy, and of what a merger here takes
    without the device, are on all cores.
    """
    import jax

    from archipelago.merger.spectra import Spectra
    from archipelago.merger.spectra_trial import trial
    from archipelago.merger.xla_spectra import on_device, program

    matrix_RC = np.random.default_rng(2).standard_normal(shape, np.float32)
    ours = partial(on_device(device), matrix_RC, exponent)
    found_RC: list[Vector] = []

    def on_cores(spectra: Spectra) -> None:
        spectra.change(lambda matrix_RC, exponent, power: found_RC.append(power(matrix_RC, exponent)), asked)

    asked, fastest = [(matrix_RC, exponent)], trial().name
    numpy_seconds = seconds_of(partial(on_cores, Spectra(faster=lambda: None)))
    cores_seconds = seconds_of(partial(on_cores, Spectra()))
    differing = int((ours().view(np.uint32) != found_RC[0].view(np.uint32)).sum())
    with jax.enable_x64(True):
        alone = partial(program, jax.device_put(matrix_RC, device), exponent)
        alone_seconds = min(seconds_of(lambda: alone().block_until_ready()) for _ in range(SPECTRA_TIMES))
    seconds = min(seconds_of(ours) for _ in range(SPECTRA_TIMES))
    what = "the spectrum of {:,} × {:,}, exponent {:g}".format(*shape, exponent)
    yield ratio_row(f"{what}: values that differ from numpy's", differing, "all", matrix_RC.size, goal=0.0)
    yield ratio_row(f"{what}, ms", 1e3 * seconds, "numpy", 1e3 * numpy_seconds)
    yield ratio_row("  without the way there and back, ms", 1e3 * alone_seconds, "numpy", 1e3 * numpy_seconds)
    yield ratio_row(
        f"  by a merger on all cores, {fastest} if large, ms", 1e3 * cores_seconds, "numpy", 1e3 * numpy_seconds
    )
