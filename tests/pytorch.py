"""PyTorch and what builds on it. They are optional: tests that need them are skipped without them, and fail in CI."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

from tests import tiers


def required(package: str = "torch") -> Any:
    """Return the module of that name. Without it, skip the test module; in CI's full tier, fail."""
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed (`make test-all` installs it)"
        if os.environ.get("CI") and tiers.is_full():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(package)
