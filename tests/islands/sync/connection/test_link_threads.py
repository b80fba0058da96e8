"""A link with threads: no hanging call or outage holds the training thread up, and pumps retry what can be retried."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from archipelago.broker.errors import BrokerError, UnreachableError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.shards.reader import ShardedReader
from archipelago.islands.computation import Computation
from archipelago.islands.data.batches import Batches
from archipelago.islands.sync.connection.link import REFUSALS_MAX, REFUSED, Link, Pump, Pumps
from archipelago.islands.sync.leaving import leave, leave_cleanly
from archipelago.islands.worker import Island
from archipelago.merger.service import Merger
from tests import samples
from tests.conftest import PATIENCE_SECONDS, Until
from tests.harness import tiny
from tests.islands.sync.connection.link_run import FaultyTransport, Harness, draft, ranges_of
from tests.sharded import create_sharded


def at_once(work: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Return the result of `work`, and fail if it hangs. Only a hang takes this long."""
    out: list[Any] = []

    def keep() -> None:
        try:
            out.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            out.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"the call still hangs after {seconds:.0f} s"
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


def hang(harness: Harness, link: Link, until: Until) -> None:
    """Start the pumps, and wait until each of them hangs."""
    harness.faulty.unblocked.clear()
    link.send(draft(1))
    link.beat(samples.heartbeat())
    link.pumps.start()
    until(lambda: harness.faulty.hanging >= 3, "all pumps to hang")


def test_an_unexpected_error_is_kept_as_the_failure_and_ends_a_drain(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(link.drain(3600.0)), daemon=True)
    thread.start()
    harness.faulty.outage = ZeroDivisionError("a bug")
    harness.faulty.unblocked.set()
    until(lambda: drained, "the drain to give up")
    assert drained == [False]
    assert isinstance(link.pumps.failure, ZeroDivisionError)
    assert at_once(lambda: link.drain(3600.0)) is False


def test_stopping_ends_in_time_although_every_pump_hangs(harness: Harness, until: Until) -> None:
    link = harness.link()
    hang(harness, link, until)
    began = time.monotonic()
    at_once(lambda: link.pumps.stop(0.1))
    hanging = [thread for thread in link.pumps.threads if thread.is_alive()]
    assert len(hanging) >= 3  # the hanging threads remain as daemons
    assert time.monotonic() - began >= 0.1 * len(hanging) / len(link.pumps.threads)
    assert all(thread.daemon for thread in link.pumps.threads)


# -- a run of two shards, of which the second one can hang ---------------------------------------------------------


class Sharded:
    """An island that has joined a run of two shards."""

    def __init__(self) -> None:
        run = create_sharded(MemoryBroker().connect("demo"))
        self.home, self.further = run.shards[0], FaultyTransport(run.shards[1])
        run.shards = [self.home, self.further]
        manifest = run.reader.manifest()
        run.reader = ShardedReader([shard.reader for shard in run.shards], manifest)
        self.link = Link(run, manifest, "a/x", ranges_of(manifest))
        self.link.join()
        self.link.pumps.start()

    def beat(self, steps: int, state: str = "training") -> None:
        self.link.beat(samples.heartbeat(island="a", steps=steps, state=state))

    def told(self) -> list[int]:
        """Return the steps of the island by the newest heartbeats that the shards have."""
        found = [shard.reader.presences() for shard in (self.home, self.further.inner)]
        return [presences[0].heartbeat.steps if presences else 0 for presences in found]


@pytest.fixture
def sharded(harness: Harness) -> Iterator[Sharded]:
    made = Sharded()
    yield made
    made.further.unblocked.set()
    made.link.pumps.stop(PATIENCE_SECONDS)


def test_a_shard_that_hangs_keeps_no_heartbeat_from_the_others(sharded: Sharded, until: Until) -> None:
    sharded.home.merger.acquire("merger", 100.0)
    sharded.beat(1)
    until(lambda: sharded.told() == [1, 1], "a heartbeat in both shards")
    sharded.further.unblocked.clear()
    sharded.beat(2)
    until(lambda: sharded.told()[0] == 2, "a heartbeat in shard 0")
    until(lambda: sharded.further.hanging >= 2, "a heartbeat and a look at events that hang")
    sharded.beat(3)
    until(lambda: sharded.told()[0] == 3, "another heartbeat in shard 0")
    assert sharded.link.heartbeats.serving.is_served
    assert sharded.told()[1] < 3
    sharded.further.unblocked.set()
    until(lambda: sharded.told() == [3, 3], "a heartbeat in the shard that answers again")


