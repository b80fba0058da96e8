"""Held-out losses of a script: its function evaluates the merged parameters, or it reports what it has measured."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from archipelago.broker.codecs import Vector
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import MEASURE_MAX
from archipelago.broker.observe.losses import loss_unit
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.evaluator import TICK_SECONDS, Evaluator, Measures

#: A function of a script from the merged parameters to a held-out loss.
Evaluate = Callable[[Any], Any]


def checked_loss(value: Any, source: str) -> float:
    """Return a held-out loss as a number, as `report` takes it.

    `source` says in the error what part of the script gives it. Raises ConfigError (`loop.argument`) if it is no finite
    number.
    """
    try:
        loss = math.nan if isinstance(value, str | bytes | bool) else float(getattr(value, "item", lambda: value)())
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers gives any of these
        loss = math.nan
    if not abs(loss) <= MEASURE_MAX:
        raise ConfigError(
            f"{source} is {value!r:.60}, which is no finite number",
            "Give the mean loss on held-out data: a number, or an array or tensor of one element.",
            code="loop.argument",
        )
    return loss


def require_evaluate(function: Any) -> None:
    """Raise ConfigError (`loop.argument`) unless `evaluate` is None or can be called with the parameters."""
    try:
        if function is not None:
            inspect.signature(function).bind(None)
    except TypeError:
        raise ConfigError(
            f"`evaluate` is {function!r:.60}, which cannot be called with one argument",
            "Give a function from the parameters (in PyTorch, the module) to the mean loss on held-out data.",
            code="loop.argument",
        ) from None
    except ValueError:  # a built-in function that does not tell its arguments
        return


class LoopEvaluator(Evaluator):
    """The held-out losses of a script. The thread that trains evaluates, between two steps.

    The thread of the evaluator asks for it, and renews the lease meanwhile. A loop that has stopped to sync leaves the
    lease to other islands.
    """

    def __init__(self, link: Link, evaluate: Callable[[Sequence[Vector]], Any] | None) -> None:
        """Note the island. `evaluate` is called with the vectors of all fragments; None if the island only reports."""
        super().__init__(link.transport, link.manifest, link.who, None, link.all_held)
        self._heartbeats, self._loss = link.heartbeats, evaluate
        self.evaluates = evaluate is not None
        self._asked: tuple[Sequence[Vector], Future[Measures]] | None = None

    def serve(self) -> bool:
        """Evaluate in the calling thread if that is asked for. Return whether it was."""
        if (asked := self._asked) is None:
            return False
        vectors, answer = asked
        if answer.done() or not answer.set_running_or_notify_cancel():
            return False
        try:
            answer.set_result(self._evaluated(vectors))
        except Exception as error:  # noqa: BLE001 - the evaluator's thread says it, and the loop trains on
            answer.set_exception(error)
        except BaseException:
            answer.set_exception(RuntimeError("it was interrupted"))
            raise
        return True

    def _measure(self, vectors: Sequence[Vector], stopped: Callable[[], bool]) -> Measures | None:
        if threading.current_thread() is not self._thread:  # the thread that trained, at the end of the run
            return self._evaluated(vectors)
        answer = Future[Measures]()
        self._asked = vectors, answer
        while not wait([answer], TICK_SECONDS).done:
            if (stopped() or not self._holds_lease()) and answer.cancel():
                return None
        return answer.result()

    def _holds_lease(self) -> bool:
        is_evaluating = self._asked is not None and self._asked[1].running()
        if self._heartbeats.is_stalled and not is_evaluating:
            self._free_lease()
            return False
        return super()._holds_lease()

    def _evaluated(self, vectors: Sequence[Vector]) -> Measures:
        assert self._loss is not None  # noqa: S101 - only islands with one are asked
        began = time.perf_counter()
        loss = checked_loss(self._loss(vectors), "what `evaluate` returned")
        # The first call may compile.
        self._used_seconds = time.perf_counter() - began if self._has_measured else 0.0
        self._has_measured = True
        return Measures(loss_unit(self._manifest.corpus).recorded(loss), math.nan)
