"""The two tiers of tests: `make test` runs the quick one, `make test-all` the full one, which has all tests.

A test or module marked `full` runs in the full tier only. A property test has fewer examples in the quick one.
"""

from __future__ import annotations

import os

#: Set to `full` by `make test-all`.
TIER_VARIABLE = "ARCHIPELAGO_TESTS"
#: The quick tier runs one in this many examples of a property test.
QUICK_SHARE = 10


def is_full() -> bool:
    """Return whether the full tier runs."""
    return os.environ.get(TIER_VARIABLE) == "full"


def examples(full: int) -> int:
    """Return the number of examples of a property test.

    The full tier runs `full` examples. The quick tier runs about a tenth of them, and at least five.
    """
    return full if is_full() else max(5, full // QUICK_SHARE)
