"""Snapshots as differences: all islands hold the same bits as the merger's shadow, which does not drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.codecs import codec
from archipelago.broker.config import WireConfig
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import IslandTransport, ReaderClient
from archipelago.broker.wire import digest_of, newest, unpack
from archipelago.islands.sync.arrays import flatten
from archipelago.islands.tasks.ours import first_snapshots
from archipelago.merger.outer import publish
from archipelago.ops.experiments.virtual_time import ChangedTransport, VirtualRun
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.harness.merger_run import compact_now
from tests.integration.virtual import ENDLESS, LateRun, work
from tests.sharded import closed

pytestmark = pytest.mark.usefixtures("optimised")

DIFFERENCES = ["int8", "int4"]
CONFIG = replace(ENDLESS, wire=WireConfig(up="int4", down="int4", zstd_level=0))


def test_in_hundreds_of_rounds_the_shadow_never_drifts() -> None:
    """The rounding error stays below a step of the codec, and the sum of the differences has the same bits."""
    for down in DIFFERENCES:
        random = np.random.default_rng(0)
        exact_N = random.standard_normal(1000).astype(np.float32)
        shadow_N = island_N = exact_N
        for number in range(300):
            exact_N = exact_N + np.float32(0.01) * random.standard_normal(1000).astype(np.float32)
            owed_N = exact_N - shadow_N
            wire = WireConfig(down=down)  # type: ignore[arg-type]
            held_N, body = publish(wire, jnp.asarray(shadow_N), jnp.asarray(exact_N))
            shadow_N = np.asarray(held_N)
            island_N = island_N + codec(down).decode(body, 1000)
            assert island_N.tobytes() == shadow_N.tobytes(), f"{down}: round {number}"
            bound_N = samples.codec_error_bound(down, owed_N) + np.float32(2.0**-22) * np.abs(exact_N)
            assert (np.abs(exact_N - shadow_N) <= bound_N).all(), f"{down}: round {number}"
        assert np.abs(exact_N - shadow_N).max() < 0.02, down


def test_a_run_begins_from_its_exact_parameters() -> None:
    """The codec of differences must not round the first parameters, which may be fine-tuned ones."""
    for down in DIFFERENCES:
        made = work(replace(ENDLESS, wire=WireConfig(down=down)))  # type: ignore[arg-type]
        manifest, exact = made.describe("exact"), made.model.init()
        for rows, (_, payload), size in zip(
            manifest.layout, first_snapshots(manifest, exact), manifest.sizes, strict=True
        ):
            np.testing.assert_array_equal(unpack(payload, size), np.asarray(flatten(rows, exact)), err_msg=down)


def require_published(run: VirtualRun) -> None:
    """Fail unless islands hold the bits that the merger has published."""
    for island in run.islands.values():
        for p, arrival in island.link.channels[0].inbox.held.items():
            snapshot, params_N = newest(run.transport.reader, run.manifest, p)[:2]
            if arrival.snapshot.version == snapshot.version:
                assert arrival.params_N.tobytes() == params_N.tobytes()
            assert digest_of(arrival.params_N) == (arrival.snapshot.held or digest_of(arrival.params_N))


@pytest.mark.full
def test_islands_hold_the_bits_that_the_merger_published(server: RedisServer) -> None:
    """This includes an island that joins late and one whose events come late. Fewer bytes go down than in full."""
    run = LateRun(work(CONFIG), [1.0, 1.2], 2.5, connect=partial(connect, server.url, "down"), run="down")
    run.advance_until(lambda: closed(run)[0] >= 24)
    late = run.add_island("late", 1.0)

    def downloaded() -> int:
        return sum(presence.heartbeat.bytes_down for presence in run.transport.reader.presences())

    taken = downloaded()
    run.advance_until(lambda: closed(run)[0] >= 48)
    full = sum(len(run.transport.reader.fragment(p)[1]) for p in range(6))
    assert downloaded() - taken < 0.5 * full * 3 * 4, "the islands took full snapshots"
    assert late.totals.steps
    require_published(run)
    for p, fragment in run.merger.fragments.items():
        head = run.transport.reader.heads()[p]
        assert head is not None
        assert digest_of(np.asarray(fragment.published_N)) == head.held
        assert np.abs(np.asarray(fragment.params_N) - np.asarray(fragment.published_N)).max() < 0.05


class DownlinkRun(VirtualRun):
    """A run of one island, which gets each difference as `change` returns it, and is its own reader."""

    change: Callable[[bytes], bytes | None] = staticmethod(lambda payload: payload)

    def connect_island(self, name: str) -> IslandTransport:
        self.asked, self.real = 0, super().connect_island(name)
        return ChangedTransport(self.real.run, self.real.island, cast(ReaderClient, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real.reader, name)

    def difference(self, *about: Any) -> bytes | None:
        """Return what arrives of a difference."""
        self.asked += 1
        payload = self.real.reader.difference(*about[:2])
        return None if payload is None else self.change(payload)


def test_a_missing_or_hostile_difference_is_replaced_by_a_full_snapshot() -> None:
    """The island trains on. Hostile differences have the announced size, so that only their bytes are wrong."""
    run = DownlinkRun(work(CONFIG), [1.0])
    run.advance_until(lambda: closed(run)[0] >= 8)
    body, found = codec("int4").encoded_size(run.manifest.sizes[0]), run.islands["island-0"].link.channels[0].inbox.held
    changes: tuple[Callable[[bytes], bytes | None], ...] = (
        lambda payload: None,
        lambda payload: b"nonsense",
        lambda payload: bytes(len(payload) - body) + payload[-body:],
        lambda payload: payload[:-body].replace(b"int4", b"top3") + payload[-body:],
        lambda payload: payload[:-body] + b"\x3c" * body,  # other values
        lambda payload: payload[:-body] + b"\xff" * body,  # no number
    )
    for run.change in changes:
        wanted, asked = [snapshot.version + 1 for snapshot in run.merger.snapshots.values()], run.asked

        def have_arrived(wanted: list[int] = wanted) -> bool:
            for p in range(len(wanted)):
                compact_now(run.merger, p)
            return all(p in found and found[p].snapshot.version >= version for p, version in enumerate(wanted))

        run.advance_until(have_arrived)
        assert run.asked > asked
        require_published(run)
