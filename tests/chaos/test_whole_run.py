"""A whole run loses its Redis, its disk, its merger's state or an island, and goes on from what is left."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

import psutil
import pytest
import redis

from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.islands.checkpoint import IslandStore
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.launch.embedded_redis import Server
from tests.chaos.scripted import ROUNDS, Play, outcome
from tests.conftest import Until
from tests.integration.test_processes import SETTINGS, Processes, balanced, rounds_of, view

pytestmark = pytest.mark.processes

UP = ["--islands=2", "--checkpoint-every=3", "--evaluate-every=2", "--no-one-process", "--inner.steps=3000", *SETTINGS]


class Household:
    """A run under `up`, and its folder."""

    def __init__(self, processes: Processes, folder: Path, until: Until) -> None:
        self.processes, self.folder, self.until = processes, folder, until
        self.run = folder.name
        self.checkpoints = CheckpointStore(folder / "merger" / "checkpoints")

    def up(self, *options: str) -> subprocess.Popen[str]:
        return self.processes.start("up", f"--run={self.run}", *UP, *options)

    @property
    def rounds(self) -> int:
        config = self.folder / "redis" / "server.conf"
        return rounds_of(config, self.run) if config.exists() else 0

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def kill(self, launcher: subprocess.Popen[str]) -> None:
        """The power goes: the launcher and all that it started."""
        assert launcher.poll() is None, f"it ended before it was killed: {self.processes.said(launcher)}"
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= 4
        launcher.kill()
        launcher.wait()
        self.until(lambda: not psutil.wait_procs(children, timeout=0)[1], "everything to die")

    def whole_checkpoint(self) -> int:
        """The number of the newest checkpoint of the run, if all islands have theirs of it; else 0."""
        numbers = self.checkpoints.numbers()
        if not numbers:
            return 0
        image = self.checkpoints.load(numbers[-1])
        assert image is not None
        stores = [IslandStore(self.folder / "islands" / f"island-{n}", image.manifest) for n in range(2)]
        return numbers[-1] if all(store.find(numbers[-1]) for store in stores) else 0


def test_it_outlives_its_redis_and_then_its_disk(processes: Processes, tmp_path: Path, until: Until) -> None:
    home = Household(processes, tmp_path / "runs" / "phoenix", until)
    first = home.up()
    until(home.whole_checkpoint, "a checkpoint of everybody", 120)
    home.kill(first)
    number = home.checkpoints.numbers()[-1]
    image = home.checkpoints.load(number)
    assert image is not None
    covered = max(snapshot.round for snapshot, _ in image.snapshots)
    assert covered > 0
    shutil.rmtree(home.folder / "redis")

    refused = home.up()
    assert refused.wait(60) == 2
    assert f"checkpoint {number}: go on from there with --resume" in " ".join(processes.said(refused).split())
    assert "Traceback" not in processes.said(refused)

    second = home.up("--resume")
    until(lambda: home.rounds > covered + 4, "rounds after the checkpoint", 120)
    assert f"goes on from checkpoint {number}" in processes.said(second)
    for name in ("island-0", "island-1"):
        until(lambda name=name: home.log(name).count("joined phoenix") == 2, f"{name} to be back")
        assert "optimiser state: own checkpoint" in home.log(name).rpartition("joined phoenix")[2]
    home.kill(second)
    shutil.rmtree(home.folder / "merger")
    shutil.rmtree(home.folder / "islands")

    found = processes.run("up", f"--run={home.run}", *UP)
    assert found["finished"]
    assert found["steps"] >= 3000
    assert found["rounds"] > covered + 4
    assert found["pending"] == 0
    assert found["contributions"] == found["merged"] + found["refused"]
    assert found["bits_per_byte_last"] < 0.7 * found["bits_per_byte_first"]
    assert home.checkpoints.numbers(), "no checkpoint in the new folder"
    assert "Traceback" not in "".join(path.read_text() for path in (home.folder / "logs").iterdir())


# -- the merger's own state -------------------------------------------------------------------------------------------


@pytest.fixture
def play(server: Server, tmp_path: Path, until: Until) -> Play:
    return Play(server.url, f"play-{uuid.uuid4().hex[:8]}", tmp_path / "play", until)


def played(play: Play, first: int, last: int) -> None:
    for number in range(first, last + 1):
        play.say(number)
        play.await_round(number)


def test_outer_state_that_redis_lost_is_rebuilt_to_the_same_bits(
    play: Play, server: Server, tmp_path: Path, until: Until
) -> None:
    """From the checkpoint, and the rounds since then done again from tape and stream."""
    undisturbed = Play(server.url, "kept", tmp_path / "kept", until)
    try:
        undisturbed.create()
        undisturbed.merger("--checkpoint-every", "10000")
        played(undisturbed, 1, ROUNDS + 1)  # at a stretch: islands live only while they are tended
        play.create()
        merger = play.merger("--checkpoint-every", "0.1")
        played(play, 1, 2)
        play.await_cover()
        merger.kill()
        merger = play.merger("--checkpoint-every", "10000")
        played(play, 3, 4)
        later = ROUNDS + 1
        for lost, rounds in ((everything(play.run), (5, ROUNDS)), ([Keys(play.run).outer(0)], (later, later))):
            merger.kill()
            merger.wait()
            with redis.Redis.from_url(server.url) as client:
                assert client.delete(*lost) == len(lost)
            merger = play.merger("--checkpoint-every", "10000")
            played(play, *rounds)
            assert "rebuilt from checkpoint" in play.said(merger)
            assert "to the same bits" in play.said(merger)
        assert outcome(play.transport) == outcome(undisturbed.transport)
    finally:
        play.end()
        undisturbed.end()


def everything(run: str) -> list[str]:
    """All keys that only the merger reads."""
    keys = Keys(run)
    return [keys.outer(0), keys.outer(1), keys.state]


def test_without_a_checkpoint_momentum_is_fresh_and_the_run_goes_on(play: Play, server: Server) -> None:
    """One fragment's outer state is gone for good; the merger says so."""
    try:
        play.create()
        merger = play.merger("--checkpoint-every", "0")
        played(play, 1, 2)
        merger.kill()
        merger.wait()
        with redis.Redis.from_url(server.url) as client:
            assert client.delete(Keys(play.run).outer(0)) == 1
        merger = play.merger("--checkpoint-every", "0")
        played(play, 3, 4)
        assert "fragments [0] go on from their published parameters" in play.said(merger)
    finally:
        play.end()


