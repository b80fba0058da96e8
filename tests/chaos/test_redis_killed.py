"""Redis is killed again and again while contributions come, merge and are checkpointed: none that was acknowledged
is lost, and none counts twice.
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
from archipelago.merger.service import Merger, serve
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.embedded_redis import Server, start_server
from tests.chaos.crew import Crew, check, create
from tests.conftest import Until

pytestmark = pytest.mark.processes

KILLS = 25
WIDTH = 12_000
"""payloads of up to 190 kB in one of the fragments, which is three chunks here"""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a payload, and not too much to write for so many restarts."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)


class MergerThread:
    """A merger, and another one whenever it leaves."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.url, self.run, self.folder = url, run, folder
        self.fault: BaseException | None = None
        self.begun = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._serve_once()
                except BrokerError:
                    self._stopped.wait(0.05)  # the server is away just now
        except BaseException as fault:  # noqa: BLE001 - the test raises it
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
    """Nothing."""


@pytest.fixture
def seed() -> int:
    """Another one each time; pytest prints it when the test fails."""
    return random.SystemRandom().randrange(1 << 32)


class Sunk:
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
def sunk(tmp_path: Path) -> Iterator[Sunk]:
    running = Sunk(tmp_path / "redis")
    yield running
    running.server.stop()


def closed(transport: RedisTransport) -> int:
    """The last closed round; -1 while nobody answers."""
    try:
        tape = transport.reader.tape(1)
    except BrokerError:
        return -1
    return tape[-1].round if tape else 0


def test_no_acknowledged_contribution_is_lost(
    sunk: Sunk, tmp_path: Path, until: Until, seed: int, small_chunks: None
) -> None:
    print(f"seed {seed}")  # noqa: T201 - of the moments
    moments = random.Random(seed)
    manifest = create(sunk.server.url, "sunk", WIDTH)
    transport = connect(sunk.server.url, "sunk")
    merger = MergerThread(sunk.server.url, "sunk", tmp_path / "merger")
    crew = Crew(sunk.server.url, manifest, ["a", "b", "c"], pause=0.01)
    for kill in range(KILLS):
        before, taken = max(0, closed(transport)), len(crew.acknowledged)
        until(lambda before=before: closed(transport) > before, f"a round after kill {kill} (seed {seed})")
        until(lambda taken=taken: len(crew.acknowledged) > taken, f"a contribution after kill {kill} (seed {seed})")
        moment = time.monotonic() + 0.4 * moments.random()
        until(lambda moment=moment: time.monotonic() >= moment, "the moment")
        sunk.kill()
    before = max(0, closed(transport))
    until(lambda: closed(transport) > before + 20, f"rounds after the last kill (seed {seed})")
    crew.leave()
    until(lambda: transport.reader.backlog() == 0, f"everything to be merged (seed {seed})")
    merger.stop()
    assert crew.steps > 100
    assert len(crew.acknowledged) > 4 * KILLS
    check(transport, crew)
    assert MergerFolder(tmp_path / "merger").store.load() is not None
    transport.close()
