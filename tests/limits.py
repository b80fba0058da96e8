"""A limit on the memory that a block of code takes, from Python's allocators and from the system."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Address space beyond the limit. An allocator reserves more than its callers request (glibc: 128 MiB for an arena).
SLACK_BYTES = 256 << 20
_STATM = Path("/proc/self/statm")


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail if the block holds more than `limit` bytes from Python's allocators at any time.

    Arrays of numpy and the output of zstandard count too. Other memory of a library, such as a decompressor's window,
    is limited on systems with /proc: there the system refuses more than `limit` + SLACK_BYTES of new address space.

    Raises:
        MemoryError: The system refused the address space.
    """
    tracemalloc.start()
    try:
        with _addresses_below(limit + SLACK_BYTES):
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak:,} bytes were taken"


@contextmanager
def _addresses_below(more: int) -> Iterator[None]:
    """Limit the new address space of the whole process, including its other threads."""
    if not _STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
