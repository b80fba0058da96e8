"""Rows in order, in bounded memory, and what is computed from them. Pure.

A trail keeps every row until it is full. Then it joins neighbours, so that half as many rows each represent twice
as many additions. The page of a run of several weeks is therefore as small as that of an hour.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

#: The most rows of a trail. If there are more, neighbouring rows are joined.
ROWS_KEPT = 4096
SMOOTHING = 0.8

Row = TypeVar("Row")


def thinned(rows: Sequence[Row], most: int, joined: Callable[[Sequence[Row]], Row]) -> list[Row]:
    """Return at most `most` rows, each of which joins equally many neighbours."""
    span = max(1, math.ceil(len(rows) / most))
    return [joined(rows[start : start + span]) for start in range(0, len(rows), span)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def smoothed(values: Iterable[float], smoothing: float = SMOOTHING) -> list[float]:
    """Return the bias-corrected exponential moving average; NaN leaves it unchanged."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if not math.isnan(value):
            total = smoothing * total + (1.0 - smoothing) * value
            weight = smoothing * weight + (1.0 - smoothing)
        out.append(total / weight if weight else math.nan)
    return out


class Trail(Generic[Row]):
    """Rows in order, at most `most` of them, evenly thinned: each represents `span` added rows."""

    def __init__(self, joined: Callable[[Sequence[Row]], Row], most: int = ROWS_KEPT) -> None:
        self.joined, self.most, self.span = joined, most, 1
        self._rows: list[Row] = []
        self._open: list[Row] = []

    def add(self, row: Row) -> None:
        """Add the newest row."""
        self._open.append(row)
        if len(self._open) < self.span:
            return
        self._rows.append(self.joined(self._open))
        self._open = []
        if len(self._rows) >= self.most:
            self._rows = [self.joined(self._rows[n : n + 2]) for n in range(0, len(self._rows), 2)]
            self.span *= 2

    @property
    def rows(self) -> list[Row]:
        """All rows. The last one may represent fewer additions."""
        return [*self._rows, *([self.joined(self._open)] if self._open else [])]


def columns(rows: Sequence[Any], kind: Any) -> dict[str, list[Any]]:
    """Return rows of the named tuple `kind` as one list for each field."""
    return {name: [row[index] for row in rows] for index, name in enumerate(kind._fields)}
