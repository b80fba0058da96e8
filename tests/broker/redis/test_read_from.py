"""`--read-from`: payloads of snapshots come from a replica where it has them, and else from the primary.

Here the replica is a server to which the test copies what it should have. A replica of a cluster is read in
`tests/integration/test_tls_clusters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from archipelago.broker.errors import BadUrlError
from archipelago.broker.redis import bulk
from archipelago.broker.redis.bulk import ReadReplica
from archipelago.broker.redis.client import client_at
from archipelago.broker.redis.transport import RedisTransport
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from tests import samples
from tests.broker.redis.stored_keys import Connect, chunk_keys
from tests.failing import failing

pytestmark = pytest.mark.usefixtures("small_chunks")

PAYLOAD = bytes(range(256)) * 20
#: As many bytes as PAYLOAD.
OTHER = PAYLOAD[::-1]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with start_server(tmp_path_factory.mktemp("replica") / "redis", append_only=False) as running:
        yield running


@pytest.fixture
def copy(second: RedisServer) -> Iterator[Any]:
    """A client of the replica, which is empty."""
    with redis.Redis.from_url(second.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def island(transport: RedisTransport, epoch: int, second: RedisServer, connections: Connect) -> RedisTransport:
    """An island of a run with one round, whose payloads it reads from the replica."""
    transport.merger.commit(epoch, samples.commit([], PAYLOAD, difference=PAYLOAD))
    made = connections()
    made.read_from(second.url)
    return made


def replica_of(island: RedisTransport) -> ReadReplica:
    assert island.chunks.replica is not None
    return island.chunks.replica


def catch_up(copy: Any, raw: Any, run: str) -> None:
    """Let the replica have everything that the primary has."""
    for key in raw.scan_iter(match=f"*{run}*"):
        copy.restore(key, 0, raw.dump(key), replace=True)


def ranges_read(client: Any) -> int:
    """Return how many chunks a server has sent."""
    found = client.info("commandstats")
    return sum(int(found.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("getrange", "get"))


def passed_by(caplog: pytest.LogCaptureFixture) -> int:
    return sum(getattr(record, "code", "") == "replica.passed-by" for record in caplog.records)


def test_payloads_come_from_the_replica_and_the_rest_from_the_primary(
    island: RedisTransport, raw: Any, copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert island.reader.fragment(0)[1] == PAYLOAD
        assert island.reader.difference(0, 1) == PAYLOAD
    assert (passed_by(caplog), replica_of(island).bytes) == (1, 0), "it lags, which one line says"
    catch_up(copy, raw, island.run)
    before, keys = ranges_read(raw), copy.dbsize()
    assert island.reader.fragment(0)[1] == PAYLOAD
    assert island.reader.difference(0, 1) == PAYLOAD
    assert replica_of(island).bytes == 2 * len(PAYLOAD)
    assert ranges_read(raw) == before, "the primary sent a chunk"
    assert island.island.lease_range(["0"], "a/x") is not None
    assert island.island.holds(island.island.publish(samples.contribution(PAYLOAD), PAYLOAD))
    assert copy.dbsize() == keys, "something was written to the replica"


def test_a_wrong_payload_of_a_replica_is_never_returned(
    island: RedisTransport, raw: Any, copy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    catch_up(copy, raw, island.run)
    chunks = {key: copy.strlen(key) for key in chunk_keys(copy, island.run) if ":m:f0.1." in key}
    for damage in ("wrong", "cut", "of another type"):
        for key, size in chunks.items():
            copy.delete(key)
            if damage == "of another type":
                copy.rpush(key, "x")
            else:
                copy.set(key, OTHER[: size if damage == "wrong" else size - 1])
        arrived: list[bytes] = []
        assert island.reader.fragment(0, lambda payload: arrived.append(bytes(payload)))[1] == PAYLOAD  # noqa: B023
        lengths = [len(payload) for payload in arrived]
        begins = [i for i in range(1, len(lengths)) if lengths[i] <= lengths[i - 1]]  # the reading from the primary
        assert len(begins) <= 1, f"{damage}: what is decoded begins anew once"
        assert arrived[-1] == PAYLOAD
        assert all(PAYLOAD.startswith(payload) for payload in arrived[(begins or [0])[0] :])
    assert (passed_by(caplog), replica_of(island).bytes) == (2, 0), "another digest, and a payload that is not there"


class Counting:
    """A client that counts how often a connection is taken."""

    def __init__(self, client: Any) -> None:
        self._client, self.asked = client, 0
        self.close = client.close

    @property
    def connection_pool(self) -> Any:
        self.asked += 1
        return self._client.connection_pool


def test_a_replica_that_is_away_is_not_asked_for_a_while(
    island: RedisTransport, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    now = [0.0]
    with start_server(tmp_path / "away") as other:
        client = Counting(client_at(other.url))
    replica_of(island).close()
    island.chunks.replica = ReadReplica(cast(Any, client), "away", lambda: now[0])
    asked = []
    for now[0] in (0.0, 1.0, bulk.PAUSE_SECONDS + 1.0):
        before = client.asked
        assert island.reader.fragment(0)[1] == PAYLOAD
        asked += [now[0]] * (client.asked > before)
    assert asked == [0.0, bulk.PAUSE_SECONDS + 1.0]
    assert passed_by(caplog) == 1


def test_an_address_that_cannot_be_read_is_refused(connections: Connect) -> None:
    with closing(connections()) as made, failing(BadUrlError):
        made.read_from("http://hub:1")
