"""How an island fits its sending to its link: real islands, merger and Redis, one island behind a proxy that throttles.

Inner steps are stood in for by a nap and a random walk: what they take is then the same at every rate, whatever else
the machine does, so that what a thin link costs shows as it is. All the rest is the real thing.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from archipelago.broker.config import DataConfig, InnerConfig, RunConfig, SyncConfig, WireConfig
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Event, Snapshot
from archipelago.broker.redis.transport import connect
from archipelago.broker.wire import digest, pack
from archipelago.islands.data.batches import Batches
from archipelago.islands.inner import InnerState
from archipelago.islands.sync.link import Draft, Link
from archipelago.islands.worker import Island, train
from archipelago.merger.service import Merger, serve
from archipelago.ops.chaos.proxy import Proxy
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.watch.run_view import IslandView, observe

PHASES = (math.inf, 100.0, 10.0, 1.0, 100.0, 0.2, 100.0)
"""Mbit/s each way, one after the other in one run"""
STEP_SECONDS = 0.1
SETTLE_SECONDS, MEASURE_SECONDS = 10.0, 20.0
"""of each phase; the first of them for the island to find its way"""
JOIN_SECONDS, STOP_SECONDS = 120.0, 60.0
TEXT_BYTES = 1 << 20
TENSORS = tuple(Tensor(f"layers.{n}", (512, 1024)) for n in range(4))
"""2.1 M parameters, each tensor a fragment"""
CONFIG = RunConfig(
    data=DataConfig(sequence_length=64, batch_size=4, shards=8),
    inner=InnerConfig(steps=1 << 30),
    sync=SyncConfig(interval=24, fragments=len(TENSORS), window=2),
    wire=WireConfig(up="int4", thin="top3", down="int4"),
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """Counts of the island behind the proxy at one moment; a row is what changed between two."""

    at: float
    steps: int
    rounds: int
    sent: Counter[str]
    """contributions that the broker has, by codec"""
    spread: int
    """inner steps that they go over, all together"""
    merged: int
    view: IslandView


class CountingLink(Link):
    """Counts what it takes from the training thread, by codec, and how it ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.by_codec: Counter[str] = Counter()
        self.spread = self.merged = 0

    def send(self, draft: Draft) -> None:
        self.by_codec[draft.contribution.codec] += 1
        self.spread += draft.contribution.steps
        super().send(draft)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Snapshot):
            self.merged += len(self._unresolved.keys() & event.identities)
        super()._hear(event)


