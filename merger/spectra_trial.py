"""Which way to change spectra is the fastest on this machine, and whether it comes to numpy's bits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Final, NamedTuple

import jax
import numpy as np

from archipelago.merger.spectra import Matrix, Power, operations, with_power
from archipelago.merger.xla_spectra import on_device

log = logging.getLogger(__name__)
#: The rows and columns of the matrix on which all ways are compared, and how often.
_TRIAL, _TRIALS = (256, 1024), 3
_ONE_TRIAL: Final = threading.Lock()
_OTHER_BITS: Final = "%s computes other bits of spectra than numpy on this machine, so it is not used for them"


class Trial(NamedTuple):
    """How this machine's processor changes a trial matrix fastest.

    Attributes:
        name: What multiplies: PyTorch, XLA or numpy.
        power: The way to change spectra by it; None for numpy.
        rate: The operations a second of one thread.
    """

    name: str
    power: Power | None
    rate: float


def trial() -> Trial:
    """Return how this machine's processor changes spectra. It is tried once."""
    with _ONE_TRIAL:  # threads need it at the same time
        return _tried()


@cache
def _tried() -> Trial:
    """Take the first way that is faster than numpy. XLA comes last, because it compiles a program for each shape."""
    work, of_numpy = operations(_TRIAL, 0.0), _least_seconds(with_power)
    for name, power in _ways():
        if has_same_bits(power, name) and (seconds := _least_seconds(power)) < of_numpy:
            log.info("%s changes spectra in %.2f of numpy's time", name, seconds / of_numpy)
            return Trial(name, power, work / seconds)
    return Trial("numpy", None, work / of_numpy)


def _ways() -> Iterator[tuple[str, Power]]:
    """Yield what may be faster than numpy."""
    if find_spec("torch"):
        try:
            yield "PyTorch", _by_torch()
        except Exception as error:  # noqa: BLE001 - an installation can be broken in any way, and numpy does the same
            log.info("PyTorch changes no spectra: %s", error)
    yield "XLA", on_device(jax.local_devices(backend="cpu")[0])


def _by_torch() -> Power:
    from archipelago.merger.torch_spectra import TorchProducts, power

    largest = np.full((64, 64), 127, np.int16)
    sums = TorchProducts().product(largest, largest, axis=0)  # raises where this PyTorch has no product of int8
    if sums.min() != 64 * 127**2:
        raise ArithmeticError("its sums of products overflow on this processor, which has no VNNI")
    return power


def by_default_device() -> Power | None:
    """Return the way of JAX's default device, for mergers in a process that trains there, or that of a processor."""
    with _ONE_TRIAL:
        power = _of_default_device()
    return power or trial().power


@cache
def _of_default_device() -> Power | None:
    device = jax.local_devices()[0]
    found = on_device(device)
    is_same = device.platform != "cpu" and has_same_bits(found, f"JAX on {device.device_kind}")
    return found if is_same else None


def has_same_bits(candidate: Power, name: str, shape: tuple[int, int] = _TRIAL) -> bool:
    """Return whether it has numpy's bits on a trial matrix, wide and tall. Other bits are logged."""
    wide_SC = _trial(shape)
    for exponent in (0.0, 0.5):
        expected_SC = with_power(wide_SC, exponent)
        for matrix_RC, expected_RC in ((wide_SC, expected_SC), (np.ascontiguousarray(wide_SC.T), expected_SC.T)):
            if not np.array_equal(candidate(matrix_RC, exponent).view(np.uint32), expected_RC.view(np.uint32)):
                log.warning(_OTHER_BITS, name)
                return False
    return True


def _least_seconds(way: Power) -> float:
    """Return the processor time that a way takes for the trial matrix.

    XLA shares more of a matrix among threads than the others do, so elapsed time would favour XLA.
    """
    wide_SC, found = _trial(_TRIAL), []
    for _ in range(_TRIALS):
        began = time.process_time()
        way(wide_SC, 0.0)
        found.append(time.process_time() - began)
    return min(found)


def _trial(shape: tuple[int, int]) -> Matrix:
    random = np.random.default_rng(0)
    return (random.uniform(-1.0, 1.0, shape) * np.exp2(random.integers(-8, 1, shape[1]))).astype(np.float32)