# -- one island ------------------------------------------------------------------------------------------------------


def test_an_island_gets_its_moments_from_a_peer_and_alone_from_its_disk(
    processes: Processes, server: Server, tmp_path: Path, until: Until
) -> None:
    url, run = server.url, "returns"
    processes.run("init", url, "--run", run, "--inner.steps=1000000", *SETTINGS)
    manifest = view_manifest(url, run)
    processes.start("merger", url, "--run", run, "--checkpoint-every", "1")
    one, two = (processes.start("island", url, "--run", run, "--name", name) for name in ("one", "two"))
    store = IslandStore(tmp_path / "runs" / run / "islands" / "one", manifest)
    until(lambda: view(url, run).participating == 2, "two islands to take part", 90)
    until(store.find, "the island's checkpoint", 60)
    until(lambda: view(url, run).rounds >= 4, "some rounds", 60)

    one.kill()
    one.wait()
    one = processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: "optimiser state" in processes.said(one), "the island to be back", 90)
    assert "optimiser state: peer two" in processes.said(one)
    until(lambda: moments(url, run) == {"one": "peer two", "two": "fresh"}, "the heartbeat to say so")

    for island in (one, two):
        island.kill()
        island.wait()
    rounds = view(url, run).rounds
    until(lambda: view(url, run).live == 0, "both to be gone")
    alone = processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: "optimiser state" in processes.said(alone), "the island to be back", 90)
    assert "optimiser state: own checkpoint" in processes.said(alone)
    until(lambda: view(url, run).rounds > rounds + 4, "the run to go on", 60)
    until(lambda: balanced(view(url, run)), "balanced books")


def view_manifest(url: str, run: str) -> Manifest:
    transport = connect(url, run)
    try:
        return transport.reader.manifest()
    finally:
        transport.close()


def moments(url: str, run: str) -> dict[str, str]:
    """Where each island's inner optimiser state came from, as it says."""
    return {island.name: island.moments for island in view(url, run).islands}
