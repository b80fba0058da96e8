"""A limit on the memory that a block of code takes from Python's allocators."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail if the block holds more than `limit` bytes at any time. Arrays and the output of zstandard count, too."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak:,} bytes were taken"