def test_an_island_leaves_when_all_shards_know_it(sharded: Sharded, until: Until) -> None:
    sharded.beat(1)
    assert sharded.link.drain(PATIENCE_SECONDS)
    sharded.further.unblocked.clear()
    sharded.beat(2, state="left")
    until(lambda: sharded.told()[0] == 2, "the farewell in shard 0")
    assert not sharded.link.drain(0.05)
    sharded.further.unblocked.set()
    assert sharded.link.drain(PATIENCE_SECONDS)
    assert sharded.told() == [2, 2]


# -- what pumps retry ----------------------------------------------------------------------------------------------

REFUSAL = BrokerError("it refuses access", code=REFUSED)


def pumps_of(errors: Iterator[Exception | None]) -> Pumps:
    """Return pumps with one pump, whose calls raise these errors."""

    def work() -> None:
        error = next(errors)
        if error is not None:
            raise error

    return Pumps([Pump("events", work)], threading.Condition())


def test_an_island_leaves_when_its_credentials_are_refused_again_and_again() -> None:
    pumps = pumps_of(iter([REFUSAL] * REFUSALS_MAX))
    for _ in range(REFUSALS_MAX):
        assert pumps.failure is None
        pumps.run_once()
    assert pumps.failure is REFUSAL


def test_a_refusal_that_ends_and_an_outage_are_retried() -> None:
    most: list[Exception | None] = [REFUSAL] * (REFUSALS_MAX - 1)
    outage = UnreachableError("it is away")
    pumps = pumps_of(iter([*most, None, *most, outage, *most, *[outage] * 50]))
    for _ in range(3 * len(most) + 52):
        pumps.run_once()
    assert pumps.failure is None
    assert pumps.trouble == outage.what


# -- an island on such a link --------------------------------------------------------------------------------------


@pytest.fixture
def tiny_harness(harness: Harness) -> Iterator[Harness]:
    """Return a harness of a run with a tiny model, whose steps take no time."""
    manifest = tiny.manifest()
    made = Harness(manifest, samples.first_snapshots(manifest, 1.0))
    made.transport.merger.release(made.epoch)
    yield made
    made.end()


def island_on(tiny_harness: Harness) -> Island:
    link = tiny_harness.link()
    arrivals = link.join()
    batches = Batches(tiny.TEXT, tiny.CONFIG, link.lease)
    computation = Computation(tiny_harness.manifest, tiny.STEPS)
    island = Island("a", tiny_harness.manifest, computation, batches, link, arrivals, incarnation="x")
    island.warm_up()
    return island


def steps_of(island: Island, count: int) -> None:
    for _ in range(count):
        island.boundary()
        island.advance()


def test_an_island_never_blocks(tiny_harness: Harness, until: Until) -> None:
    island = island_on(tiny_harness)
    tiny_harness.faulty.unblocked.clear()
    island.link.pumps.start()
    at_once(lambda: steps_of(island, 100))
    tiny_harness.faulty.outage = UnreachableError("connection refused")
    tiny_harness.faulty.unblocked.set()
    until(lambda: island.link.pumps.trouble, "the trouble to be noted")
    at_once(lambda: steps_of(island, 100))
    assert island.totals.steps == 200
    assert island.ledger.global_step == 4  # the schedule waits for a merger, after two strides of two steps
    assert island.link.backlog == tiny.CONFIG.sync.window  # it owes nothing more until a round closes
    assert tiny_harness.transport.reader.counters().published == 0
    # The island has missed everything but still trains. It catches up when the link works again.
    tiny_harness.faulty.outage = None
    merger = Merger(tiny_harness.broker.connect("tiny"), live_poll_seconds=0.0)
    assert merger.acquire()
    merger.load()

    def adopted() -> bool:
        merger.turn(0.0)
        steps_of(island, 1)
        return all(count.version >= 3 for count in island.ledger.counts)

    until(adopted, "three versions of every fragment")
    assert at_once(lambda: leave(island))
    merger.turn(0.0)
    counters = tiny_harness.transport.reader.counters()
    assert counters.published == counters.merged == island.link.uplink.contributions >= 6
    assert (counters.refused, tiny_harness.transport.reader.backlog()) == (0, 0)
    members = [member for entry in tiny_harness.transport.reader.tape(1000) for member in entry.members]
    tokens = sum(m.tokens for m in members if m.sequence < 2)
    assert tokens == (2 + 4) * tiny.CONFIG.tokens_per_step  # the strides of 2 steps before the outage


def test_an_island_whose_name_was_taken_over_leaves(tiny_harness: Harness) -> None:
    island = island_on(tiny_harness)
    steps_of(island, 3)
    tiny_harness.link("a/new")
    island.link.pump()
    assert island.reason == "replaced"
    island.link.pumps.start()
    assert leave_cleanly(island) == "replaced"
    island.link.pumps.stop()
    assert tiny_harness.transport.reader.notes(1)[0].kind == "replaced"
    assert "a" not in {p.heartbeat.island for p in tiny_harness.transport.reader.presences() if not p.is_live}
