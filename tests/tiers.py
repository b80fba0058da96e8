"""The two tiers of tests: `make test` runs the quick one, `make test-all` the full one.

A test or module marked `full` runs in the full tier only. A property test runs in both, with fewer examples in the
quick one.
"""

from __future__ import annotations

import os

#: Set to `full` by `make test-all`.
TIER_VARIABLE = "ARCHIPELAGO_TESTS"
QUICK_SHARE = 10


def is_full() -> bool:
    """Whether the full tier runs."""
    return os.environ.get(TIER_VARIABLE) == "full"


def examples(full: int) -> int:
    """How many examples a property test tries: `full` of them in the full tier, else about a tenth, at least five."""
    return full if is_full() else max(5, full // QUICK_SHARE)
