"""A trainer's package that is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from archipelago.broker.machine import install_hint


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_a_missing_package_says_how_to_install_it(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", trainer):
        monkeypatch.setitem(sys.modules, name, None)
    for name in (f"archipelago.{trainer}", f"archipelago.islands.trainers.{trainer}"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"archipelago.{trainer}")
    assert install_hint(trainer) in str(caught.value)
