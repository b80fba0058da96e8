"""Spectra on an accelerator, in a process of their own, while the merger stays on the processor.

The process holds a small share of one accelerator's memory. Before it is used, its bits are compared with numpy's on a
trial matrix. If they differ, or if it fails later, one line says so and the merger's processor goes on, to the same
bits. It does so, too, for each shape that the accelerator refuses, which may have no room for it. A merger with it and
one without can take over from each other.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import Final

import numpy as np

from archipelago.merger.spectra import Matrix, Power, by_fastest, with_power

log = logging.getLogger(__name__)
#: An answer that takes longer, also to compile a program, never comes.
PATIENCE_SECONDS: Final = 120.0
#: The share of the accelerator's memory that the process may take.
MEMORY_SHARE: Final = 0.1
#: How many matrices are with the process at the same time. Copies to and from the accelerator take as long as a change.
LANES: Final = 4


class _RefusedError(RuntimeError):
    """The accelerator cannot change a matrix, such as for lack of memory. It may be able to change others."""


class Accelerator:
    """A process that changes spectra. It starts when the first large matrix is changed.

    Calling it returns the way to change large matrices, as `Spectra` expects.

    Args:
        platform: The platform of JAX in the process.
        otherwise: Returns what changes large matrices without the process.
    """

    def __init__(self, platform: str = "cuda", otherwise: Callable[[], Power | None] = by_fastest) -> None:
        self._platform, self._otherwise = platform, otherwise
        self._lock = threading.Lock()  # of what follows
        self._process: BaseProcess | None = None  # while it is used
        self._lanes = SimpleQueue[_Lane]()
        self._is_tried = False
        self._refused: set[tuple[int, ...]] = set()  # shapes that are not tried again

    def __call__(self) -> Power | None:
        """Return what changes large matrices."""
        with self._lock:
            if not self._is_tried:
                self._is_tried = True
                self._start()
        return self._power if self._process else self._otherwise()

    def _start(self) -> None:
        from archipelago.merger.spectra_trial import has_same_bits

        try:
            context = get_context("spawn")
            pipes = [context.Pipe() for _ in range(LANES)]
            theirs = [their for _, their in pipes]
            process = context.Process(target=_serve, args=(theirs, self._platform), name="spectra", daemon=True)
            process.start()
            self._process = process
            for own, their in pipes:
                their.close()
                self._lanes.put(_Lane(own, process.pid))
            if not has_same_bits(self._changed, f"JAX on {self._platform}"):
                self._end()
        except (OSError, EOFError, RuntimeError) as error:
            self._failed(error)

    def _changed(self, matrix_RC: Matrix, exponent: float) -> Matrix:
        """Return what the process computes, from any thread. While it changes one matrix, others are on their way.

        Raises:
            OSError, EOFError: It has ended.
            RuntimeError: It refuses this matrix, or does not answer.
        """
        lane = self._lanes.get()
        try:
            return lane.changed(matrix_RC, exponent)
        finally:
            self._lanes.put(lane)

    def _power(self, matrix_RC: Matrix, exponent: float) -> Matrix:
        if self._process and matrix_RC.shape not in self._refused:
            try:
                return self._changed(matrix_RC, exponent)
            except _RefusedError as error:
                what = "%s refuses matrices of %d × %d (%s), so this processor changes them"
                log.warning(what, self._platform, *matrix_RC.shape, error)
                self._refused.add(matrix_RC.shape)
            except (OSError, EOFError, RuntimeError) as error:
                with self._lock:
                    if self._process:  # other threads find the same
                        self._failed(error)
        otherwise = self._otherwise()
        return (otherwise or with_power)(matrix_RC, exponent)

    def _failed(self, error: Exception) -> None:
        what = "the process for spectra on %s failed (%s), so this processor changes them"
        log.warning(what, self._platform, str(error) or "it has ended")
        self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
        self._process = None


class _Lane:
    """A way to the process, for one matrix at a time.

    The matrix lies in memory that both processes share, because a pipe takes ten times as long to carry it.
    """

    def __init__(self, pipe: Connection, process: int | None) -> None:
        self._pipe, self._process = pipe, process
        self._shared: mmap | None = None

    def changed(self, matrix_RC: Matrix, exponent: float) -> Matrix:
        if self._shared is None or len(self._shared) < matrix_RC.nbytes:
            file = os.memfd_create("spectra")
            os.ftruncate(file, matrix_RC.nbytes)
            self._shared = mmap(file, matrix_RC.nbytes)
            self._pipe.send(matrix_RC.nbytes)
            send_handle(self._pipe, file, self._process)
            os.close(file)
        shared_RC = np.frombuffer(self._shared, np.float32, matrix_RC.size).reshape(matrix_RC.shape)
        shared_RC[:] = matrix_RC
        self._pipe.send((matrix_RC.shape, exponent))
        if not self._pipe.poll(PATIENCE_SECONDS):
            raise RuntimeError(f"no answer within {PATIENCE_SECONDS:.0f} s")
        if fault := self._pipe.recv():
            raise _RefusedError(fault)
        return shared_RC.copy()


def _serve(pipes: Sequence[Connection], platform: str) -> None:
    """Answer until the other ends are closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the merger decides when it ends
    os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)  # JAX refuses both names of the last one
    os.environ |= {
        "JAX_PLATFORMS": platform,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY_SHARE}",
    }
    with ThreadPoolExecutor(len(pipes)) as pool:
        list(pool.map(_answer, pipes))


def _answer(pipe: Connection) -> None:
    """Change each matrix that the other end of a lane has written, until that end is closed."""
    shared: mmap | None = None
    while True:
        try:
            asked = pipe.recv()
            if isinstance(asked, int):
                file = recv_handle(pipe)
                shared = mmap(file, asked)
                os.close(file)
                continue
        except (EOFError, OSError):
            return
        shape, exponent = asked
        try:
            import jax

            from archipelago.merger.xla_spectra import on_device

            assert shared is not None  # noqa: S101
            shared_RC = np.frombuffer(shared, np.float32, math.prod(shape)).reshape(shape)
            shared_RC[:] = on_device(jax.local_devices()[0])(shared_RC, exponent)
            pipe.send("")
        except Exception as error:  # noqa: BLE001 - of JAX or its plugin; the merger goes on without
            pipe.send(f"{type(error).__name__}: {error}"[:500])
