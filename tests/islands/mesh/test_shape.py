"""The text of a mesh, its default, and the table that splits tensors."""

from __future__ import annotations

import pytest

from archipelago.broker.config import ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.islands.main import IslandOptions
from archipelago.islands.main import main as island
from archipelago.islands.mesh import MeshShape, by_default, parsed, require_divided, require_present
from archipelago.islands.models.registry import build
from archipelago.islands.placement import axes_of, specs
from archipelago.ops.launch.devices import leave_to_children
from archipelago.ops.launch.init import workload_of
from tests.failing import failing


def test_a_mesh_is_read_and_written() -> None:
    for text, shape in (
        ("data=2,fsdp=2,tensor=1", MeshShape(2, 2, 1)),
        (" tensor = 4 ", MeshShape(tensor=4)),
        ("data=1", MeshShape()),
    ):
        assert parsed(text) == shape
        assert parsed(str(shape)) == shape


def test_a_driver_that_fails_ends_whatever_trains_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> None:
        raise AssertionError

    monkeypatch.setattr("jax.devices", devices)
    for call in (leave_to_children, lambda: workload_of(RunConfig(), None)):
        with failing(ConfigError, "devices.broken") as caught:
            call()
        assert "(AssertionError)" in caught.value.what


def test_other_texts_are_refused_before_anything_loads() -> None:
    for text in (
        *("", "4", "data=2,,fsdp=2", "data=2=2", "rows=2", "data=2,data=2"),
        *("data=", "data=0", "data=-1", "data=two", "data=2.5", "data=9999", "data=٢"),
    ):
        with failing(ConfigError, "config.value"):
            parsed(text)
        with failing(ConfigError, "config.value"):
            island(IslandOptions(url="redis://127.0.0.1:1", mesh=text, name="one", wait_seconds=0.0))


def test_by_default_data_takes_the_devices_that_divide_the_batch() -> None:
    for devices, batch, data in ((1, 8, 1), (4, 8, 4), (8, 12, 6), (3, 8, 2), (5, 7, 1), (6, 0, 6)):
        assert by_default(devices, batch) == MeshShape(data=data)


def test_a_mesh_must_divide_the_batch_and_be_present() -> None:
    require_divided(MeshShape(2, 2, 3), 8)
    with failing(ConfigError, "mesh.size"):
        require_divided(MeshShape(2, 2), 6)
    require_present(MeshShape(2, 2), 4, "cpu")
    with failing(ConfigError, "mesh.size"):
        require_present(MeshShape(2, 2, 2), 4, "cpu")


def test_the_table_splits_each_kind_of_tensor() -> None:
    sizes = MeshShape(2, 2, 2).sizes()
    split = {
        "embedding": (("tensor", "fsdp"),),
        "layers.0.attention.query.kernel": (("fsdp",), ("tensor",)),
        "layers.0.mlp.experts.1.down.kernel": (("tensor", "fsdp"),),
        "layers.0.mlp.router.kernel": (("fsdp",),),
        "layers.0.mlp.gate.kernel": (("fsdp",), ("tensor",)),
        "mine.whatever": (("fsdp",),),
    }
    for name, axes in split.items():
        assert axes_of(Tensor(name, (64, 32)), sizes) == axes, name
    assert axes_of(Tensor("norm.scale", (64,)), sizes) == ()
    assert axes_of(Tensor("embedding", (6, 64)), sizes) == (("tensor",),)  # 6 rows: fsdp does not divide the rest
    assert axes_of(Tensor("a.out.kernel", (7, 64)), sizes) == ((),)


def test_an_axis_that_splits_nothing_is_refused() -> None:
    tensors = build(ModelConfig("tiny")).tensors
    assert specs(tensors, MeshShape(fsdp=2, tensor=2))
    for shape in (MeshShape(fsdp=3), MeshShape(tensor=5)):
        with failing(ConfigError, "mesh.size"):
            specs(tensors, shape)
