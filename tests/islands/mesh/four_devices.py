"""Islands on several devices. `test_four_devices.py` runs this file in a process with four devices."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from archipelago.broker.codecs import Vector, body_of
from archipelago.broker.config import AdoptConfig, InnerConfig, RunConfig, WireConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.islands.checkpoint import IslandStore
from archipelago.islands.computation import Computation
from archipelago.islands.inner import InnerState, begin
from archipelago.islands.mesh import MeshShape
from archipelago.islands.models.moe import Routing
from archipelago.islands.placement import placement_of
from archipelago.islands.sync import recovery, sharded_encoding
from archipelago.islands.sync.recovery import StateForPeer
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.computing import follow
from archipelago.islands.team.protocol import Said, Team, Work
from archipelago.islands.worker import Island
from tests.conftest import optimising
from tests.failing import failing
from tests.islands.mesh.sharded_runs import COLUMNS, CONFIG, FOUR, ONE, SQUARE, MeshRun, manifest, on_mesh
from tests.islands.models import mini

#: Shapes and placements on a mesh of 2 × 2 that begin anywhere in a block of a codec.
TREE: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "a": ((64,), ()),
    "b": ((64, 176), ("x", "y")),
    "c": ((176, 65), (("y", "x"),)),
    "d": ((3, 3, 16, 32), (None, None, None, ("x", "y"))),
    "e": ((5, 3), ()),
    "f": ((8, 8, 130), (None, "x", "y")),
    "g": ((130, 256), (None, "y")),
    "h": ((7, 512), (None, ("y", "x"))),
}


def tree_run(codec: str) -> Manifest:
    tensors = tuple(Tensor(name, shape) for name, (shape, _) in TREE.items())
    wire = WireConfig(up="int4" if codec == "top3" else codec, thin="top3")  # type: ignore[arg-type]
    config = RunConfig(adopt=AdoptConfig(rule="carry"), wire=wire)
    return Manifest("tree", config, tensors, (tuple(TREE),), Corpus("text", "0" * 32, 1000), {})


def templates() -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))  # type: ignore[no-untyped-call]
        for name, (shape, spec) in TREE.items()
    }


def vector(of: dict[str, Any]) -> bytes:
    return np.concatenate([np.asarray(x).reshape(-1) for x in of.values()]).tobytes()


@pytest.mark.parametrize("codec", ["int4", "top3"])
@optimising()
def test_pieces_give_the_bytes_of_one_device(codec: str) -> None:
    of, places, rng = tree_run(codec), templates(), np.random.default_rng(0)
    first_N: Vector = rng.standard_normal(of.sizes[0]).astype(np.float32)
    one, four = Replica(of), Replica(of, places)
    alone, together = one.begin([first_N.copy()]), four.begin([first_N.copy()])
    which = "top3" if codec == "top3" else ""
    for _ in range(2):
        for name, (shape, _) in TREE.items():
            step = rng.standard_normal(shape).astype(np.float32) * rng.choice([1e-3, 1, 0], shape).astype(np.float32)
            alone[name] = alone[name] + step
            # A copy, because adopting uses up the tensors of one device.
            together[name] = jax.device_put(jnp.copy(alone[name]), places[name].sharding)
        assert body_of(one.measure(0, alone, which)) == body_of(four.measure(0, together, which))
        assert vector(four.references[0]) == np.asarray(one.references[0]).tobytes()
        new_N = rng.standard_normal(of.sizes[0]).astype(np.float32)
        alone, together = one.adopt(0, alone, new_N), four.adopt(0, together, new_N)
        for name, leaf in together.items():
            assert np.asarray(leaf).tobytes() == np.asarray(alone[name]).tobytes()
            assert leaf.sharding == places[name].sharding


def test_no_device_gathers_a_tensor(capfd: pytest.CaptureFixture[str]) -> None:
    """Arrays of the compiled program are those of one device, which has a quarter of the largest tensor."""
    of = tree_run("int4")
    replica = Replica(of, templates())
    params = replica.begin([np.zeros(of.sizes[0], np.float32)])
    program = sharded_encoding.compiled_measure(of.layout[0], "int4", replica._device_layouts[0])
    text = program.lower(replica.references[0], replica._part(0, params)).compile().as_text()
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([0-9,]+)\]", text)]
    assert sum(of.sizes) / 4 < max(map(math.prod, shapes)) < sum(of.sizes) / 2
    split = [shape for shape, spec in TREE.values() if spec]
    assert not {*split, *((math.prod(shape),) for shape in split)} & {*shapes}
    assert "rematerialization" not in capfd.readouterr().err


# -- whole islands -----------------------------------------------------------------------------------------------------


def test_a_run_on_a_mesh_ends_with_the_same_parameters() -> None:
    (alone, _), (found, run) = (trained_on(each, 9) for each in (ONE, SQUARE))
    assert run.merger.state.closed >= 2
    for name, value in alone.inner.params.items():
        np.testing.assert_allclose(np.asarray(found.inner.params[name]), np.asarray(value), atol=2e-4, err_msg=name)
    assert float(np.abs(np.asarray(alone.inner.params["norm.scale"]) - 1.0).max()) > 1e-2


def trained_on(shape: MeshShape, steps: int, config: RunConfig = CONFIG) -> tuple[Island, MeshRun]:
    """Return an island on a mesh after some steps, and its run."""
    run = MeshRun(manifest(config))
    island = run.island(shape)
    run.play(island, steps)
    return island, run


def moment(island: Island, which: str, name: str) -> jax.Array:
    found: jax.Array = optax.tree_utils.tree_get(island.inner.optimizer, which)[name]
    return found


def places(island: Island) -> set[str]:
    return {name for name, x in island.inner.params.items() if not x.sharding.is_fully_replicated}


def test_parameters_and_moments_stay_split_after_steps_and_adoptions() -> None:
    island, _ = trained_on(SQUARE, 10)
    assert places(island) == {"embedding", "hidden.gate.kernel", "hidden.down.kernel"}
    for name, x in island.inner.params.items():
        assert moment(island, "mu", name).sharding == moment(island, "nu", name).sharding == x.sharding, name
        assert all(shard.data.size == x.size // (2 if name in places(island) else 1) for shard in x.addressable_shards)


def test_one_device_joins_four_with_its_own_batch_and_takes_their_optimiser_state() -> None:
    run = MeshRun()
    four = run.island(SQUARE, "four")
    run.play(four, 9)
    one = run.island(ONE, "one", batch_size=2)
    about, payload = recovery.encode(StateForPeer("one/x", four.computation.state.copies() or (), 9), "four/x")
    one.use_optimizer(one.computation.state.decode(about, payload), "peer four")
    for theirs, own in zip(jax.tree.leaves(four.inner.optimizer), jax.tree.leaves(one.inner.optimizer), strict=True):
        assert np.asarray(theirs).tobytes() == np.asarray(own).tobytes()
        assert len(own.sharding.device_set) == 1
    for _ in range(6):
        run.play(four, 1)
        run.play(one, 1)
    assert run.connect().reader.counters().refused == 0
    assert one.totals.tokens == 6 * 2 * 8
    # and the other way round
    square = run.island(SQUARE, "square")
    about, payload = recovery.encode(StateForPeer("square/x", one.computation.state.copies() or (), 9), "one/x")
    square.use_optimizer(square.computation.state.decode(about, payload), "peer one")
    assert moment(square, "mu", "embedding").sharding == square.inner.params["embedding"].sharding
    run.play(square, 2)


def test_own_optimiser_state_is_restored_on_another_mesh(tmp_path: Path) -> None:
    island, run = trained_on(SQUARE, 10)
    IslandStore(tmp_path, run.manifest).finish(island)
    other = MeshRun().island(ONE)
    assert IslandStore(tmp_path, run.manifest).restore(other)
    for theirs, own in zip(*map(jax.tree.leaves, (island.inner.optimizer, other.inner.optimizer)), strict=True):
        assert np.asarray(theirs).tobytes() == np.asarray(own).tobytes()
    other.advance()


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    for shape, batch, code in (
        (MeshShape(data=8), 8, "mesh.size"),
        (MeshShape(data=3), 8, "mesh.size"),
        (MeshShape(fsdp=2, data=2), 6, "mesh.size"),
    ):
        with failing(code=code):
            placement_of(shape, manifest(), batch, jax.local_devices())
    assert placement_of(MeshShape(tensor=4), manifest(), 8, jax.local_devices()) is not None


def test_a_follower_makes_the_steps_that_its_leader_says() -> None:
    placement, _ = on_mesh(FOUR, CONFIG)
    assert placement is not None
    batch = np.arange(8 * 3, dtype=np.uint8).reshape(1, 8, 3)
    said = [Said(work=Work.STEP, step=3, steps=100), Said(finished=1, about=3)]

    class Leading:
        hear, exchange = Team.hear, staticmethod(lambda own: said.pop(0))
        tell = staticmethod(lambda *about, **numbers: None)
        settled = staticmethod(lambda tree: tree)
        share = staticmethod(lambda like: [batch.reshape(like[0].shape)])

    made: list[Any] = []

    def steps(state: Any, *about: Any) -> Any:
        made.append(about)
        return state, jnp.zeros(1)

    team: Any = Leading()
    computation = Computation(manifest(), steps, partial(begin, CONFIG.inner), placement, team=team)
    computation.inner = InnerState({}, ())
    assert follow(team, computation, np.zeros_like(batch), lambda: False).about == 3
    ((placed, *about),) = made
    np.testing.assert_array_equal(placed, batch)
    assert list(map(int, about)) == [3, 100]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 2, 3)}


def test_our_models_train_on_a_mesh() -> None:
    model = mini.experts(Routing(experts=4, choices=2))
    inner = InnerConfig(steps=100, learning_rate=1e-3, warmup_steps=0)
    of = Manifest("m", RunConfig(), model.tensors, (tuple(t.name for t in model.tensors),), Corpus("t", "", 0), {})
    batch = np.random.default_rng(0).integers(0, 10, (3, 8, 17), np.uint8)
    alone, clock = jax.jit(mini.steps_of(model, inner)), (np.int32(0), np.int32(inner.steps))
    _, alone_n = alone(begin(inner, model.init(0)), batch, *clock)
    placement = placement_of(COLUMNS, of, 8, jax.local_devices())
    assert placement is not None
    state = placement.begin(lambda params: begin(inner, params), placement.place(model.init(0)))
    steps = jax.jit(placement.steps(mini.steps_of(model, inner)))
    after, together_n = steps(state, placement.place_batches(batch), *clock)
    np.testing.assert_allclose(np.asarray(together_n), np.asarray(alone_n), rtol=2e-3)
    split = {name for name, x in after.params.items() if not x.sharding.is_fully_replicated}
    assert all(len(tensor.shape) < 2 or tensor.name in split for tensor in of.tensors)
