"""`import archipelago`: the public names, imported on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import archipelago


def test_every_public_name_can_be_used() -> None:
    assert dir(archipelago) == sorted(archipelago.__all__)
    for name in archipelago.__all__:
        assert getattr(archipelago, name)
    assert archipelago.__version__ == version("archipelago-train")
    assert issubclass(archipelago.ConfigError, archipelago.ArchipelagoError)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        archipelago.no_such_name  # noqa: B018


def test_the_import_loads_no_library() -> None:
    code = "import sys, archipelago; print(*({'numpy', 'jax', 'redis', 'pydantic', 'tyro'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
