"""`bench largest`: wrong values and versions are noticed, and a model that is too large is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from archipelago.broker.codecs import Vector, codec
from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Member, Snapshot
from archipelago.islands.sync.connection.snapshots import Arrival
from archipelago.ops.bench.largest import predict, require_room
from archipelago.ops.bench.largest_islands import MOMENTUM, RATE, require_merge, require_version
from archipelago.ops.simulation.cycle import Machine
from tests.failing import failing

MEMBER = Member(
    island="a", incarnation="bench", sequence=0, base=0, staleness=0, weight=1.0, clip=1.0, tokens=1, steps=1,
    loss=1.0, entry="1-1",
)  # fmt: skip


def merged(first_N: Vector, sent: dict[str, Vector], shares: dict[str, float]) -> Vector:
    """Return what islands should hold, before the rounding of the difference."""
    deltas = {name: first_N - sent_N for name, sent_N in sent.items()}
    direction_N = np.sum([np.float32(shares[n] / np.linalg.norm(d)) * d for n, d in deltas.items()], axis=0)
    length = sum(shares[n] * float(np.linalg.norm(d)) for n, d in deltas.items())
    step = np.float32(RATE * (1 + MOMENTUM) * length / np.linalg.norm(direction_N))
    return np.asarray(first_N - step * direction_N)


def test_only_the_merge_of_all_contributions_is_right() -> None:
    rng = np.random.default_rng(0)
    first_N, a_N, b_N = (rng.standard_normal(512, np.float32) for _ in range(3))
    sent = {"a": first_N - np.float32(0.01) * a_N, "b": first_N - np.float32(0.02) * b_N}
    members = [replace(MEMBER, weight=0.25), replace(MEMBER, island="b", weight=0.75)]
    right_N = merged(first_N, sent, {"a": 0.25, "b": 0.75})
    int4 = codec("int4")
    rounded_N = first_N + int4.decode(int4.encode(right_N - first_N), 512)
    require_merge(first_N, sent, members, rounded_N, "int4")
    for wrong_N in (first_N, merged(first_N, sent, {"a": 0.75, "b": 0.25}), rounded_N + np.float32(0.1)):
        with failing(WireError, "bench.wrong-values"):
            require_merge(first_N, sent, members, wrong_N, "int4")
    with failing(WireError, "bench.wrong-values"):
        require_merge(first_N, sent, [MEMBER], merged(first_N, {"a": sent["a"]}, {"a": 1.0}), "int4")


def test_another_version_or_fragment_is_noticed() -> None:
    snapshot = Snapshot(3, 2, 1, 0, "float32", 1, "0" * 32, merged="")
    arrival = Arrival(snapshot, np.zeros(1, np.float32))
    require_version(2, arrival)
    with failing(WireError, "bench.wrong-version"):
        require_version(1, arrival)
    with failing(WireError, "bench.wrong-version"):
        require_version(2, replace(arrival, snapshot=replace(snapshot, version=0)))


def test_a_billion_parameters_fit_a_machine_of_24_gib() -> None:
    require_room(predict(10**9, 128, 2, Machine()), 20 << 30)
    with failing(ConfigError, "bench.memory") as refused:
        require_room(predict(10**9, 128, 2, Machine()), 16 << 30)
    share = float(refused.value.remedy.split()[2])
    assert 0.5 < share < 1.0
    require_room(predict(int(0.98 * share * 10**9), 128, 2, Machine()), 16 << 30)


def test_memory_grows_with_the_parameters_and_with_the_size_of_a_fragment() -> None:
    many, few, twice = (predict(*sizes, 2, Machine()) for sizes in ((10**9, 128), (10**9, 16), (2 * 10**9, 16)))
    assert many.together_bytes < few.together_bytes < twice.together_bytes
    assert few.restart_seconds < twice.restart_seconds
