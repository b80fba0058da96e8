"""An island says which device it uses, how to use the others, and whether the run fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from archipelago.islands import prepared
from archipelago.islands.mesh.shape import MeshShape
from archipelago.islands.prepared import memory_in_words, unused_devices
from tests.harness import tiny


def devices(count: int, platform: str) -> list[jax.Device]:
    made = [SimpleNamespace(platform=platform, device_kind="H100", id=n) for n in range(count)]
    return cast(list[jax.Device], made)


def test_devices_that_are_not_used_are_said() -> None:
    assert unused_devices(devices(1, "gpu"), MeshShape()) == ""
    assert unused_devices(devices(4, "gpu"), MeshShape(fsdp=2, tensor=2)) == ""
    for platform in ("cpu", "gpu"):
        assert "1 of 4 devices" in unused_devices(devices(4, platform), MeshShape())


def test_a_run_that_does_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, (cpu,), (gpu,) = tiny.manifest(), devices(1, "cpu"), cast(Any, devices(1, "gpu"))
    gpu.memory_stats = lambda: {"bytes_limit": 1}
    monkeypatch.setattr(prepared, "available_here", lambda: 64 << 30)
    said, troubles = memory_in_words(manifest, cpu)
    assert "merger" in said
    assert not troubles
    said, (trouble,) = memory_in_words(manifest, gpu)
    assert "on the device" in said
    assert "device" in trouble
    monkeypatch.setattr(prepared, "available_here", lambda: 1 << 20)
    assert len(memory_in_words(manifest, cpu)[1]) == 1
