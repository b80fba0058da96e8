"""PyTorch for the tests that need it. It is optional, so they are skipped where it is missing, and fail in CI."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from tests import tiers


def required() -> Any:
    """Return the module `torch`. Without it, skip the test module; in CI's full tier, fail."""
    if importlib.util.find_spec("torch") is None:
        reason = "PyTorch is not installed (`make test-all` installs it)"
        if os.environ.get("CI") and tiers.is_full():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    import torch

    return torch
