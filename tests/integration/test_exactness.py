"""One island with average merge and outer SGD at rate 1 equals plain training, and runs repeat, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.codecs import CODECS
from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.ranges import ReadPosition
from archipelago.broker.redis.transport import connect
from archipelago.islands.data.batches import Batches, range_order
from archipelago.islands.models.interface import Params
from archipelago.ops.experiments.virtual_time import VirtualRun
from tests.integration.virtual import CONFIG, PLAIN, TEXT, LateRun, bits, work
from tests.sharded import closed

pytestmark = pytest.mark.usefixtures("optimised")

STEPS = CONFIG.inner.steps
#: The codecs of the quick tier: an exact one and a lossy one.
QUICK = {"float32", "int4"}


def with_codec(up: str) -> RunConfig:
    return replace(PLAIN, wire=WireConfig(up=up, down="float32"))  # type: ignore[arg-type]


@cache
def plain_training() -> Params:
    """Train with the inner steps alone, without an island or a merger."""
    made = work(PLAIN)
    state = made.begin(made.model.init())
    order = range_order(PLAIN.data.shards, PLAIN.seed)
    endless = (ReadPosition(name, pass_number, 0) for pass_number in count() for name in order)
    batches = Batches(TEXT, PLAIN, lambda: next(endless))
    for step in range(STEPS):
        state, _ = made.steps(state, jnp.asarray(batches.next(1)), jnp.int32(step), jnp.int32(STEPS))
    return state.params


def require_plain_training(run: VirtualRun, what: str) -> None:
    """Train the only island to the end. Fail unless it has synced and has the bits of plain training."""
    island = run.islands["island-0"]
    run.advance_until(lambda: island.totals.steps >= STEPS)
    assert sum(closed(run)) >= STEPS // 2 - 2 * len(run.mergers), f"{what}: the island did not sync"
    for name, expected in plain_training().items():
        np.testing.assert_array_equal(np.asarray(island.inner.params[name]), np.asarray(expected), f"{what}: {name}")


@pytest.mark.parametrize(
    "codecs", [QUICK, pytest.param(CODECS.keys() - QUICK, marks=pytest.mark.full)], ids=["quick", "others"]
)
def test_one_island_equals_plain_training_with_every_codec(codecs: Set[str]) -> None:
    """A lossy codec changes nothing, because the island keeps the rounding error and sends it later."""
    for codec in sorted(codecs):
        require_plain_training(VirtualRun(work(with_codec(codec)), [1.0]), codec)


def test_one_island_equals_plain_training_when_snapshots_are_late() -> None:
    for seconds in (0.5, 1.0, 2.5):
        require_plain_training(LateRun(work(with_codec("int4")), [1.0], seconds), f"{seconds} s")


def test_one_island_over_shards_equals_plain_training() -> None:
    for shards, connection in ((4, None), (2, partial(connect, "fakeredis://plain", "plain"))):
        run = VirtualRun(work(with_codec("int4")), [1.0], connect=connection, run="plain", shards=shards)
        require_plain_training(run, f"{shards} shards")


def played(
    replaced_after: Sequence[int] = (), shards: int = 1, connection: Callable[[], Any] | None = None
) -> list[tuple[Any, ...]]:
    """Play a run and return its bits. Another merger of the last shard takes over after each of these rounds."""
    config = replace(CONFIG, wire=WireConfig(up="int4", down="int4"))
    run = VirtualRun(work(config), [1.0, 1.1, 2.5], connect=connection, run="same", shards=shards)
    epochs = {run.mergers[-1].epoch}
    waiting = list(replaced_after)
    while run.islands:
        run.play_one()
        if waiting and closed(run)[-1] >= waiting[0]:
            run.mergers[-1] = run.merger_of(shards - 1)
            epochs.add(run.mergers[-1].epoch)
            waiting.pop(0)
    run.turn()
    assert len(epochs) == 1 + len(replaced_after)
    return bits(run)


def test_a_run_has_the_same_bits_in_redis_and_with_other_mergers() -> None:
    first = played()
    assert len(first) > 12
    assert played(replaced_after=(3, 7, 8)) == first
    assert played(connection=partial(connect, "fakeredis://same", "same")) == first
    assert played(shards=2, replaced_after=(5,)) == played(shards=2)
