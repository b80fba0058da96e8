"""`--read-from`: payloads of snapshots come from a real replica where it has them, and else from the primary."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis

from archipelago.broker.errors import BadUrlError
from archipelago.broker.redis import replica
from archipelago.broker.redis.client import client_at
from archipelago.broker.redis.replica import Replica
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests import samples
from tests.conftest import Until
from tests.failing import failing

pytestmark = pytest.mark.usefixtures("small_chunks")

PAYLOAD = bytes(range(256)) * 20
#: As many bytes as PAYLOAD.
OTHER = PAYLOAD[::-1]


@pytest.fixture(scope="module")
def second(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A replica of the server."""
    with start_server(tmp_path_factory.mktemp("replica") / "redis") as running:
        yield running


class Pair:
    """A run, its merger, an island that reads from the replica, and plain clients of both servers."""

    def __init__(self, primary: Server, second: Server, until: Until) -> None:
        self.run = f"run-{uuid.uuid4().hex[:8]}"
        self._until, self._address = until, urlsplit(primary.url)
        self.merger = connect(primary.url, self.run)
        manifest = samples.manifest(self.run, width=64)
        self.merger.create(manifest, samples.first_snapshots(manifest))
        self.raw: Any = redis.Redis.from_url(primary.url)
        self.raw.config_set("repl-diskless-sync-delay", 0)
        self.raw_second: Any = redis.Redis.from_url(second.url)
        self.follow()
        # The first replica begins a new history of the server, so the lease is taken afterwards.
        self.epoch = self.merger.merger.acquire("merger", 600.0) or 0
        self.island = connect(primary.url, self.run)
        self.island.read_from(second.url)

    @property
    def replica(self) -> Replica:
        assert self.island.chunks.replica is not None
        return self.island.chunks.replica

    def follow(self) -> None:
        """Let the second server replicate the first."""
        self.raw_second.config_set("masterauth", self._address.password or "")
        self.raw_second.replicaof(self._address.hostname, self._address.port)
        self._until(lambda: self.raw_second.info("replication")["master_link_status"] == "up", "the replica to follow")

    def part(self) -> None:
        """End the replication. The second server keeps what it has, and can be written to."""
        self.raw_second.replicaof("NO", "ONE")

    def commit(self, number: int = 1) -> None:
        """Commit a round of fragment 0, with a difference."""
        self.merger.merger.commit(self.epoch, samples.commit([], PAYLOAD, number, difference=PAYLOAD))

    def caught_up(self) -> None:
        """Wait until the replica has everything that the primary has."""
        wanted = self.raw.info("replication")["master_repl_offset"]
        self._until(lambda: self.raw_second.info("replication")["slave_repl_offset"] >= wanted, "the replica")

    def close(self) -> None:
        self.merger.close()
        self.island.close()
        self.raw.close()
        self.raw_second.close()


@pytest.fixture
def pair(server: Server, second: Server, until: Until) -> Iterator[Pair]:
    made = Pair(server, second, until)
    yield made
    made.close()


def ranges_read(client: Any) -> int:
    """Return how many chunks a server has sent."""
    found = client.info("commandstats")
    return sum(int(found.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("getrange", "get"))


def passed_by(caplog: pytest.LogCaptureFixture) -> int:
    return sum(getattr(record, "code", "") == "replica.passed-by" for record in caplog.records)


def test_payloads_come_from_the_replica_and_the_rest_from_the_primary(pair: Pair) -> None:
    pair.commit()
    pair.caught_up()
    before = ranges_read(pair.raw)
    assert pair.island.reader.fragment(0)[1] == PAYLOAD
    assert pair.island.reader.difference(0, 1) == PAYLOAD
    assert pair.replica.bytes == 2 * len(PAYLOAD)
    assert ranges_read(pair.raw) == before, "the primary sent a chunk"
    assert pair.island.island.lease_shard(["0"], "a/x") is not None, "a replica can be written to by no one"
    entry = pair.island.island.publish(samples.contribution(PAYLOAD), PAYLOAD)
    assert pair.island.island.holds(entry)


def test_a_replica_that_lags_is_passed_by_with_one_line(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.caught_up()
    pair.part()
    pair.commit()
    for _ in range(3):
        assert pair.island.reader.fragment(0)[1] == PAYLOAD
        assert pair.island.reader.difference(0, 1) == PAYLOAD
    assert (passed_by(caplog), pair.replica.bytes) == (1, 0)
    pair.follow()
    pair.caught_up()
    assert pair.island.reader.fragment(0)[1] == PAYLOAD
    assert pair.replica.bytes == len(PAYLOAD), "a replica that has caught up is read again"


def test_a_wrong_payload_of_a_replica_is_never_returned(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.commit()
    pair.caught_up()
    pair.part()
    chunks = list(pair.raw_second.scan_iter(match=f"*{pair.run}*:m:f0.1.*"))
    sizes = {key: pair.raw_second.strlen(key) for key in chunks}
    for damage in ("wrong", "cut", "of another type"):
        for key in chunks:
            pair.raw_second.delete(key)
            if damage == "of another type":
                pair.raw_second.rpush(key, "x")
            else:
                pair.raw_second.set(key, OTHER[: sizes[key] if damage == "wrong" else sizes[key] - 1])
        arrived: list[bytes] = []
        assert pair.island.reader.fragment(0, lambda payload: arrived.append(bytes(payload)))[1] == PAYLOAD  # noqa: B023
        lengths = [len(payload) for payload in arrived]
        begins = [i for i in range(1, len(lengths)) if lengths[i] <= lengths[i - 1]]  # the reading from the primary
        assert len(begins) <= 1, f"{damage}: what is decoded begins anew once"
        assert arrived[-1] == PAYLOAD
        assert all(PAYLOAD.startswith(payload) for payload in arrived[(begins or [0])[0] :])
    assert (passed_by(caplog), pair.replica.bytes) == (2, 0), "another digest, and a payload that is not there"


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
    pair: Pair, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pair.commit()
    now = [0.0]
    with start_server(tmp_path / "away") as other:
        client = Counting(client_at(other.url))
    pair.island.chunks.replica = Replica(cast(Any, client), "away", lambda: now[0])
    asked = []
    for now[0] in (0.0, 1.0, replica.PAUSE_SECONDS + 1.0):
        before = client.asked
        assert pair.island.reader.fragment(0)[1] == PAYLOAD
        asked += [now[0]] * (client.asked > before)
    assert asked == [0.0, replica.PAUSE_SECONDS + 1.0]
    assert passed_by(caplog) == 1


def test_an_address_that_cannot_be_read_is_refused(server: Server) -> None:
    made: RedisTransport = connect(server.url, "any")
    with failing(BadUrlError):
        made.read_from("http://hub:1")
    made.close()
