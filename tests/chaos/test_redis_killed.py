"""Redis is killed repeatedly while contributions arrive, merge and are checkpointed.

No acknowledged contribution is lost, and none is merged twice.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.errors import BrokerError
from archipelago.broker.redis import chunks
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests.chaos.island_threads import IslandThreads, check, create
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: Payloads of one fragment have up to 190 kB, which is three chunks here.
WIDTH = 12_000
KILLS = 8


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that payloads have several and restarts still load little."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)


class MergerThread:
    """A merger, followed by another one whenever it leaves."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.url, self.run, self.folder = url, run, folder
        self.fault: BaseException | None = None
        self.errors: list[BrokerError] = []  # those that ended a merger
        self.begun = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._serve_once()
                except BrokerError as error:
                    self.errors.append(error)
                    self._stopped.wait(0.05)  # The server is down just now.
        except BaseException as fault:  # noqa: BLE001 - the test raises it again
            self.fault = fault

    def _serve_once(self) -> None:
        transport = connect(self.url, self.run)
        try:
            checkpointer = MergerFolder(self.folder).checkpointer(
                transport, transport.reader.manifest(), every_seconds=0.5
            )
            merger = Merger(transport, linger_seconds=0.2, checkpointer=checkpointer, lease_seconds=1.0)
            self.begun += 1
            serve(merger, self._stopped.is_set, pause=lambda seconds: void(self._stopped.wait(min(seconds, 0.05))))
        finally:
            transport.close()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self.fault:
            raise self.fault


def void(_: object) -> None:
    """Ignore the value."""


@pytest.fixture
def seed() -> int:
    """Return a new seed each time. Failures print it."""
    return random.SystemRandom().randrange(1 << 32)


class KilledServer:
    """A server that is killed and started again on its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server = start_server(folder)

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        url, self.server = self.server.url, start_server(self.folder)
        assert self.server.url == url


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[KilledServer]:
    running = KilledServer(tmp_path / "redis")
    yield running
    running.server.stop()


def closed(transport: RedisTransport) -> int:
    """Return the last closed round; -1 while the server is down."""
    try:
        tape = transport.reader.tape(1)
    except BrokerError:
        return -1
    return tape[-1].round if tape else 0


def test_no_acknowledged_contribution_is_lost(
    killed: KilledServer, tmp_path: Path, until: Until, seed: int, small_chunks: None
) -> None:
    moments = random.Random(seed)
    manifest = create(killed.server.url, "killed", WIDTH)
    transport = connect(killed.server.url, "killed")
    merger = MergerThread(killed.server.url, "killed", tmp_path / "merger")
    islands = IslandThreads(killed.server.url, manifest, ["a", "b", "c"], pause=0.01)
    for kill in range(KILLS):
        before, taken = max(0, closed(transport)), len(islands.acknowledged)
        until(lambda before=before: closed(transport) > before, f"a round after kill {kill} (seed {seed})")
        until(lambda taken=taken: len(islands.acknowledged) > taken, f"a contribution after kill {kill} (seed {seed})")
        moment = time.monotonic() + 0.4 * moments.random()
        until(lambda moment=moment: time.monotonic() >= moment, "the moment of the kill")
        killed.kill()
    before = max(0, closed(transport))
    until(lambda: closed(transport) > before + 20, f"rounds after the last kill (seed {seed})")
    islands.leave()
    until(lambda: transport.reader.backlog() == 0, f"everything to be merged (seed {seed})")
    merger.stop()
    assert islands.steps > 100
    assert len(islands.acknowledged) > 4 * KILLS
    check(transport, islands)
    assert MergerFolder(tmp_path / "merger").store.load() is not None
    transport.close()
