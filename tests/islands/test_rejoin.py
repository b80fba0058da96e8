"""Rejoining: an island's optimiser state, global step and totals, and its effects on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from archipelago.broker.codecs import Vector, body_of, codec
from archipelago.broker.errors import UnreachableError
from archipelago.islands.checkpoint import IslandStore
from archipelago.islands.inner import begin
from archipelago.islands.sync.connection.outbox import Draft
from archipelago.islands.sync.recovery import Newcomer
from archipelago.islands.worker import Island
from tests import samples
from tests.harness import tiny
from tests.harness.tiny import TinyRun, leaf_bytes


def merged_params(run: TinyRun) -> list[Vector]:
    return [np.asarray(fragment.params_N) for fragment in run.merger.fragments.values()]


def own_params(island: Island) -> list[Vector]:
    """Return the parameters of each fragment, which is one tensor."""
    return [np.asarray(island.inner.params[tensor.name]).reshape(-1) for ((tensor, _),) in island.manifest.layout]


def optimizer_bytes(island: Island) -> list[bytes]:
    return leaf_bytes(island.inner.optimizer)


def fresh_moments(island: Island) -> list[bytes]:
    return leaf_bytes(begin(tiny.CONFIG.inner, island.inner.params).optimizer)


def bits(vectors: list[Vector]) -> list[bytes]:
    return [vector_N.tobytes() for vector_N in vectors]


def returning(
    run: TinyRun, name: str = "new", meanwhile: Callable[[], object] = lambda: None
) -> tuple[Island, Newcomer]:
    """Return an island that has asked its peers. `meanwhile` is called at each pause of its wait."""
    island = run.island(name, "z", silent=True)
    pauses = itertools.count()

    def pause(seconds: float) -> None:
        assert next(pauses) < 10_000, "the wait does not end"
        run.clock.now += seconds
        island.link.pump()
        meanwhile()

    rejoin = Newcomer(run.connect(), island, pause=pause)
    rejoin.ask()
    island.beat("joining")
    island.link.pump()
    return island, rejoin


# -- from a peer ----------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_the_givers_moments_and_the_mergers_parameters() -> None:
    run = TinyRun()
    giver = run.island("giver")
    run.play(giver, 21)
    given: list[list[bytes]] = []
    hand_over = giver.link.hand_over

    def noted(state: Any) -> None:
        given.append(optimizer_bytes(giver))
        hand_over(state)

    giver.link.hand_over = noted  # type: ignore[method-assign]
    island, rejoin = returning(run, meanwhile=lambda: run.play(giver, 1))
    before = merged_params(run)
    rejoin.complete()
    (moments,) = given
    assert optimizer_bytes(island) == moments != fresh_moments(island)
    assert optimizer_bytes(giver) != moments  # the giver continues to train
    assert island.optimizer_origin == "peer giver"
    assert bits(own_params(island)) == bits(before) != bits(own_params(giver))
    assert [count.steps for count in island.ledger.counts] == [0, 0]
    stored = run.broker.runs["tiny"]
    assert (stored.requests, stored.handovers) == ({}, {})


# -- from its own checkpoint ----------------------------------------------------------------------------------------


def left(run: TinyRun, folder: Path) -> tuple[IslandStore, Island]:
    """Let an island train, save its state and leave."""
    store = IslandStore(folder, run.manifest)
    island = run.island("new", "w")
    run.play(island, 10)
    store.finish(island)
    run.depart(island)
    return store, island


@pytest.mark.parametrize("fault", ["forged", "outage"])
def test_a_failed_handover_falls_back_to_the_own_checkpoint(tmp_path: Path, fault: str) -> None:
    run = TinyRun()
    store, before = left(run, tmp_path / "k")
    run.play(run.island("giver"), 5)
    island, rejoin = returning(run)

    def fails(who: str) -> None:
        raise UnreachableError("connection refused")

    if fault == "forged":
        run.transport.island.hand_over("new/z", samples.handover(b"moments"), b"moments")
    else:
        rejoin.transport.island.handed_over = fails  # type: ignore[method-assign]
    rejoin.complete(store)
    assert island.optimizer_origin == "own checkpoint"
    assert optimizer_bytes(island) == optimizer_bytes(before)
    assert run.broker.runs["tiny"].requests == {}


# -- totals and the clock -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["peer", "own checkpoint", "fresh"])
def test_totals_continue_and_the_global_step_comes_from_the_run(tmp_path: Path, source: str) -> None:
    """A peer is preferred to the own checkpoint."""
    run = TinyRun()
    store, before = left(run, tmp_path / "k")
    other = run.island("giver")
    run.play(other, 25)
    if source != "peer":
        run.depart(other)
    island, rejoin = returning(run, meanwhile=lambda: run.play(other, int(source == "peer")))
    stamped = max(head.step for head in run.transport.reader.heads() if head is not None)
    rejoin.complete(None if source == "fresh" else store)
    assert island.optimizer_origin == ("peer giver" if source == "peer" else source)
    if source != "peer":
        origin = optimizer_bytes(before) if source == "own checkpoint" else fresh_moments(island)
        assert optimizer_bytes(island) == origin
        assert bits(own_params(island)) == bits(merged_params(run))
    assert (island.totals.steps, island.totals.tokens) == (10, 10 * tiny.CONFIG.tokens_per_step)
    last = before.link.heartbeats.newest
    assert last is not None
    first = island.link.heartbeats.first
    assert (first.bytes_up, first.bytes_down) == (last.bytes_up, last.bytes_down)
    assert min(first.bytes_up, first.bytes_down) > 0
    assert island._heartbeat("training").bytes_up >= last.bytes_up
    assert island.ledger.global_step == stamped > before.ledger.global_step
    seen: list[int] = []
    step = island.computation.steps

    def noted(state: Any, tokens: jax.Array, global_step: jax.Array, length: jax.Array) -> Any:
        seen.append(int(global_step))
        return step(state, tokens, global_step, length)

    island.computation.steps = noted
    island.advance()
    assert seen == [stamped]
    assert island.totals.steps == 11


def test_an_island_that_rejoined_contributes_only_its_own_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinyRun()
    other = run.island("giver")
    run.play(other, 20)
    run.depart(other)
    before = bits(merged_params(run))
    island, rejoin = returning(run)
    rejoin.complete()
    versions = [count.version for count in island.ledger.counts]
    sent: list[Draft] = []
    monkeypatch.setattr(island.link, "send", sent.append)
    for _ in range(2):
        run.pass_boundary(island)
    assert (sent, bits(merged_params(run))) == ([], before), "without a step it sends nothing"
    run.play(island, 3)
    header = sent[0].header
    assert header.base == versions[header.fragment] > 0
    moved = np.abs(codec(header.codec).decode(body_of(sent[0].parts), sent[0].elements)).max()
    assert 0 < moved < 10 * tiny.CONFIG.inner.peak, "this is the effect of three steps, not of its parameters"
