"""Finds a loop that trains on without what `sync` returns: `run.sync(params)` in place of `params = run.sync(params)`.

Such a loop adopts nothing and sends what it has again, so the run diverges without an error. After a merge, one small
leaf shows it: the next tree has the value of before with a step, and not the merged value with a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

log = logging.getLogger(__name__)
#: The most elements of a leaf that is looked at. Reading it waits for the device.
SIZE_MAX = 1 << 16
#: A value is that of before if it is this many times nearer to it than to the merged one, and the other way round.
NEARER = 4.0
#: It warns when this many merges in a row were lost. One proves nothing: in a convex problem, a step may lead back
#: to where the parameters were before the merge.
LOST_MIN = 3
#: It stops to look after this many merges.
LOOKS_MAX = 100


class UnassignedCheck:
    """Looks at merges until the loop has taken one, until it has warned, or LOOKS_MAX times."""

    def __init__(self) -> None:
        self._left, self._lost = LOOKS_MAX, 0
        #: How far the step went after a merge that seems lost, while the next step is awaited.
        self._came: float | None = None
        self._seen: tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def merged(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Note a leaf that a merge has changed."""
        if self._left <= 0 or self._came is not None:
            return
        self._left -= 1
        changed = [name for name, leaf in after.items() if leaf is not before.get(name) and _is_small(leaf)]
        if changed:
            name = min(changed, key=lambda each: int(after[each].size))
            self._seen = name, np.asarray(before[name], np.float32), np.asarray(after[name], np.float32)

    @property
    def waits(self) -> bool:
        """Whether the next tree says something."""
        return self._seen is not None

    def look(self, leaves: Mapping[str, Any]) -> None:
        """Compare the leaf with what it was, and warn if merges were lost.

        A merge that took one step back looks lost after the step that makes it again. The next step says how long a
        step is: that one only went back to where it was, unless it was about as long.
        """
        assert self._seen is not None  # noqa: S101
        (name, before, merged), self._seen = self._seen, None
        now = np.asarray(leaves[name], np.float32)
        to_before, to_merged = (float(np.linalg.norm(now - each)) for each in (before, merged))
        if self._came is not None:  # here `merged` is the value of the last look
            self._lost, self._came = self._lost + 1 if to_merged < 2.0 * self._came else 0, None
        elif NEARER * to_merged < to_before:
            self._left = 0
        elif NEARER * to_before < to_merged:
            self._came, self._seen = to_before, (name, before, now)
        else:
            self._lost = 0
        if self._lost == LOST_MIN:
            self._left = 0
            log.warning(
                "this loop seems to train on without the parameters that `sync` returns, and so without what the run "
                "has merged. Write `params = run.sync(params, …)`",
                extra={"code": "loop.not-adopted"},
            )


def _is_small(leaf: Any) -> bool:
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    return is_here and 0 < leaf.size <= SIZE_MAX
