"""Two mergers at once: one is stopped at a random moment, another takes over, and the first one continues.

The first one still believes that it serves. Redis refuses its writes, and it leaves.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.messages import Call, Resume, Snapshot
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.transport import START
from archipelago.ops.launch.embedded_redis import Server
from tests.chaos.island_threads import IslandThreads, check, create
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]

TAKEOVERS = 8
STANDBYS = 2
RUN = "two-mergers"


class Mergers:
    """Real mergers of one run. One serves, and the others stand by."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        number = len(self.all)
        argv = [sys.executable, "-P", "-m", "archipelago.merger", self.url, "--run", RUN, "--lease-seconds", "0.5"]
        argv += ["--folder", str(self.folder / f"{number}"), "--checkpoint-every", "0"]
        with (self.folder / f"{number}.log").open("wb") as log:
            self.all.append(subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}))

    def fill_up(self) -> None:
        """Start mergers until one can serve and the others stand by. On a busy machine one may lose its lease."""
        living = sum(process.poll() is None for process in self.all)
        for _ in range(living, 1 + STANDBYS):
            self.start()

    def has_closed_a_round(self, transport: RedisTransport) -> bool:
        """Return whether the merger that serves has closed a round in its epoch."""
        self.fill_up()
        last = transport.reader.tape(1)
        return bool(last) and last[-1].epoch == self.serving[0]

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"{self.all.index(process)}.log").read_text()

    def epoch(self, process: subprocess.Popen[bytes]) -> int:
        """Return the epoch in which it serves; 0 while it stands by."""
        found = re.findall(r"serving from round \d+, epoch (\d+)", self.said(process))
        return int(found[-1]) if found else 0

    def was_overtaken(self, process: subprocess.Popen[bytes], epoch: int) -> bool:
        """Return whether a merger that served in that epoch serves in it no more.

        It ends, or takes the lease again in a newer epoch if its successor has lost the lease on a busy machine.
        """
        return process.poll() is not None or self.epoch(process) > epoch

    @property
    def serving(self) -> tuple[int, subprocess.Popen[bytes] | None]:
        """The newest epoch and its merger."""
        living = [process for process in self.all if process.poll() is None]
        best = max(living, key=self.epoch, default=None)
        return (self.epoch(best), best) if best and self.epoch(best) else (0, None)

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def mergers(server: Server, tmp_path: Path) -> Iterator[Mergers]:
    started = Mergers(server.url, tmp_path)
    yield started
    started.end()


@pytest.fixture
def transport(server: Server) -> Iterator[RedisTransport]:
    create(server.url, RUN, width=3_000)
    made = connect(server.url, RUN)
    yield made
    made.close()


def test_a_merger_that_was_overtaken_leaves(
    server: Server, transport: RedisTransport, mergers: Mergers, until: Until
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    moments = random.Random(seed)
    islands = IslandThreads(server.url, transport.reader.manifest(), ["a", "b"], pause=0.02)
    left = 0
    for number in range(TAKEOVERS):
        what = f"takeover {number}, seed {seed}"
        until(lambda: mergers.has_closed_a_round(transport), f"a round: {what}")
        epoch, first = mergers.serving
        assert first is not None
        moment = time.monotonic() + 0.1 * moments.random()
        until(lambda moment=moment: time.monotonic() >= moment, "the moment")
        first.send_signal(signal.SIGSTOP)
        mergers.start()  # The next standby starts while the present one takes over.
        until(lambda epoch=epoch: mergers.serving[0] > epoch, f"another merger to serve: {what}")
        first.send_signal(signal.SIGCONT)
        until(lambda first=first, epoch=epoch: mergers.was_overtaken(first, epoch), f"the first one to know: {what}")
        if first.poll() is not None:
            assert first.returncode == 0, mergers.said(first)
            left += 1
    assert left > 0, f"no merger left (seed {seed})"
    closed = transport.reader.tape(1)[-1].round
    until(lambda: transport.reader.tape(1)[-1].round > closed + 10, f"rounds afterwards (seed {seed})")
    islands.leave()
    until(lambda: transport.reader.backlog() == 0, f"everything to be merged (seed {seed})")
    check(transport, islands)
    check_announcements(transport)


def check_announcements(transport: RedisTransport) -> None:
    """Assert that each round is announced once, that epochs grow, and that calls are for open rounds."""
    closed = epoch = 0
    for _, event in transport.reader.events(START, 0.0, 1 << 20):
        match event:
            case Snapshot(round=number):
                assert number == closed + 1
                closed = number
            case Resume(round=number, epoch=new):
                assert (number, new) == (closed, max(new, epoch + 1))
                epoch = new
            case Call(round=number):
                assert closed < number <= closed + 2
    assert epoch > TAKEOVERS
    epochs = {entry.epoch for entry in transport.reader.tape(1 << 20)}
    assert len(epochs) > TAKEOVERS, "a merger never closed a round"
