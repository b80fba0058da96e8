"""Rejoining: an island's optimiser state, global step and totals, and its effects on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from archipelago.broker.codecs import Vector, body_of, codec
from archipelago.broker.errors import UnreachableError
from archipelago.broker.messages import Marker
from archipelago.broker.wire import digest
from archipelago.islands.checkpoint import LEAVING, IslandStore, cut
from archipelago.islands.inner import begin, counts
from archipelago.islands.rejoin import Rejoin
from archipelago.islands.sync.actions import BeginPass, ForgetShards, unfolded
from archipelago.islands.worker import Island
from tests import samples
from tests.harness import tiny
from tests.harness.tiny import TinyRun, leaf_bytes


def merged_params(run: TinyRun) -> list[Vector]:
    return [np.asarray(fragment.params_N) for fragment in run.merger.fragments]


def own_params(island: Island) -> list[Vector]:
    """Return the parameters of each fragment, which is one tensor."""
    return [np.asarray(island.inner.params[tensor.name]).reshape(-1) for ((tensor, _),) in island.manifest.layout]


def fresh_moments(island: Island) -> list[bytes]:
    return leaf_bytes(begin(tiny.CONFIG.inner, island.inner.params).optimizer)


def returning(
    run: TinyRun, name: str = "new", store: IslandStore | None = None, meanwhile: Callable[[], object] = lambda: None
) -> tuple[Island, Rejoin]:
    """Return an island that has asked its peers. `meanwhile` is called at each pause of its wait."""
    island = run.island(name, "z", silent=True)
    pauses = itertools.count()

    def pause(seconds: float) -> None:
        assert next(pauses) < 10_000, "the wait does not end"
        run.clock.now += seconds
        island.link.pump()
        meanwhile()

    rejoin = Rejoin(run.connect(), store, island, island.link.join(), pause=pause)
    rejoin.ask()
    island.beat("joining")
    island.link.pump()
    return island, rejoin


# -- from a peer ----------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_the_givers_moments_and_the_mergers_parameters() -> None:
    run = TinyRun()
    giver = run.island("giver")
    run.play(giver, 21)
    given: list[tuple[list[bytes], int]] = []
    hand_over = giver.link.hand_over

    def noted(state: Any) -> None:
        given.append((leaf_bytes(giver.inner.optimizer), giver.action_log.done))
        hand_over(state)

    giver.link.hand_over = noted  # type: ignore[method-assign]
    island, rejoin = returning(run, meanwhile=lambda: run.play(giver, 1))
    before = merged_params(run)
    rejoin.complete(None)
    ((moments, done),) = given
    assert leaf_bytes(island.inner.optimizer) == moments
    assert leaf_bytes(giver.inner.optimizer) != moments  # the giver continues to train
    assert moments != fresh_moments(island)
    assert island.moments == "peer giver"
    assert island.action_log.take().text.split()[-1] == f"moments:giver/x@{done}"  # type: ignore[union-attr]
    for own, merged, gave in zip(own_params(island), before, own_params(giver), strict=True):
        assert own.tobytes() == merged.tobytes() != gave.tobytes()
    assert [count.steps for count in island.ledger.counts] == [0, 0]
    stored = run.broker.runs["tiny"]
    assert (stored.requests, stored.handovers) == ({}, {})


def test_the_givers_actions_up_to_its_handover_are_recorded() -> None:
    """This includes actions that it had not sent with a contribution yet."""
    run = TinyRun()
    giver = run.island("giver")
    run.play(giver, 5)
    island, rejoin = returning(run, meanwhile=lambda: run.pass_boundary(giver))
    rejoin.complete(None)
    (word,) = [w for w in island.action_log.take().text.split() if w.startswith("moments")]  # type: ignore[union-attr]
    told = unfolded([actions for _, actions in run.transport.merger.actions("0-0") if actions.island == "giver"])
    assert len(told) >= int(word.split("@")[1]) > 0


def test_muons_moments_come_from_a_peer_or_from_its_own_checkpoint(tmp_path: Path) -> None:
    run = TinyRun(tiny.manifest(config=tiny.MUON))
    giver = run.island("giver")
    run.play(giver, 21)
    island, rejoin = returning(run, meanwhile=lambda: run.play(giver, 1))
    rejoin.complete(None)
    assert island.moments == "peer giver"
    seen = {int(count) for count in counts(island.inner.optimizer)}
    assert seen <= {21, giver.totals.steps}
    assert len(seen) == 1
    run.play(island, 3)
    store = IslandStore(tmp_path, run.manifest)
    store.save(cut(island, LEAVING))
    kept = leaf_bytes(island.inner.optimizer)
    after = run.island("new", "y")
    assert leaf_bytes(after.inner.optimizer) != kept
    assert store.restore_moments(after) is not None
    assert leaf_bytes(after.inner.optimizer) == kept
    assert str(jax.tree.structure(after.inner)) == str(jax.tree.structure(island.inner))
    run.play(after, 2)
    assert np.isfinite(np.concatenate(own_params(after))).all()


def test_giving_does_not_change_the_giver() -> None:
    """Its parameters and moments are the same as without a request."""
    run, alone = TinyRun(), TinyRun()
    giver, undisturbed = run.island("giver"), alone.island("giver")
    run.play(giver, 10)
    alone.play(undisturbed, 10)
    island, rejoin = returning(run, meanwhile=lambda: run.play(giver, 1))
    rejoin.complete(None)
    assert island.moments == "peer giver"
    for one, other in ((giver, run), (undisturbed, alone)):
        other.play(one, 30 - one.totals.steps)
    assert leaf_bytes(giver.inner) == leaf_bytes(undisturbed.inner)
    assert [e.digest for e in run.transport.reader.tape(99)] == [e.digest for e in alone.transport.reader.tape(99)]


def test_no_peer_is_asked_at_the_beginning_of_a_run() -> None:
    run = TinyRun()
    peer = run.island("giver")
    run.pass_boundary(peer)  # the peer trains, but no round is merged yet
    island, rejoin = returning(run)
    assert run.broker.runs["tiny"].requests == {}
    rejoin.complete(None)
    assert island.moments == "fresh"
    assert island.ledger.global_step == 0


def test_the_wait_for_a_silent_peer_ends_after_ten_seconds(tmp_path: Path) -> None:
    run = TinyRun()
    run.play(run.island("silent"), 10)
    began = run.clock.now
    beat = samples.heartbeat("silent")
    island, rejoin = returning(run, meanwhile=lambda: run.transport.island.heartbeat(beat))
    rejoin.complete(None)
    assert island.moments == "fresh"
    assert leaf_bytes(island.inner.optimizer) == fresh_moments(island)
    assert 10.0 <= run.clock.now - began < 11.0
    assert run.broker.runs["tiny"].requests == {}


# -- from its own checkpoint ----------------------------------------------------------------------------------------


def left(run: TinyRun, folder: Path, name: str = "new", steps: int = 10) -> tuple[IslandStore, Island]:
    """Let an island train, save its state and leave."""
    store = IslandStore(folder, run.manifest)
    island = run.island(name, "w")
    run.play(island, steps)
    store.save(cut(island, LEAVING))
    island.leave(flush_seconds=0.0)
    island.link.pump()
    run.merger.turn(0.0)
    return store, island


def test_without_peers_an_island_takes_its_own_checkpoint(tmp_path: Path) -> None:
    run = TinyRun()
    store, before = left(run, tmp_path / "k")
    island, rejoin = returning(run, store=store)
    rejoin.complete(None)
    assert leaf_bytes(island.inner.optimizer) == leaf_bytes(before.inner.optimizer)
    assert island.moments == "own checkpoint"
    for own, merged in zip(own_params(island), merged_params(run), strict=True):
        assert own.tobytes() == merged.tobytes()


def test_a_peer_is_preferred_to_the_own_checkpoint(tmp_path: Path) -> None:
    run = TinyRun()
    store, _ = left(run, tmp_path / "k")
    giver = run.island("giver")
    run.play(giver, 5)
    island, rejoin = returning(run, store=store, meanwhile=lambda: run.play(giver, 1))
    rejoin.complete(None)
    assert island.moments == "peer giver"


@pytest.mark.parametrize("fault", ["forged", "outage"])
def test_a_failed_handover_falls_back_to_the_own_checkpoint(tmp_path: Path, fault: str) -> None:
    run = TinyRun()
    store, before = left(run, tmp_path / "k")
    giver = run.island("giver")
    run.play(giver, 5)
    island, rejoin = returning(run, store=store)
    if fault == "forged":
        run.transport.island.hand_over("new/z", samples.handover(b"moments"), b"moments")
    else:

        def fails(who: str) -> None:
            raise UnreachableError("connection refused")

        rejoin.transport.island.handed_over = fails  # type: ignore[method-assign]
    rejoin.complete(None)
    assert island.moments == "own checkpoint"
    assert leaf_bytes(island.inner.optimizer) == leaf_bytes(before.inner.optimizer)
    assert run.broker.runs["tiny"].requests == {}


def test_without_peers_and_checkpoints_moments_are_fresh(tmp_path: Path) -> None:
    run = TinyRun()
    _, before = left(run, tmp_path / "k")
    island, rejoin = returning(run, store=IslandStore(tmp_path / "none", run.manifest))
    rejoin.complete(None)
    assert island.moments == "fresh"
    assert leaf_bytes(island.inner.optimizer) == fresh_moments(island)
    assert island.totals.steps == before.totals.steps  # its heartbeat is still in the broker


# -- totals and the clock -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["peer", "own checkpoint", "fresh"])
def test_totals_continue_and_the_global_step_comes_from_the_run(tmp_path: Path, source: str) -> None:
    run = TinyRun()
    store, before = left(run, tmp_path / "k")
    other = run.island("giver")
    run.play(other, 25)
    if source != "peer":
        other.leave(flush_seconds=0.0)
        other.link.pump()
        run.merger.turn(0.0)
    island, rejoin = returning(
        run, store=None if source == "fresh" else store, meanwhile=lambda: run.play(other, int(source == "peer"))
    )
    stamped = max(head.step for head in run.transport.reader.heads() if head is not None)
    rejoin.complete(None)
    assert island.moments == ("peer giver" if source == "peer" else source)
    assert (island.totals.steps, island.totals.tokens) == (10, 10 * tiny.CONFIG.tokens_per_step)
    assert island.ledger.global_step == stamped > before.ledger.global_step
    seen: list[int] = []
    step = island.steps

    def noted(state: Any, tokens: jax.Array, global_step: jax.Array) -> Any:
        seen.append(int(global_step))
        return step(state, tokens, global_step)

    island.steps = noted
    island.advance()
    assert seen == [stamped]
    assert island.totals.steps == 11


# -- effects on the merged parameters -------------------------------------------------------------------------------


def test_a_fresh_island_contributes_only_its_own_progress() -> None:
    run = TinyRun()
    other = run.island("giver")
    run.play(other, 20)
    other.leave(flush_seconds=0.0)
    other.link.pump()
    run.merger.turn(0.0)
    before = [p.tobytes() for p in merged_params(run)]
    island, rejoin = returning(run)
    rejoin.complete(None)
    versions = [count.version for count in island.ledger.counts]
    for _ in range(2):
        run.pass_boundary(island)
    assert [p.tobytes() for p in merged_params(run)] == before  # without a step it sends nothing
    bases: list[tuple[int, int, float]] = []
    send = island.link.send

    def noted(draft: Any) -> None:
        sent_N = codec(draft.header.codec).decode(body_of(draft.parts), draft.elements)
        moved = float(np.abs(sent_N).max())
        bases.append((draft.header.fragment, draft.header.base, moved))
        send(draft)

    island.link.send = noted  # type: ignore[method-assign]
    run.play(island, 3)
    fragment, base, moved = bases[0]
    assert base == versions[fragment] > 0
    assert 0 < moved < 10 * tiny.CONFIG.inner.peak  # this is the effect of three steps, not of its parameters


# -- the whole run goes back ----------------------------------------------------------------------------------------


def cut_at_marker(run: TinyRun, store: IslandStore, name: str = "a", steps: int = 13) -> Island:
    """Return an island that saved a checkpoint at the merger's checkpoint 3."""
    island = run.island(name, on_marker=lambda of, number: store.save(cut(of, number)))
    run.play(island, steps)
    run.merger.transport.merger.announce(run.merger.epoch, Marker(3, run.merger.rounds.closed))
    run.pass_boundary(island)
    assert store.find(3) is not None
    return island


