"""A replica takes over without the newest writes, and two mergers never both write one history.

The storms of the simulation check that a failover loses nothing that islands still have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from archipelago.broker.errors import FencedError, UnreachableError
from archipelago.broker.redis.transport import RedisTransport, connect
from tests import samples
from tests.clusters import Cluster
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Cluster]:
    """A cluster of three primaries with a replica each."""
    made = Cluster(tmp_path_factory.mktemp("copied"), until, replicas=1)
    yield made
    made.end()


def fail_over(cluster: Cluster, run: str, meanwhile: Callable[[], object], until: Until) -> None:
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
    samples.begin(both[0])
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
    fail_over(copied, "one-epoch", lambda: first.merger.acquire("first", 100.0), until)
    assert after_outage(until, lambda: second.merger.acquire("second", 100.0)) == 1
    with pytest.raises(FencedError):
        after_outage(until, lambda: first.merger.commit(1, samples.commit([])))
    with pytest.raises(FencedError):
        first.merger.renew(1, "first", 100.0)
    second.merger.commit(1, samples.commit([]))
    assert [entry.epoch for entry in second.reader.tape(10)] == [1]
    for transport in (first, second):
        transport.close()
