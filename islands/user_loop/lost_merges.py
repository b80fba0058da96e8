"""Finds a loop that loses what the run has merged: it adopts nothing, sends what it has again, and its run diverges.

In JAX, such a loop trains on without what `sync` returns: `run.sync(params)` in place of `params = run.sync(params)`.
In PyTorch, its optimiser writes copies of its own over the parameters. One small tensor shows it: after the step that
follows a merge, it has the value of before with a step, and not the merged value with a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
#: The most elements of a tensor that is looked at. Reading it waits for the device.
SIZE_MAX = 1 << 16
#: A value is that of before if it is this many times nearer to it than to the merged one, and the other way round.
NEARER = 4.0
#: It warns when this many merges in a row were lost. One proves nothing: in a convex problem, a step may lead back
#: to where the parameters were before the merge.
LOST_MIN = 3
#: It stops to look after this many merges.
LOOKS_MAX = 100


class LostMergeCheck:
    """Looks at merges until the loop has kept one, until it has warned, or LOOKS_MAX times."""

    def __init__(self, *, in_place: bool) -> None:
        self._left, self._lost, self._in_place = LOOKS_MAX, 0, in_place
        self._seen: tuple[str, Any, Any] | None = None

    def choose(self, sizes: Mapping[str, int]) -> str | None:
        """Return which of the tensors that a merge changes to look at; None to look at none.

        Of the small ones, it is the largest, because a step seldom leads back many elements by chance.
        """
        small = [name for name, size in sizes.items() if 0 < size <= SIZE_MAX]
        return max(small, key=sizes.__getitem__) if small and self._left > 0 else None

    def note(self, name: str, before: Any, merged: Any) -> None:
        """Note copies of a tensor, which are arrays of float32 or become such when they are read."""
        self._left -= 1
        self._seen = name, before, merged

    @property
    def waits_for(self) -> str | None:
        """The tensor whose next value says something, if there is one."""
        return None if self._seen is None else self._seen[0]

    def look(self, now: Any) -> None:
        """Compare the tensor with what it was, and warn if merges were lost."""
        assert self._seen is not None  # noqa: S101
        (_, *was), self._seen = self._seen, None
        now = np.asarray(now, np.float32)
        to_before, to_merged = (float(np.linalg.norm(now - np.asarray(each, np.float32))) for each in was)
        if NEARER * to_merged < to_before:
            self._left = 0
        elif NEARER * to_before < to_merged:
            self._lost += 1
        else:
            self._lost = 0
        if self._lost == LOST_MIN:
            self._left = 0
            if self._in_place:
                log.warning(
                    "this optimiser seems to write copies of its own over the parameters (master weights), so the "
                    "island loses what the run has merged. Train in float32 with `torch.autocast`, or copy the "
                    "parameters into its state after each `sync`",
                    extra={"code": "loop.overwritten"},
                )
            else:
                log.warning(
                    "this loop seems to train on without the parameters that `sync` returns, and so without what the "
                    "run has merged. Write `params = run.sync(params, …)`",
                    extra={"code": "loop.not-adopted"},
                )
