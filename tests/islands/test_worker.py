"""An island at its step boundaries: its contributions, its data, and its failures."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker import manifest as manifest_module
from archipelago.broker.config import AdoptConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.manifest import SMALL_BYTES
from archipelago.broker.messages import Marker
from archipelago.islands.inner import InnerState, InnerSteps
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.leaving import leave_after, leave_reason
from archipelago.islands.sync.ledger import AHEAD_STEPS_MIN
from archipelago.islands.sync.measures import Uplink
from archipelago.islands.sync.participant import Participant
from archipelago.islands.worker import Island
from tests.failing import failing
from tests.harness import tiny
from tests.harness.tiny import TinyRun


def diverging(state: InnerState, *_: jax.Array) -> tuple[InnerState, jax.Array]:
    spoilt = {name: value * jnp.nan for name, value in state.params.items()}
    return state._replace(params=spoilt), jnp.full(1, jnp.inf)


def test_a_diverged_island_stops_without_changing_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    island = run.island("sick")
    monkeypatch.setattr(island.link, "drain", lambda seconds: True)  # no thread would send
    island.computation.steps = cast(InnerSteps, diverging)
    with failing(DivergedError, "loop.not-finite") as caught:
        run.play(island, 100)
    leave_after(island, caught.value)
    island.link.pump()
    counters = run.transport.reader.counters()
    assert counters.published == 0
    assert all(np.isfinite(np.asarray(fragment.params_N)).all() for fragment in run.merger.fragments.values())
    assert run.transport.reader.notes(100)[-1].kind == "diverged"
    assert run.transport.reader.presences()[0].heartbeat.state == "left"


# -- markers --------------------------------------------------------------------------------------------------------


def versions(island: Island) -> list[int]:
    return [count.version for count in island.ledger.counts]


def test_each_checkpoint_of_the_merger_is_told_once() -> None:
    run, seen = TinyRun(), list[Participant]()
    island = run.island("a", on_marker=seen.append)
    for number, times in ((5, 1), (5, 1), (6, 2)):
        run.merger.transport.merger.announce(run.merger.epoch, Marker(number, 0))
        island.link.pump()
        island.boundary()
        assert seen == [island] * times


# -- what it sends --------------------------------------------------------------------------------------------------


def test_a_thin_codec_is_used_for_large_fragments_where_what_it_leaves_out_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Uplink, "fits", lambda *_: False)
    for rule, small, codec in (("carry", 0, "int4"), ("overwrite", 0, "bfloat16"), ("carry", SMALL_BYTES, "bfloat16")):
        monkeypatch.setattr(manifest_module, "SMALL_BYTES", small)
        sent: list[Draft] = []
        run = TinyRun(tiny.manifest(config=replace(tiny.CONFIG, adopt=AdoptConfig(rule))))  # type: ignore[arg-type]
        island = run.island()
        monkeypatch.setattr(island.link, "send", sent.append)
        run.play(island, 8)
        assert {draft.header.codec for draft in sent} == {codec}, (rule, small)


def test_a_snapshot_whose_adoption_fails_is_adopted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of a user may go on after an error, such as parameters of another shape."""

    def fails(*_: object) -> None:
        raise ConfigError("the parameters are others", "")

    run, island = tiny.played(5)
    before, replica = versions(island), island.computation.replica
    adopt = replica.adopt
    monkeypatch.setattr(replica, "adopt", fails)
    run.play(run.island("other"), 8)
    island.link.pump()
    with failing(ConfigError):
        island.boundary()
    assert versions(island) == before
    monkeypatch.setattr(replica, "adopt", adopt)
    island.boundary()
    assert versions(island) == [snapshot.version for snapshot in run.merger.snapshots.values()]


# -- without a merger -----------------------------------------------------------------------------------------------


def alone(run: TinyRun, island: Island, steps: int) -> None:
    """Let an island train while no merger looks at the run."""
    for _ in range(steps):
        run.clock.now += 1.0
        island.link.pump()
        island.boundary()
        island.advance()


def test_an_island_without_a_merger_does_not_use_up_the_run() -> None:
    short = replace(tiny.CONFIG, inner=replace(tiny.CONFIG.inner, steps=220))
    run = TinyRun(tiny.manifest(config=short))
    run.merger.transport.merger.release(run.merger.epoch)
    island = run.island()
    alone(run, island, 200)
    window = 4  # two rounds of a stride of two steps
    assert (island.totals.steps, island.ledger.global_step) == (200, window)
    assert not island.finished
    leaves = [island.reason]
    alone(run, island, 40)  # as many as the whole run has
    leaves.append(island.reason)
    assert "no merger" in leave_reason(island)[1]
    assert run.transport.reader.presences()[0].heartbeat.link != "ok"
    assert run.merger.acquire()
    run.merger.load()
    run.play(island, 20)
    assert run.merger.state.step >= 10
    assert [*leaves, island.reason] == ["", "stranded", ""]
    assert run.transport.reader.counters().refused == 0
    for _ in range(240):
        run.play(island, 1)
    assert island.finished


def test_a_merger_that_pauses_holds_the_schedule() -> None:
    run, island = tiny.played(4)
    run.transport.reader.steer({"merging": "paused"})
    before = run.merger.state.step
    run.play(island, 300)
    assert before < island.ledger.global_step <= before + AHEAD_STEPS_MIN + 4
    run.transport.reader.steer({"merging": ""})
    run.play(island, 50)
    assert island.stretch > 1.5
    assert run.transport.reader.presences()[0].heartbeat.link == "ok"  # the pause says nothing about the link
    assert run.merger.state.step > before + AHEAD_STEPS_MIN
    assert run.transport.reader.counters().refused == 0