def gone_back(run: TinyRun) -> TinyRun:
    """Return a run on another broker with the same parameters and no leases, as after a restore."""
    again = TinyRun(run.manifest)
    stored, now = again.broker.runs["tiny"], run.broker.runs["tiny"]
    stored.fragments, stored.outer, stored.state, stored.cursors = (
        dict(now.fragments),
        dict(now.outer),
        now.state,
        dict(now.cursors),
    )
    again.merger.load()
    return again


def test_a_restored_island_has_its_whole_state_and_its_shards(tmp_path: Path) -> None:
    run = TinyRun()
    store = IslandStore(tmp_path / "k", run.manifest)
    before = cut_at_marker(run, store)
    held, sent = before.batches.held(), before.link.channels[0].outbox.in_flight()[0]
    again = gone_back(run)
    # The link leases before the island is restored, and prefers the shard that the island was reading.
    island, rejoin = returning(again, "a", store)
    rejoin.complete(store.find(3))
    assert island.moments == "own checkpoint"
    assert island.ledger.formerly == "x"
    assert island.batches.held() == held
    assert again.transport.island.leased(held, "a/z") == set(held)
    for _ in range(3):
        again.pass_boundary(island)
    assert island.batches.held() == held  # it keeps its leases
    nxt = island.link.lease()
    assert nxt is not None
    assert nxt.shard not in held
    identities = {p.contribution.identity_text for p in sent}
    published = {entry.contribution.identity_text for entry in again.broker.runs["tiny"].updates.values()}
    assert identities <= published