def stand_in(seed: int) -> Callable[[InnerState, jax.Array, jax.Array], tuple[InnerState, jax.Array]]:
    """Inner steps that take STEP_SECONDS each: a random walk, whose outer gradients no compression makes small."""
    noise = {
        t.name: jax.random.normal(jax.random.key(seed + n), t.shape, jnp.float32) * 1e-3 for n, t in enumerate(TENSORS)
    }

    @jax.jit
    def walked(params: Any, noise: Any, step: jax.Array) -> Any:
        return jax.tree.map(lambda p, e: p + jnp.roll(e, step * 7, axis=0), params, noise)

    def steps(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
        until = time.monotonic() + STEP_SECONDS * tokens_nxBxT1.shape[0]
        params = walked(state.params, noise, global_step)
        for value in params.values():
            value.block_until_ready()
        time.sleep(max(0.0, until - time.monotonic()))
        return state._replace(params=params), jnp.full(tokens_nxBxT1.shape[0], 2.0, jnp.float32)

    return steps


class Stand:
    """One run: a merger, an island at the Redis, and one behind the proxy, all on threads of this process."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        run = "link"
        identity = Corpus("none", "0" * 32, TEXT_BYTES)
        manifest = Manifest(run, CONFIG, TENSORS, balanced(TENSORS, len(TENSORS)), identity, {})
        self.transport = connect(url, run)
        self.transport.create(manifest, _first_snapshots(manifest))
        self.manifest = self.transport.manifest()
        self.stopping = threading.Event()
        self.merger = Merger(connect(url, run))
        address = urlsplit(url)
        behind = address._replace(netloc=f":{address.password or ''}@127.0.0.1:{proxy.port}").geturl()
        self.islands = {name: self._island(name, at) for name, at in (("near", url), ("thin", behind))}

    def _island(self, name: str, url: str) -> Island:
        link = CountingLink(connect(url, self.manifest.run), self.manifest, f"{name}/bench")
        batches = Batches(np.zeros(TEXT_BYTES, np.uint8), CONFIG, link.lease)
        seed = sum(name.encode())
        return Island(name, self.manifest, stand_in(seed), batches, link, link.join(), incarnation="bench")

    def start(self) -> None:
        """All of them, compiled."""
        stopped = self.stopping.is_set
        self.threads = [threading.Thread(target=serve, args=(self.merger, stopped), daemon=True)]
        for island in self.islands.values():
            island.link.start()
            island.warm_up()
            self.threads.append(threading.Thread(target=train, args=(island, stopped), daemon=True))
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Ends them; what hangs is left behind."""
        self.stopping.set()
        for thread in self.threads:
            thread.join(STOP_SECONDS)
        for island in self.islands.values():
            island.link.stop()

    def reading(self) -> Reading:
        """Now."""
        island = self.islands["thin"]
        link = island.link
        assert isinstance(link, CountingLink)  # noqa: S101
        if link.failure is not None:
            raise link.failure
        view = observe(self.transport, self.manifest)
        mine = next(i for i in view.islands if i.name == "thin")
        return Reading(
            time.monotonic(), island.totals.steps, view.rounds, link.by_codec.copy(), link.spread, link.merged, mine
        )


def _first_snapshots(manifest: Manifest) -> list[tuple[Snapshot, bytes]]:
    out = []
    random = np.random.default_rng(0)
    for p, size in enumerate(manifest.sizes):
        payload = pack(random.standard_normal(size).astype(np.float32), "float32", 1)
        out.append((Snapshot(0, p, 0, 0, "float32", len(payload), digest(payload), merged=""), payload))
    return out


def link(say: Say, *, quick: bool = False) -> dict[str, Any]:
    """A row for each rate, in the order of the run; `steps_to_unthrottled` near 1 says that nobody waits."""
    share = 0.5 if quick else 1.0
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(start_server(folder / "redis"))
        proxy = held.enter_context(Proxy("127.0.0.1", server.port))
        stand = Stand(server.url, proxy)
        stand.start()
        held.callback(stand.stop)
        held.callback(proxy.set_rates, math.inf, math.inf)  # first: the farewells are to get through
        rows: list[dict[str, Any]] = []
        for megabits in PHASES:
            proxy.set_rates(megabits, megabits)
            time.sleep(SETTLE_SECONDS * share)
            before, carried = stand.reading(), (proxy.bytes_up, proxy.bytes_down)
            time.sleep(MEASURE_SECONDS * share)
            after = stand.reading()
            row = _row(megabits, before, after)
            seconds = after.at - before.at
            row["up_mbit"] = round((proxy.bytes_up - carried[0]) * 8e-6 / seconds, 2)
            row["down_mbit"] = round((proxy.bytes_down - carried[1]) * 8e-6 / seconds, 2)
            row["steps_to_unthrottled"] = row.pop("steps_a_second") / (rows[0]["pace"] if rows else row["pace"])
            rows.append(row)
            say(f"{row['mbit_a_second']} Mbit/s: {row['sent']} status: {after.view.link}")
        for row in rows:
            del row["pace"]
    return {"parameters": stand.manifest.parameters, "step_seconds": STEP_SECONDS, "rows": rows}


def _row(megabits: float, before: Reading, after: Reading) -> dict[str, Any]:
    seconds, sent = after.at - before.at, after.sent - before.sent
    count = sum(sent.values())
    pace = (after.steps - before.steps) / seconds
    return {
        "mbit_a_second": "unthrottled" if math.isinf(megabits) else f"{megabits:g}",
        "sent": ", ".join(f"{number} {name}" for name, number in sorted(sent.items())) or "nothing",
        "merged": after.merged - before.merged,
        "refused": after.view.refused - before.view.refused,
        "interval": round((after.spread - before.spread) / count / CONFIG.sync.interval, 2) if count else math.nan,
        "rounds": after.rounds - before.rounds,
        "lag": round(after.view.staleness, 1),
        "steps_a_second": pace,
        "pace": pace,
        "status": after.view.link,
    }
