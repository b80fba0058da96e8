"""The replica: outer gradients, which lose no progress and repeat none, and the adoption of snapshots."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from archipelago.broker import manifest as manifest_module
from archipelago.broker.codecs import CODECS, Vector, body_of, codec, empty_vector
from archipelago.broker.config import AdoptConfig, RunConfig, WireConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor
from archipelago.islands.models.interface import Params
from archipelago.islands.sync import replica as replica_module
from archipelago.islands.sync.adoption import RULES
from archipelago.islands.sync.arrays import device_copy, flatten, unflatten
from archipelago.islands.sync.replica import Replica
from archipelago.islands.team.computing import TeamReplica
from tests import samples
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("optimised")

# Neither these numbers nor their differences are subnormal, because subnormals count as zero.
ELEMENTS = st.just(0.0) | st.builds(math.copysign, st.floats(2.0**-40, 2.0**40, width=32), st.sampled_from([1.0, -1.0]))
SIZES = (4, 9)
VECTORS = st.tuples(*(arrays(np.float32, size, elements=ELEMENTS) for size in SIZES))
UP = st.sampled_from(sorted(CODECS))


def manifest(rule: Any = "overwrite", up: Any = "float32") -> Manifest:
    """Return a run of two fragments. The first has a single tensor."""
    config = RunConfig(adopt=AdoptConfig(rule=rule), wire=WireConfig(up=up))
    tensors = (Tensor("bias", (4,)), Tensor("kernel", (2, 3)), Tensor("scale", (3,)))
    return Manifest("sample", config, tensors, (("bias",), ("kernel", "scale")), Corpus("text", "0" * 32, 1000), {})


def params_of(of: Manifest, vectors: tuple[Vector, ...]) -> Params:
    """Return parameters with these values, fragment by fragment."""
    params: Params = {}
    for rows, vector_N in zip(of.layout, vectors, strict=True):
        params |= unflatten(rows, jnp.asarray(vector_N))
    return params


def begun(of: Manifest, vectors: tuple[Vector, ...]) -> tuple[Replica, Params]:
    replica = Replica(of, donates=True)
    return replica, replica.begin(list(vectors))


def sent(replica: Replica, fragment: int, params: Params) -> Vector:
    """Return the outer gradient as the merger decodes it."""
    return codec(replica.codec).decode(body_of(replica.measure(fragment, params)), SIZES[fragment])


def wide(vector_N: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(vector_N, np.float64)


def counting() -> tuple[Vector, ...]:
    return tuple(np.arange(1, size + 1, dtype=np.float32) for size in SIZES)


# -- fragments as vectors ------------------------------------------------------------------------------------------


def test_a_copy_shares_memory_with_neither_the_host_nor_another_copy() -> None:
    donated = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for _ in range(32):  # whether a CPU keeps reading the host's memory depends on its alignment
        host = np.ones(1 << 12, np.float32)
        first = device_copy({"x": host})
        second = device_copy(first)
        host[:] = 5.0
        assert first["x"][0] == 1.0
        donated(first)
        assert first["x"].is_deleted()
        assert second["x"][0] == 1.0


# -- outer gradients -----------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(UP, st.lists(VECTORS, min_size=2, max_size=5))
def test_no_progress_is_sent_twice_and_none_is_lost(up: str, stations: list[tuple[Vector, ...]]) -> None:
    """The reference moves by the decoded outer gradient. Carrying the sent parameters changes no bit."""
    of = manifest("carry", up)
    replica, _ = begun(of, stations[0])
    params = params_of(of, stations[-1])
    for p, (rows, size) in enumerate(zip(of.layout, SIZES, strict=True)):
        received = np.zeros(size)
        last = before = wide(stations[0][p])
        for station in stations[1:]:
            before_N = np.asarray(replica.references[p])
            sent_N = sent(replica, p, params_of(of, station))
            assert np.asarray(replica.references[p]).tobytes() == (before_N - sent_N).tobytes()
            before, last = wide(before_N), wide(station[p])
            received += wide(sent_N)
        # The tolerance covers one rounding by the codec, and the float32 roundings of sums and differences.
        size_of_all = sum(np.abs(wide(station[p])) for station in stations)
        allowed = samples.codec_error_bound(up, (before - last).astype(np.float32)) + 2.0**-18 * size_of_all.max()
        assert (np.abs(wide(stations[0][p]) - received - last) <= allowed).all()
        params = replica.adopt(p, params, np.asarray(replica.references[p]))
        assert np.asarray(flatten(rows, params)).tobytes() == stations[-1][p].tobytes()


# -- adoption ------------------------------------------------------------------------------------------------------


def test_the_reference_of_an_adopted_snapshot_takes_no_memory_of_its_own() -> None:
    """On a CPU, until the island sends again, it is the array that the next differences are added to."""
    assert set(RULES) == set(get_args(get_type_hints(AdoptConfig)["rule"]))
    for rule in RULES:
        replica, params = begun(manifest(rule), counting())
        new_N = empty_vector(SIZES[0])
        new_N[:] = 5.0
        params = replica.adopt(0, params, new_N)
        assert replica.references[0].unsafe_buffer_pointer() == new_N.ctypes.data
        sent(replica, 0, params)
        assert new_N.tolist() == [5.0] * 4


def test_adopted_parameters_take_the_memory_of_the_former_ones() -> None:
    replica, params = begun(manifest("carry"), counting())
    own, reference_N = replica._part(1, params), replica.references[1]
    adopt = replica_module._compiled_adopt(
        replica.layout[1], AdoptConfig("carry"), ("float32",) * 2, replica._device_layouts[1], True
    )
    program = adopt.lower(reference_N, own, reference_N).compile()
    assert program.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in own.values())
    replica.adopt(1, params, np.full(9, 100.0, np.float32))
    assert {name: x.is_deleted() for name, x in params.items()} == {"bias": False, "kernel": True, "scale": True}


def test_carry_sends_unsent_progress_with_the_next_contribution_and_overwrite_has_none() -> None:
    replica, params = begun(manifest("carry"), counting())
    params["bias"] = params["bias"] - 1.0
    assert sent(replica, 0, params).tolist() == [1.0] * 4
    params["bias"] = params["bias"] - 0.5
    params = replica.adopt(0, params, np.full(4, 100.0, np.float32))
    assert params["bias"].tolist() == [99.5] * 4
    assert sent(replica, 0, params).tolist() == [0.5] * 4
    replica, params = begun(manifest("overwrite"), counting())
    params["bias"] = params["bias"] + 1.0
    params = replica.adopt(0, params, np.full(4, 100.0, np.float32))
    assert params["bias"].tolist() == [100.0] * 4
    assert params["kernel"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]  # of the other fragment
    assert sent(replica, 0, params).tolist() == [0.0] * 4


def test_warming_up_changes_nothing_and_compiles_the_thin_codec_only_for_large_fragments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a contribution on a thin link would wait for compilation. Small payloads never use this codec."""
    of = manifest("carry")
    of = replace(of, config=replace(of.config, wire=WireConfig(up="int8", thin="top3")))
    for small, codecs in ((0, ["int8", "top3"]), (1 << 10, ["int8"])):
        monkeypatch.setattr(manifest_module, "SMALL_BYTES", small)
        warmed: set[tuple[int, str]] = set()
        replica, params = begun(of, counting())
        params = {name: value + 1.0 for name, value in params.items()}

        def noted(
            fragment: int, codec: str, program: Any = replica._measure, warmed: set[tuple[int, str]] = warmed
        ) -> Any:
            warmed.add((fragment, codec))
            return program(fragment, codec)

        monkeypatch.setattr(replica, "_measure", noted)
        replica.warm_up(params)
        assert warmed == {(fragment, name) for fragment in range(len(SIZES)) for name in codecs}
        assert [reference_N.tolist() for reference_N in replica.references] == [v.tolist() for v in counting()]
        assert params["bias"].tolist() == [value + 1.0 for value in counting()[0]]


