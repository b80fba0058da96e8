"""Spectra on an accelerator, in a process of their own, while the merger stays on the processor.

The process holds a small share of one accelerator's memory. Before it is used, its bits are compared with numpy's on a
trial matrix. If they differ, or if it fails later, one line says so and the merger's processor goes on, to the same
bits. A merger with it and one without can take over from each other.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from archipelago.merger.spectra import Matrix, Power, Products, by_xla, powered

log = logging.getLogger(__name__)
#: An answer that takes longer, also to compile a program, never comes.
PATIENCE_SECONDS: Final = 120.0
#: The share of the accelerator's memory that the process may take.
_MEMORY_SHARE: Final = "0.1"


class Accelerator:
    """A process that changes spectra. It starts when the first large matrix is changed.

    Calling it returns the way to change large matrices, as `Spectra` expects.

    Args:
        platform: The platform of JAX in the process.
        otherwise: Returns what changes large matrices without the process.
    """

    def __init__(self, platform: str = "cuda", otherwise: Callable[[], Power | None] = by_xla) -> None:
        self._platform, self._otherwise = platform, otherwise
        self._lock = threading.Lock()  # one matrix at a time
        self._pipe: Connection | None = None
        self._is_tried = False

    def __call__(self) -> Power | None:
        """Return what changes large matrices."""
        with self._lock:
            if not self._is_tried:
                self._is_tried = True
                self._start()
        return self._power if self._pipe else self._otherwise()

    def _start(self) -> None:
        from archipelago.merger.xla_spectra import has_same_bits

        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, self._platform), name="spectra", daemon=True).start()
        theirs.close()
        try:
            if has_same_bits(partial(_answer, pipe), f"JAX on {self._platform}"):
                self._pipe = pipe
        except (OSError, EOFError, RuntimeError) as error:
            self._lose(error)

    def _power(self, x_SC: Matrix, exponent: float) -> Matrix:
        with self._lock:
            try:
                if self._pipe:
                    return _answer(self._pipe, x_SC, exponent)
            except (OSError, EOFError, RuntimeError) as error:
                self._lose(error)
        otherwise = self._otherwise()
        return otherwise(x_SC, exponent) if otherwise else powered(x_SC, exponent, Products())

    def _lose(self, error: Exception) -> None:
        what = "the process for spectra on %s failed (%s), so this processor changes them"
        log.warning(what, self._platform, str(error) or "it has ended")
        self._pipe = None


def _answer(pipe: Connection, x_SC: Matrix, exponent: float) -> Matrix:
    """Return what the process computes.

    Raises:
        OSError, EOFError: It has ended.
        RuntimeError: It cannot do this, or does not answer.
    """
    pipe.send((x_SC, exponent))
    if not pipe.poll(PATIENCE_SECONDS):
        raise RuntimeError(f"no answer within {PATIENCE_SECONDS:.0f} s")
    found = pipe.recv()
    if isinstance(found, str):
        raise RuntimeError(found)
    return np.asarray(found)


def _serve(pipe: Connection, platform: str) -> None:
    """Answer until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the merger decides when it ends
    os.environ |= {
        "JAX_PLATFORMS": platform,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_SHARE,
    }
    power: Power | None = None
    while True:
        try:
            x_SC, exponent = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if power is None:
                import jax

                from archipelago.merger.xla_spectra import on_device

                power = on_device(jax.local_devices()[0])
            pipe.send(power(x_SC, exponent))
        except Exception as error:  # noqa: BLE001 - of JAX or its plugin; the merger goes on without
            pipe.send(f"{type(error).__name__}: {error}"[:500])
