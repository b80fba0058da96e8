"""`bench lora`: islands send adapters only, and every part is in the table."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.ops.bench.lora import LoraOptions, main, measured
from tests import pytorch
from tests.failing import failing


@pytest.mark.full
def test_islands_that_fine_tune_adapters_send_less_than_those_of_the_whole_model() -> None:
    for package in ("torch", "transformers", "peft"):
        pytorch.required(package)
    found = measured(LoraOptions(islands=2, steps=26, first_steps=1, width=16))
    rows = {row["what"]: row for row in found["rows"]}
    lora, whole = rows["LoRA, 2 islands, isotropic"], rows["whole model, 2 islands, isotropic"]
    assert 0 < lora["trained"] < whole["trained"] == found["parameters"]
    assert 0 < lora["bytes_a_sync"] < whole["bytes_a_sync"]
    assert all(row["held_out"] < found["before"] for row in found["rows"])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec

    def without_peft(name: str, *rest: Any) -> Any:
        return None if name == "peft" else present(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_peft)
    with failing(ConfigError, "bench.lora") as caught:
        main(LoraOptions())
    assert "peft" in caught.value.what