@pytest.mark.parametrize("thin", ["int8", "top3"])
@settings(max_examples=examples(100))
@given(vectors=VECTORS)
def test_a_shared_program_gives_the_bits_of_a_program_for_one_fragment(thin: Any, vectors: tuple[Vector, ...]) -> None:
    of = manifest()
    of = replace(of, config=replace(of.config, wire=WireConfig(up="float32", thin=thin)))
    replica, params = begun(of, tuple(np.ones(size, np.float32) for size in SIZES))
    params |= params_of(of, vectors)
    for p, rows in enumerate(of.layout):
        part = {tensor.name: params[tensor.name] for tensor, _ in rows}
        parts, reference_N = replica_module._compiled_measure(rows, thin, 0)(replica.references[p], part)
        assert body_of(replica.measure(p, params, thin)) == body_of(parts)
        assert np.asarray(replica.references[p]).tobytes() == np.asarray(reference_N).tobytes()


# -- several processes and threads -----------------------------------------------------------------------------------


class Team:
    """A team of one process, in which what is shared is another copy."""

    def tell(self, *said: Any, **numbers: int) -> None:
        """Tell nobody."""

    def share(self, shared: list[Vector]) -> list[Vector]:
        return [each.copy() for each in shared]


def test_the_leader_of_a_team_begins_without_a_copy_of_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_with: list[list[Vector]] = []
    monkeypatch.setattr(Replica, "begin", lambda replica, vectors: begun_with.append(vectors))
    replica, vectors = TeamReplica(Team(), manifest()), counting()  # type: ignore[arg-type]
    replica.begin(vectors)
    replica.begin()
    assert all(one is other for one, other in zip(begun_with[0], vectors, strict=True))
    assert [vector_N.tolist() for vector_N in begun_with[1]] == [[0.0] * size for size in SIZES]
