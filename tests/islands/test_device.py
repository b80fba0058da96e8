"""An island says which device it uses, how to use the others, and whether the run fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from archipelago.broker.config import InnerConfig
from archipelago.broker.footprint import ON_DEVICE
from archipelago.islands import prepared
from archipelago.islands.inner import begin, compile_steps
from archipelago.islands.mesh.shape import MeshShape
from archipelago.islands.models.registry import build
from archipelago.islands.prepared import memory_in_words, unused_devices
from tests.harness import tiny


def devices(count: int, platform: str, version: str = "") -> list[jax.Device]:
    client = SimpleNamespace(platform_version=version)
    made = [SimpleNamespace(platform=platform, device_kind="H100", client=client, id=n) for n in range(count)]
    return cast(list[jax.Device], made)


def test_the_command_for_the_other_devices_is_said() -> None:
    assert unused_devices(devices(1, "gpu"), MeshShape(), {}) == ""
    assert unused_devices(devices(4, "gpu"), MeshShape(fsdp=2, tensor=2), {}) == ""
    assert "1 of 4 devices" in unused_devices(devices(4, "cpu"), MeshShape(), {})
    chosen = {"CUDA_VISIBLE_DEVICES": "4, 5,7,8"}
    for platform, version, environment, expected in (
        ("gpu", "cuda 13", {}, "CUDA_VISIBLE_DEVICES=2,3 "),
        ("gpu", "cuda 13", chosen, "CUDA_VISIBLE_DEVICES=7,8 "),
        ("gpu", "PJRT C API\nrocm 6", {}, "HIP_VISIBLE_DEVICES=2,3 "),
        ("tpu", "", {}, "TPU_VISIBLE_CHIPS=2,3 "),
    ):
        said = unused_devices(devices(4, platform, version), MeshShape(data=2), environment)
        assert "2 of 4 devices" in said
        assert expected in said


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


@pytest.mark.full
def test_the_training_alone_takes_what_the_table_says() -> None:
    """The bytes a parameter of the compiled inner step of a small model, with a batch of two tokens."""
    model = build("tiny")
    state = jax.eval_shape(lambda: begin(InnerConfig(), model.init(0)))
    steps: Any = compile_steps(model, InnerConfig())
    found = steps.lower(state, jnp.zeros((1, 1, 3), jnp.uint8), jnp.int32(0)).compile().memory_analysis()
    parameters = sum(tensor.size for tensor in model.tensors)
    alone = ON_DEVICE["parameters and moments"] + ON_DEVICE["gradients and updates"]
    assert (found.argument_size_in_bytes + found.temp_size_in_bytes) / parameters == pytest.approx(alone, rel=0.1)
    assert found.alias_size_in_bytes >= ON_DEVICE["parameters and moments"] * parameters  # the next state takes no more
