"""Snapshots as differences: all islands hold the same bits as the merger's shadow, which does not drift."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipelago.broker.codecs import codec
from archipelago.broker.config import RunConfig, WireConfig
from archipelago.broker.published import newest
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Arrived, unwatched
from archipelago.broker.wire import digest_of, unpack
from archipelago.islands.creation import describe, first_snapshots
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.models.registry import build
from archipelago.islands.sync.arrays import flatten
from archipelago.islands.tasks.ours import our_work
from archipelago.merger.round_merge import publish
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.launch.embedded_redis import Server
from tests.harness.merger_run import compact_now
from tests.tiers import examples

DIFFERENCES = ["int8", "int4", "e3m0"]


@pytest.mark.parametrize("down", DIFFERENCES)
def test_in_a_thousand_rounds_the_shadow_never_drifts(down: Any) -> None:
    """The rounding error stays below a step of the codec, and the sum of the differences has the same bits."""
    random = np.random.default_rng(0)
    wire = WireConfig(down=down)
    exact_N = random.standard_normal(1000).astype(np.float32)
    shadow_N = island_N = exact_N
    for number in range(1000):
        exact_N = exact_N + np.float32(0.01) * random.standard_normal(1000).astype(np.float32)
        owed_N = exact_N - shadow_N
        held_N, body = publish(wire, jnp.asarray(shadow_N), jnp.asarray(exact_N))
        shadow_N = np.asarray(held_N)
        island_N = island_N + codec(down).decode(body, 1000)
        assert island_N.tobytes() == shadow_N.tobytes(), f"round {number}"
        bound_N = codec(down).error_bound(owed_N) + np.float32(2.0**-22) * np.abs(exact_N)
        assert (np.abs(exact_N - shadow_N) <= bound_N).all(), f"round {number}"
    assert np.abs(exact_N - shadow_N).max() < 0.02


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), down=st.sampled_from(DIFFERENCES))
def test_the_shadow_reaches_constant_parameters(seed: int, down: Any) -> None:
    """The rounding error is carried over, so the shadow comes as close as float32 allows."""
    random = np.random.default_rng(seed)
    exact_N, shadow_N = (random.standard_normal(300).astype(np.float32) for _ in range(2))
    for _ in range(40):
        held_N, _ = publish(WireConfig(down=down), jnp.asarray(shadow_N), jnp.asarray(exact_N))
        shadow_N = np.asarray(held_N)
    np.testing.assert_allclose(shadow_N, exact_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("down", DIFFERENCES)
def test_a_run_begins_from_its_exact_parameters(config: RunConfig, corpus: OpenCorpus, down: Any) -> None:
    """The codec of differences must not round the first parameters, which may be fine-tuned ones."""
    manifest = describe("exact", replace(config, wire=WireConfig(down=down)), corpus.identity)
    exact = build(config.model.size).init(config.seed)
    for rows, (_, payload), size in zip(manifest.layout, first_snapshots(manifest), manifest.sizes, strict=True):
        np.testing.assert_array_equal(unpack(payload, size), np.asarray(flatten(rows, exact)))


@pytest.mark.parametrize("down", ["int4", *(pytest.param(d, marks=pytest.mark.full) for d in ("int8", "e3m0"))])
def test_islands_hold_the_bits_that_the_merger_published(
    config: RunConfig, corpus: OpenCorpus, server: Server, down: Any
) -> None:
    """This includes an island that joins late and one that misses rounds. Far fewer bytes go down than in full."""
    config = replace(config, wire=WireConfig(up="int4", down=down), inner=replace(config.inner, steps=10_000))
    name = f"down-{down}"
    connection = partial(connect, server.url, name)
    run = VirtualRun(our_work(config, corpus), [1.0, 1.2], connect=connection, run=name)
    run.advance_until(lambda: run.merger.rounds.closed >= 12)
    late = run.add_island("late", 1.0)
    deaf = run.islands["island-1"].link
    hears, deaf.pump_receive = deaf.pump_receive, lambda block_seconds=0.0: None  # type: ignore[method-assign]
    run.advance_until(lambda: run.merger.rounds.closed >= 24)
    deaf.pump_receive = hears  # type: ignore[method-assign]
    taken = run.transport.reader.books().bytes_down
    run.advance_until(lambda: run.merger.rounds.closed >= 36)
    full = sum(len(run.transport.reader.fragment(p)[1]) for p in range(6))
    assert run.transport.reader.books().bytes_down - taken < 0.5 * full * 2 * 3, "the islands took full snapshots"
    assert late.totals.steps
    for island in run.islands.values():
        for p, arrival in island.link.channels[0].inbox.snapshots.held.items():
            snapshot, params_N, _ = newest(run.transport.reader, run.manifest, p)
            if arrival.snapshot.version == snapshot.version:
                assert arrival.params_N.tobytes() == params_N.tobytes()
            assert digest_of(arrival.params_N) == (arrival.snapshot.held or digest_of(arrival.params_N))
    for p, fragment in enumerate(run.merger.fragments):
        head = run.transport.reader.heads()[p]
        assert head is not None
        assert digest_of(np.asarray(fragment.published_N)) == head.held
        bound_N = np.abs(np.asarray(fragment.params_N) - np.asarray(fragment.published_N))
        assert bound_N.max() < 0.05


@pytest.mark.full
def test_a_restarted_merger_continues_to_the_same_bits(config: RunConfig, corpus: OpenCorpus) -> None:
    config = replace(config, wire=WireConfig(up="int4", down="int4"))
    digests = []
    for restarts in (False, True):
        run = VirtualRun(our_work(config, corpus), [1.0, 1.2])
        run.advance_until(lambda run=run: run.merger.rounds.closed >= 8)  # type: ignore[misc]
        if restarts:
            run.new_merger()
        run.finish()
        digests.append([entry.digest for entry in run.transport.reader.tape(1000)])
    assert digests[0][:12] == digests[1][:12]


def test_a_missing_or_damaged_difference_is_replaced_by_a_full_snapshot(config: RunConfig, corpus: OpenCorpus) -> None:
    """The island trains on, and takes the next full snapshot."""
    config = replace(config, wire=WireConfig(down="int4"), inner=replace(config.inner, steps=10_000))
    run = VirtualRun(our_work(config, corpus), [1.0])
    run.advance_until(lambda: run.merger.rounds.closed >= 8)
    link = run.islands["island-0"].link
    for gone in (None, b"nonsense"):
        asked: list[int] = []

        def difference(
            fragment: int, version: int, arrived: Arrived = unwatched, gone: Any = gone, asked: list[int] = asked
        ) -> Any:
            asked.append(version)
            return gone

        link.transport.reader.difference = difference  # type: ignore[method-assign]
        run.advance_until(lambda asked=asked: len(asked) > 4)  # type: ignore[misc]
        all_arrive(run)


def all_arrive(run: VirtualRun) -> None:
    """Write the full states of all fragments, until the first island has taken newer versions than those of now."""
    wanted = [snapshot.version + 1 for snapshot in run.merger.snapshots]
    held = run.islands["island-0"].link.channels[0].inbox.snapshots.held

    def have_arrived() -> bool:
        for p in range(len(wanted)):
            compact_now(run.merger, p)
        return all(p in held and held[p].snapshot.version >= version for p, version in enumerate(wanted))

    run.advance_until(have_arrived)


@pytest.mark.parametrize("hostile", ["no header", "another codec", "other values", "no number"])
def test_a_hostile_difference_is_replaced_by_a_full_snapshot(
    config: RunConfig, corpus: OpenCorpus, hostile: str
) -> None:
    """It has the announced size, so that only its bytes are wrong."""
    config = replace(config, wire=WireConfig(down="int4", zstd_level=0), inner=replace(config.inner, steps=10_000))
    run = VirtualRun(our_work(config, corpus), [1.0])
    run.advance_until(lambda: run.merger.rounds.closed >= 8)
    link = run.islands["island-0"].link
    honest, wholes = link.transport.reader.difference, link.channels[0].inbox.snapshots.fetch
    asked: list[int] = []
    whole: list[int] = []

    def difference(fragment: int, version: int, arrived: Arrived = unwatched) -> bytes | None:
        payload = honest(fragment, version)
        assert payload is not None
        asked.append(fragment)
        start = len(payload) - codec("int4").encoded_size(run.manifest.sizes[fragment])
        body = bytes(start) if hostile == "no header" else payload[:start]
        body = body.replace(b"int4", b"e3m0") if hostile == "another codec" else body
        fill = {"other values": b"\x3c", "no number": b"\xff"}.get(hostile)
        rest = payload[start:] if fill is None else fill * (len(payload) - start)
        return body + rest

    def fetched(p: int) -> Any:
        whole.append(p)
        return wholes(p)

    link.transport.reader.difference = difference  # type: ignore[method-assign]
    link.channels[0].inbox.snapshots.fetch = fetched  # type: ignore[method-assign]
    run.advance_until(lambda: len(asked) > 2)
    all_arrive(run)
    assert set(whole) >= set(asked)
    for p, arrival in link.channels[0].inbox.snapshots.held.items():
        snapshot, params_N, _ = newest(run.transport.reader, run.manifest, p)
        if arrival.snapshot.version == snapshot.version:
            assert arrival.params_N.tobytes() == params_N.tobytes()
