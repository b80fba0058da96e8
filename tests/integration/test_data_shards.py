"""Data shards move to living islands: in runs with kills, each token is merged once in each completed pass."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Contribution
from archipelago.broker.ranges import ReadPosition, parse_positions
from archipelago.broker.transport import Transport
from archipelago.islands.data.ranges import windows
from archipelago.ops.experiments.virtual_time import VirtualClock, VirtualRun
from archipelago.ops.watch.reading import observe
from tests.integration.virtual import ENDLESS, TEXT, work
from tests.intercept import Intercepted

CONFIG = replace(ENDLESS, inner=replace(ENDLESS.inner, steps=100_000))
SHARDS, LENGTH = CONFIG.data.shards, CONFIG.data.sequence_length
#: So few bytes that a short run makes several passes.
BYTES = 4_000


class Watched(Intercepted):
    """A connection that records leases and published contributions."""

    def __init__(
        self, inner: Transport, leases: list[tuple[str, ReadPosition]], published: dict[str, Contribution]
    ) -> None:
        super().__init__(inner)
        self._leases, self._published = leases, published

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "publish":
            self._published[args[0].identity_text] = args[0]
        answer = method(*args, **kwargs)
        if name == "lease_range" and answer is not None:
            self._leases.append((args[1], answer))
        return answer


def merged_until(run: VirtualRun, published: dict[str, Contribution]) -> dict[tuple[str, str, int], int]:
    """Return from the tape how many sequences of each (incarnation, shard, pass) are merged."""
    out: dict[tuple[str, str, int], int] = defaultdict(int)
    for entry in run.transport.reader.tape(1 << 20):
        for member in entry.members:
            for place in parse_positions(published[member.identity_text].data):
                at = pass_size(run, place.range, place.pass_number) if place.ended else place.position
                key = (f"{member.island}/{member.incarnation}", place.range, place.pass_number)
                out[key] = max(out[key], at)
    return out


def pass_size(run: VirtualRun, shard: str, pass_number: int) -> int:
    return len(windows(BYTES, SHARDS, LENGTH, run.manifest.config.seed, shard, pass_number))


def uses_by_pass(
    run: VirtualRun, leases: list[tuple[str, ReadPosition]], published: dict[str, Contribution]
) -> dict[tuple[str, int], np.ndarray[Any, Any]]:
    """Return how often each sequence of each (shard, pass) was merged."""
    until = merged_until(run, published)
    uses: dict[tuple[str, int], np.ndarray[Any, Any]] = {}
    for who, place in leases:
        key = (place.range, place.pass_number)
        counts = uses.setdefault(key, np.zeros(pass_size(run, *key), int))
        counts[place.position : until[who, place.range, place.pass_number]] += 1
    return uses


def test_every_token_is_merged_once_in_each_completed_pass() -> None:
    """Islands are killed and return, with old and new names, at random moments."""
    chance = random.Random(3)
    clock = VirtualClock()
    broker = MemoryBroker(clock)
    leases: list[tuple[str, ReadPosition]] = []
    published: dict[str, Contribution] = {}
    run = VirtualRun(
        work(CONFIG, TEXT[:BYTES]), [1.0, 1.1, 1.4], clock=clock, run="data",
        connect=lambda: Watched(broker.connect("data"), leases, published),
    )  # fmt: skip
    born, kills = 3, 0
    while min((cursor[0] for cursor in run.transport.reader.cursors().values()), default=0) < 3 or kills < 4:
        until = clock.now + chance.uniform(3.0, 25.0)
        run.advance_until(lambda until=until: clock.now >= until)  # type: ignore[misc]
        if chance.random() < 0.5 and len(run.islands) > 1:
            run.remove_island(chance.choice(sorted(run.islands)), farewell=chance.random() < 0.3)
            kills += 1
        elif len(run.islands) < 4:
            name = f"island-{chance.choice([n for n in range(born + 1) if f'island-{n}' not in run.islands])}"
            born += name == f"island-{born}"
            run.add_island(name, chance.uniform(0.8, 2.0), chance.choice(["fresh", "peer"]))
        assert clock.now < 10_000, "the passes do not end"
    uses = uses_by_pass(run, leases, published)
    cursors = run.transport.reader.cursors()
    for (shard, pass_number), counts in uses.items():
        done = cursors.get(shard, (0, 0))[0] > pass_number
        assert counts.max() <= 1, f"shard {shard}, pass {pass_number}: merged twice"
        assert not done or counts.min() == 1, f"shard {shard}, pass {pass_number}: not merged"
    # No pass begins before all shards have begun the previous one, so completed passes differ by one. They differ by
    # two only for a shard that a slow or silent island still holds, because no island waits for it.
    totals = [cursors.get(str(shard), (0, 0))[0] for shard in range(SHARDS)]
    assert max(totals) - min(totals) <= 2, f"passes {totals}"
    assert sum(total < max(totals) - 1 for total in totals) <= len(run.islands) + 1, f"passes {totals}"
    view = observe(run.transport, run.manifest)
    assert view.tokens_trained == sum(island.tokens for island in view.islands)
    assert view.tokens_merged > 0
    assert view.tokens_lost > 0, "islands were killed with work that they had not sent"


def test_a_new_island_gets_shards_at_once() -> None:
    run = VirtualRun(work(CONFIG, TEXT[:BYTES]), [1.0, 1.0])
    run.advance_until(lambda: run.clock.now >= 20.0)
    newcomer = run.add_island("newcomer", 1.0)
    run.advance_until(lambda: newcomer.totals.steps >= 4)
    mine = newcomer.batches.held()
    others = [shard for name, island in run.islands.items() if name != "newcomer" for shard in island.batches.held()]
    assert mine
    assert not set(mine) & set(others)