def test_a_restored_island_withdraws_its_request(tmp_path: Path) -> None:
    run = TinyRun()
    store = IslandStore(tmp_path / "k", run.manifest)
    cut_at_marker(run, store)
    again = gone_back(run)
    peer = again.island("giver")
    again.pass_boundary(peer)
    _, rejoin = returning(again, "a", store)
    assert again.broker.runs["tiny"].requests
    rejoin.complete(store.find(3))
    again.pass_boundary(peer)
    stored = again.broker.runs["tiny"]
    assert (stored.requests, stored.handovers) == ({}, {})


def test_a_shard_that_another_island_has_leased_is_given_up(tmp_path: Path) -> None:
    run = TinyRun()
    store = IslandStore(tmp_path / "k", run.manifest)
    (shard,) = cut_at_marker(run, store).batches.held()
    again = gone_back(run)
    other = again.island("b", "o", shards=[shard])
    assert again.transport.island.leased([shard], "b/o")
    again.pass_boundary(other)
    island, rejoin = returning(again, "a", store)
    rejoin.complete(store.find(3))
    assert island.batches.held() == []
    island.advance()
    actions = island.action_log.take()
    assert actions is not None
    found = unfolded([actions])
    begun = [action.shard for action in found if isinstance(action, BeginPass)]
    assert begun[0] != shard
    assert ForgetShards((shard,)) in found, "the record does not know, and reads on in that shard"


def test_an_outage_while_leasing_restored_shards_does_not_stop_the_island(tmp_path: Path) -> None:
    run = TinyRun()
    store = IslandStore(tmp_path / "k", run.manifest)
    cut_at_marker(run, store)
    island, rejoin = returning(gone_back(run), "a", store)

    def fails(*arguments: Any) -> None:
        raise UnreachableError("connection refused")

    rejoin.transport.island.lease_shard = fails  # type: ignore[method-assign, assignment]
    rejoin.complete(store.find(3))
    assert island.moments == "own checkpoint"


def test_a_damaged_checkpoint_falls_back_to_rejoining(tmp_path: Path) -> None:
    run = TinyRun()
    store = IslandStore(tmp_path / "k", run.manifest)
    cut_at_marker(run, store)
    found = store.find(3)
    assert found is not None
    torn = replace(found, rest={**found.rest, "digest": digest(b"another")})
    island, rejoin = returning(run, "b", store)
    rejoin.complete(torn)
    assert island.ledger.formerly == ""
    for own, merged in zip(own_params(island), merged_params(run), strict=True):
        assert own.tobytes() == merged.tobytes()
