"""Users' own loops in virtual time: what they send, what they adopt, and what they refuse."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from archipelago.broker.codecs import CODECS
from archipelago.broker.config import AdoptConfig, WireConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.presence import LIVE_SECONDS
from archipelago.islands.sync.arrays import to_sharding
from archipelago.islands.sync.measures import STALL_SECONDS
from tests.failing import failing
from tests.islands.sync.connection.link_run import draft
from tests.islands.user_loop.any_framework import CONFIG, STEP, Framework, LoopIsland
from tests.islands.user_loop.own_runs import OwnIsland, OwnRun, trained, tree


def test_one_island_moves_the_run_by_its_own_steps(framework: Framework) -> None:
    run = framework.run()
    run.island().train(16)
    assert run.transport.reader.counters().merged == run.merger.state.closed >= 6
    for name, merged in run.merged().items():
        moved = (run.first[name] - merged) / STEP
        assert np.ptp(moved) == 0.0, name
        assert moved.flat[0] in range(10, 17), "every step counts once"


def test_two_islands_follow_the_run(framework: Framework) -> None:
    run = framework.run(config=replace(CONFIG, adopt=AdoptConfig(rule="overwrite")))
    one, other = run.island("a"), run.island("b")
    for _ in range(12):
        one.train()
        other.train(by=2 * STEP)
    assert min(count.version for count in one.loop.ledger.counts) >= 4
    require_close_versions(one, other)
    assert run.transport.reader.counters().refused == 0


def require_close_versions(one: LoopIsland, other: LoopIsland) -> None:
    """Fail unless both islands have the same versions. Only the newest round may be on its way to one of them."""
    for mine, theirs in zip(one.loop.ledger.counts, other.loop.ledger.counts, strict=True):
        assert abs(mine.version - theirs.version) <= 1


@pytest.mark.parametrize(("dtype", "rule"), [("bfloat16", "carry"), ("float16", "overwrite")])
def test_rounding_to_a_narrow_dtype_is_no_progress(framework: Framework, dtype: str, rule: Any) -> None:
    """An island that never steps must not pull the run to the numbers that its dtype has."""
    run = framework.run(framework.model(more=0.001), replace(CONFIG, adopt=AdoptConfig(rule=rule)))
    island = run.island(model=framework.model(dtype))
    island.train(16, by=0.0)
    assert run.merger.state.closed >= 4
    for name, value in run.merged().items():
        np.testing.assert_allclose(value, run.first[name], rtol=0, atol=1e-7)
    assert island.dtypes() == {dtype}


@pytest.mark.parametrize(("codec", "value"), [("bfloat16", math.nan), ("int4", math.inf)])
def test_nothing_that_is_not_finite_is_sent(framework: Framework, codec: Any, value: float) -> None:
    run = framework.run(config=replace(CONFIG, wire=WireConfig(up=codec, thin="", down="float32")))
    island, spoilt = run.island(), ""
    with failing(DivergedError, "loop.not-finite") as caught:
        for _ in range(12):
            island.step()
            spoilt = island.spoil(value)
            island.turn()
    assert repr(spoilt) in caught.value.what
    assert all(np.isfinite(merged).all() for merged in run.merged().values())
    assert run.transport.reader.counters().refused == 0


def test_nan_is_noticed_although_nothing_can_be_sent(framework: Framework) -> None:
    run = framework.run()  # whose merger never acts
    for number, loss in enumerate((None, math.nan, framework.array(math.inf))):
        island = run.island(f"island-{number}")

        def train(turns: int, loss: Any, island: LoopIsland = island) -> None:
            for _ in range(turns):
                island.step()
                island.loop.turn(1, 10, loss)
                island.link.pump()

        train(12, 2.5)
        sent = island.loop.sequence
        spoilt = island.spoil(math.nan) if loss is None else ""
        with failing(DivergedError, "" if spoilt == "" else "loop.not-finite") as caught:
            train(CONFIG.sync.interval if spoilt else 1, loss)
        assert spoilt in caught.value.what
        assert island.loop.sequence == sent, "the window is closed"


def test_what_rounding_leaves_out_stays_owed(framework: Framework) -> None:
    """All progress arrives in the end, because the reference moves only to what the merger reads."""
    run = framework.run(config=replace(CONFIG, wire=WireConfig(up="int4", thin="", down="float32")))
    island = run.island()
    island.step(0.3)
    island.spoil(50.0)  # beside this element, the others of its block are rounded to zero at first
    wanted = island.values()
    island.train(80, by=0.0)
    for name, value in run.merged().items():
        np.testing.assert_allclose(value, wanted[name], atol=0.05, err_msg=name)


def test_a_loop_that_stops_is_not_waited_for_and_comes_back(
    framework: Framework, caplog: pytest.LogCaptureFixture
) -> None:
    run = framework.run()
    island, other = run.island("a"), run.island("b")
    for each in (island, other):
        each.train(4)
    for _ in range(int(STALL_SECONDS + LIVE_SECONDS + 5)):
        island.link.pump()  # its threads live, and its loop does not sync
        other.train()
    assert run.merger.live == {"b"}
    assert [getattr(record, "code", "") for record in caplog.records].count("island.stalled") == 1
    assert [note.who for note in run.transport.reader.notes(99) if note.kind == "stalled"] == ["a"], "operators see it"
    before = run.transport.reader.counters().merged
    for _ in range(6):
        island.train()
        other.train()
    assert run.merger.live == {"a", "b"}
    require_close_versions(island, other)
    assert run.transport.reader.counters().merged > before
    assert island.loop.speed.step_seconds < STALL_SECONDS


# -- loops in JAX ---------------------------------------------------------------------------------------------------


def test_a_contribution_with_one_number_that_is_not_finite_is_not_sound() -> None:
    for name, value in itertools.product(CODECS, (0.5, math.nan, math.inf, -math.inf)):
        values_N = np.linspace(-1.0, 1.0, 300, dtype=np.float32)
        values_N[77] = value
        with np.errstate(invalid="ignore"):
            parts = CODECS[name].quantise(values_N, np)
        assert replace(draft(1), parts=parts).is_sound() is math.isfinite(value), (name, value)


def test_a_call_without_an_event_returns_the_same_object_and_leaves_that_are_not_merged_stay() -> None:
    run = OwnRun()
    island = run.island()
    params = trained(island.params)
    assert island.sync(params) is params
    island.play(8)
    assert run.merger.state.closed
    assert int(island.params["count"]) == 7 + 9
    assert "count" not in run.merged()


# -- what a loop returns is checked ---------------------------------------------------------------------------------


def test_another_tree_shape_or_dtype_is_an_error_that_names_the_leaf() -> None:
    run = OwnRun()
    (kernel, bias) = (tree()["layers"][0][name] for name in ("kernel", "bias"))
    wrongs: list[tuple[dict[str, Any], str, str]] = [
        ({"kernel": kernel}, "loop.other-tree", "layers.0.bias"),
        ({"kernel": kernel, "bias": bias, "extra": bias}, "loop.other-tree", "layers.0.extra"),
        ({"kernel": kernel, "bias": jnp.zeros(5)}, "loop.other-tree", "layers.0.bias"),
        ({"kernel": kernel, "bias": bias.astype(jnp.bfloat16)}, "loop.other-tree", "layers.0.bias"),
        ({"kernel": kernel, "bias": 0.0}, "loop.other-tree", "layers.0.bias"),
    ]
    for number, (layer, code, named) in enumerate(wrongs):
        island = run.island(str(number))
        with failing(ConfigError, code) as caught:
            for _ in range(8):
                island.sync({**island.params, "layers": [layer, island.params["layers"][1]]})
        assert named in caught.value.what


def test_numpy_leaves_may_be_changed_in_place_after_a_sync() -> None:
    """Memory at a multiple of 64 bytes is what JAX would share."""
    placed = SingleDeviceSharding(jax.devices()[0])
    memory = np.ones(1 << 16, np.float32)
    leaf = memory[(-memory.ctypes.data % 64) // 4 :][: 1 << 15]
    held = [jnp.asarray(leaf), to_sharding(leaf, placed)]
    leaf += 1.0
    assert [float(each.max()) for each in held] == [1.0, 1.0]

    run = OwnRun()
    island = run.island()
    params = jax.tree.map(np.array, island.params)
    for _ in range(12):
        for layer in params["layers"]:
            layer["kernel"] -= np.float32(0.125)
        params = jax.tree.map(np.array, island.sync(params))
    assert run.merger.state.closed >= 4
    assert run.transport.reader.counters().refused == 0
    moved = (np.asarray(tree()["layers"][0]["kernel"]) - np.asarray(run.merged()["layers.0.kernel"])) / 0.125
    assert moved.flat[0] in range(8, 13), "every step counts once"


def test_a_loss_that_the_device_still_computes_is_not_waited_for() -> None:
    class Later:
        def __init__(self) -> None:
            self.ready = False

        def is_ready(self) -> bool:
            return self.ready

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            assert self.ready, "the loop waited for its device"
            return np.asarray(4.0)

    run = OwnRun()
    island, losses = run.island(), []
    for _ in range(8):
        losses.append(Later())
        island.sync(trained(island.params), loss=losses[-1])
    assert run.merger.state.closed
    for loss in losses:
        loss.ready = True
    means = []
    for _ in range(4):
        island.play(1)
        means.append(island.loop.losses.mean)
    assert np.nanmax(means) > 2.5


# -- a loop that stops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.full), 600])
def test_calls_of_two_minutes_are_waited_for(steps: int) -> None:
    """Two minutes a step, or a call for each 600 steps, are no pause."""
    run = OwnRun(config=replace(CONFIG, sync=replace(CONFIG.sync, interval=4 * steps, quorum=2)))
    slow, fast = run.island("slow"), run.island("fast")

    def sync(island: OwnIsland) -> None:
        run.clock.now -= steps  # the test itself moves the clock
        island.sync(trained(island.params), steps)

    for call in range(6):
        for turn in range(30):
            run.clock.now += 2.0
            slow.link.pump()  # its threads live while it computes
            run.clock.now += 1.0 + turn % 2 * 2.0
            sync(fast)
            assert call < 3 or "slow" in run.merger.live
        sync(slow)
    assert slow.loop.speed.step_seconds * steps == pytest.approx(120.0)
    assert run.transport.reader.counters().refused == 0
    assert any(member.island == "slow" for entry in run.transport.reader.tape(100) for member in entry.members)


def test_a_pause_says_nothing_about_the_speed() -> None:
    run = OwnRun()
    island = run.island()
    for seconds in (1.0, 1.0, 300.0, 1.0, 90.0, 1.0):
        run.clock.now += seconds - 1.0
        island.sync(trained(island.params))
    assert island.loop.speed.step_seconds == pytest.approx(1.0)
