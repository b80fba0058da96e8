"""An island's settings and devices: those with less memory than others, what is not used, and whether the run fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from archipelago.broker.config import OWN_MODEL, DataConfig, InnerConfig, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands import prepared
from archipelago.islands.inner import accumulated, begin, compile_steps, gradient
from archipelago.islands.mesh import MeshShape
from archipelago.islands.options import IslandOptions, own_settings
from archipelago.islands.prepared import memory_in_words, unused_devices
from tests.failing import failing
from tests.harness import tiny
from tests.islands.models import mini

CONFIG = RunConfig(data=DataConfig(batch_size=8))
TASK = replace(CONFIG, model=ModelConfig(OWN_MODEL))


def test_an_island_computes_by_the_settings_of_the_run_unless_it_has_its_own() -> None:
    assert own_settings(IslandOptions(micro_batches=None, rematerialise=None), CONFIG) is CONFIG
    own = own_settings(IslandOptions(micro_batches=4, rematerialise=True), CONFIG)
    assert (own.inner.micro_batches, own.model.rematerialise) == (4, True)
    assert replace(own, inner=CONFIG.inner, model=CONFIG.model) == CONFIG
    assert own_settings(IslandOptions(micro_batches=1, rematerialise=False), own) == CONFIG


def test_settings_that_cannot_be_used_are_refused() -> None:
    for config, micro_batches, rematerialise, code in (
        (CONFIG, 3, None, "config.micro-batches"),
        (TASK, 0, None, "config.micro-batches"),
        (TASK, None, True, "task.setting"),
    ):
        with failing(ConfigError, code):
            own_settings(IslandOptions(micro_batches=micro_batches, rematerialise=rematerialise), config)


# -- gradient accumulation -----------------------------------------------------------------------------------------

TINY = mini.dense()
#: Two batches of twelve sequences.
TOKENS_nxBxT1 = np.random.default_rng(3).integers(0, 256, (2, 12, 97), np.uint8)


@pytest.mark.full
def test_inner_steps_in_parts_take_less_memory_and_differ_by_rounding_only() -> None:
    state, tokens, step = begin(InnerConfig(), mini.params_of(TINY)), jnp.asarray(TOKENS_nxBxT1), jnp.int32(0)
    compiled = {
        parts: compile_steps(TINY, InnerConfig(micro_batches=parts)).lower(state, tokens, step).compile()  # type: ignore[attr-defined]
        for parts in (1, 6)
    }
    temporary = {parts: program.memory_analysis().temp_size_in_bytes for parts, program in compiled.items()}
    assert temporary[6] < 0.4 * temporary[1]
    results = [program(jax.tree.map(jnp.copy, state), tokens, step) for program in compiled.values()]
    (one, losses), (other, others) = results
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    whole, parts = (optax.tree_utils.tree_get(each.optimizer, "mu") for each in (one, other))
    for name, expected in whole.items():
        np.testing.assert_allclose(parts[name], expected, rtol=1e-3, atol=1e-6, err_msg=name)


def test_a_batch_that_has_no_equal_parts_is_refused() -> None:
    with failing(ConfigError, "config.micro-batches"):
        jax.eval_shape(accumulated(gradient(TINY), 5), mini.params_of(TINY), TOKENS_nxBxT1[0])


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
