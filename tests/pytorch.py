"""PyTorch and what builds on it. They are optional: tests that need them are skipped without them, and fail in CI."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

from tests import tiers


def installed(package: str) -> None:
    """Skip the test or its module without the package; in CI's full tier, fail. It is not imported."""
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed (`make test-all` installs it)"
        if os.environ.get("CI") and tiers.is_full():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def required(package: str = "torch") -> Any:
    """Return the module of that name, if it is `installed`."""
    installed(package)
    return importlib.import_module(package)
