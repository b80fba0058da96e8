"""Redis is killed and starts again; or a replica takes over without the newest writes; or Sentinels decide.

What islands sent is merged once, and two mergers never both write one history.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from archipelago.broker.errors import FencedError, UnreachableError
from archipelago.broker.redis import chunks, merger
from archipelago.broker.redis.transport import RedisTransport, connect
from tests import samples
from tests.chaos.threaded_run import ThreadedRun, void
from tests.clusters import Cluster
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Cluster]:
    """A cluster of three primaries with a replica each."""
    made = Cluster(tmp_path_factory.mktemp("copied"), until, replicas=1)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that payloads have several and restarts still load little."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)


class Moments:
    """Calls a function once in the middle of a merger's next commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._armed: Callable[[], None] | None = None
        self.done = threading.Event()
        monkeypatch.setattr(merger, "failpoint", self._passed)

    def arm(self, act: Callable[[], None]) -> None:
        self.done.clear()
        self._armed = act

    def _passed(self, name: str) -> None:
        if name == "commit.placed" and self._armed is not None:
            act, self._armed = self._armed, None
            act()
            self.done.set()


@pytest.fixture
def seed() -> int:
    """Return a new seed each time. Failures print it."""
    return random.SystemRandom().randrange(1 << 32)


def at_a_moment_within(seconds: float, chance: random.Random, until: Until) -> None:
    moment = time.monotonic() + seconds * chance.random()
    until(lambda: time.monotonic() >= moment, "the moment of the kill")


#: Of these kills some come in the middle of a commit, some lose writes, and after some the others elect the replica.
KILLS = 5


def test_no_contribution_is_lost_when_replicas_take_over_without_the_newest_writes(
    copied: Cluster, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, moments = random.Random(seed), Moments(monkeypatch)
    run = ThreadedRun(copied.url, "killed", tmp_path, until)
    for kill in range(KILLS):
        what = f"before kill {kill} (seed {seed})"
        run.goes_on(what)
        old, new = copied.pair("killed")
        with ExitStack() as stack:
            if kill % 3:
                stack.enter_context(new.cut_off())
                run.goes_on(f"that will be lost, {what}")
            if kill % 2:
                moments.arm(old.kill)
                until(moments.done.is_set, f"a commit {what}")
            else:
                at_a_moment_within(0.1, chance, until)
                old.kill()
            if kill % 5:
                copied.promote(new)
            else:
                until(lambda new=new: new.role() == "master", f"the others to elect {what}")
        old.start()
        until(old.is_synced, f"the killed one to follow {what}")
    run.end(f"after the last kill (seed {seed})")
    assert len(run.acknowledged) > 4 * KILLS


def fail_over(cluster: Cluster, run: str, meanwhile: Callable[[], None], until: Until) -> None:
    """Let the replica of a run's primary take over without the writes of `meanwhile`."""
    old, new = cluster.pair(run)
    with new.cut_off():
        meanwhile()
        old.kill()
        cluster.promote(new)
    old.start()
    until(old.is_synced, "the killed one to follow")


def begun(cluster: Cluster, run: str) -> list[RedisTransport]:
    """Return the connections of two mergers to a new run."""
    both = [connect(cluster.url, run) for _ in range(2)]
    manifest = samples.manifest(run)
    both[0].create(manifest, samples.first_snapshots(manifest))
    assert cluster.owner(run).client.wait(1, 50_000), "its replica has the run"
    return both


def after_outage(until: Until, call: Callable[[], object]) -> object:
    """Return what the call returns after an outage, as a worker would repeat it."""
    answers: list[object] = []

    def answered() -> bool:
        try:
            answers.append(call())
        except UnreachableError:
            return False
        return True

    until(answered, "the end of the outage")
    return answers[0]


def test_two_mergers_with_one_epoch_never_both_write(copied: Cluster, until: Until) -> None:
    """The failover forgot that the first one took the lease, so the second one is given the same number."""
    first, second = begun(copied, "one-epoch")
    fail_over(copied, "one-epoch", lambda: void(first.merger.acquire("first", 100.0)), until)
    assert after_outage(until, lambda: second.merger.acquire("second", 100.0)) == 1
    with pytest.raises(FencedError):
        after_outage(until, lambda: first.merger.commit(1, samples.commit([])))
    with pytest.raises(FencedError):
        first.merger.renew(1, "first", 100.0)
    second.merger.commit(1, samples.commit([]))
    assert [entry.epoch for entry in second.reader.tape(10)] == [1]
    for transport in (first, second):
        transport.close()
