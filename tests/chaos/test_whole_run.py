"""A whole run loses its Redis, its disk, the merger's state or an island, and continues from what is left."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

import psutil
import pytest
import redis

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import connect
from archipelago.islands.checkpoint import IslandStore
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.embedded_redis import Server
from tests.chaos.scripted_run import ROUNDS, ScriptedRun, outcome
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, balanced, rounds_of, url_of, view

pytestmark = [pytest.mark.full, pytest.mark.processes]

UP = ["--islands=2", "--checkpoint-every=3", "--evaluate-every=2", "--no-one-process", "--inner.steps=3000", *SETTINGS]


class UpRun:
    """A run under `up`, and its folder."""

    def __init__(self, processes: Processes, folder: Path, until: Until, shards: int) -> None:
        self.processes, self.folder, self.until, self.shards = processes, folder, until, shards
        self.run = folder.name
        self.checkpoints = MergerFolder(folder / "merger")

    def up(self, *options: str) -> subprocess.Popen[str]:
        return self.processes.start("up", f"--run={self.run}", f"--shards={self.shards}", *UP, *options)

    @property
    def config(self) -> Path:
        return self.folder / "redis" / "server.conf"

    @property
    def rounds(self) -> int:
        return rounds_of(self.config, self.run) if self.config.exists() else 0

    def kill(self, launcher: subprocess.Popen[str]) -> None:
        """Kill the launcher and everything that it started, as a power failure does."""
        assert launcher.poll() is None, f"it ended before it was killed: {self.processes.said(launcher)}"
        children = children_of(launcher)
        assert len(children) >= 4
        launcher.kill()
        launcher.wait()
        self.until(lambda: not psutil.wait_procs(children, timeout=0)[1], "everything to die")

    def kill_with_whole_checkpoint(self, launcher: subprocess.Popen[str]) -> None:
        """Kill everything while all islands have their part of the newest checkpoint."""

        def stopped() -> bool:
            """Stop the mergers, so that none begins another checkpoint before the kill, and look again."""
            if not self._has_whole_checkpoint():
                return False
            mergers = [p for p in children_of(launcher) if "archipelago.merger" in " ".join(p.cmdline())]
            for merger in mergers:
                merger.suspend()
            if self._has_whole_checkpoint():
                return True
            for merger in mergers:
                merger.resume()
            return False

        self.until(stopped, "a checkpoint of all processes")
        self.kill(launcher)

    def _has_whole_checkpoint(self) -> bool:
        try:
            image = self.checkpoints.load()  # without a number, because the merger deletes old ones meanwhile
        except ConfigError:  # no checkpoint has the parts of all shards yet
            return False
        if image is None:
            return False
        stores = [IslandStore(self.folder / "islands" / f"island-{n}", image.manifest) for n in range(2)]
        return all(store.find(image.number) for store in stores)


def children_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all processes that a launcher started, directly or not."""
    return psutil.Process(launcher.pid).children(recursive=True)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_survives_the_loss_of_redis_and_then_of_its_disk(
    processes: Processes, tmp_path: Path, until: Until, shards: int
) -> None:
    up_run = UpRun(processes, tmp_path / "runs" / "phoenix", until, shards)
    first = up_run.up()
    up_run.kill_with_whole_checkpoint(first)
    image = up_run.checkpoints.load()
    assert image is not None
    covered = max(snapshot.round for snapshot, _ in image.snapshots)
    assert covered > 0
    shutil.rmtree(up_run.folder / "redis")

    refused = up_run.up()
    assert refused.wait() == 2
    assert "Traceback" not in processes.said(refused)

    second = up_run.up("--resume")
    until(lambda: up_run.rounds > covered + 4, "rounds after the checkpoint")
    own = {"island-0": "own checkpoint", "island-1": "own checkpoint"}
    until(lambda: moments(url_of(up_run.config), up_run.run) == own, "the islands to be back with their moments")
    up_run.kill(second)
    shutil.rmtree(up_run.folder / "merger")
    shutil.rmtree(up_run.folder / "islands")

    found = processes.run("up", f"--run={up_run.run}", f"--shards={shards}", *UP)
    assert found["finished"]
    assert found["steps"] >= 3000
    assert found["rounds"] > covered + 4
    assert found["pending"] == 0
    assert found["contributions"] == found["merged"] + found["refused"]
    assert found["held_out_last"] < 0.7 * found["held_out_first"]
    assert up_run.checkpoints.load() is not None, "no checkpoint in the new folder"
    assert "Traceback" not in "".join(path.read_text() for path in (up_run.folder / "logs").iterdir())


# -- the merger's own state -------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(server: Server, tmp_path: Path, until: Until) -> ScriptedRun:
    return ScriptedRun(server.url, f"scripted-{uuid.uuid4().hex[:8]}", tmp_path / "scripted", until)


def play_rounds(scripted: ScriptedRun, first: int, last: int) -> None:
    for number in range(first, last + 1):
        scripted.publish(number)
        scripted.await_round(number)


def test_outer_state_that_redis_lost_is_rebuilt_to_the_same_bits(
    scripted: ScriptedRun, server: Server, tmp_path: Path, until: Until
) -> None:
    """It comes from the checkpoint and a replay of the rounds after it."""
    undisturbed = ScriptedRun(server.url, "kept", tmp_path / "kept", until)
    try:
        undisturbed.create()
        undisturbed.merger("--checkpoint-every", "10000")
        play_rounds(undisturbed, 1, ROUNDS + 1)  # Islands live only while the test waits, so these rounds come first.
        scripted.create()
        merger = scripted.merger("--checkpoint-every", "0.1")
        play_rounds(scripted, 1, 2)
        scripted.await_cover()
        merger.kill()
        merger = scripted.merger("--checkpoint-every", "10000")
        play_rounds(scripted, 3, 4)
        later = ROUNDS + 1
        for lost, rounds in ((everything(scripted.run), (5, ROUNDS)), ([Keys(scripted.run).outer(0)], (later, later))):
            merger.kill()
            merger.wait()
            with redis.Redis.from_url(server.url) as client:
                assert client.delete(*lost) == len(lost)
            merger = scripted.merger("--checkpoint-every", "10000")
            play_rounds(scripted, *rounds)
        assert outcome(scripted.transport) == outcome(undisturbed.transport)
    finally:
        scripted.end()
        undisturbed.end()


def everything(run: str) -> list[str]:
    """Return all keys that only the merger reads."""
    keys = Keys(run)
    return [keys.outer(0), keys.outer(1), keys.state]


def test_without_a_checkpoint_momentum_starts_at_zero_and_the_run_continues(
    scripted: ScriptedRun, server: Server
) -> None:
    """What leads to the outer state of one fragment is lost."""
    try:
        scripted.create()
        merger = scripted.merger("--checkpoint-every", "0")
        play_rounds(scripted, 1, 2)
        merger.kill()
        merger.wait()
        with redis.Redis.from_url(server.url) as client:
            keys = Keys(scripted.run)  # the log merges the round again until a compaction has the outer state
            assert client.delete(keys.log(0, 1), keys.outer(0)) == 1
        merger = scripted.merger("--checkpoint-every", "0")
        play_rounds(scripted, 3, 4)
    finally:
        scripted.end()


# -- one island ------------------------------------------------------------------------------------------------------


def test_an_island_gets_its_moments_from_a_peer_or_else_from_its_disk(
    processes: Processes, server: Server, tmp_path: Path, until: Until
) -> None:
    url, run = server.url, "returns"
    processes.run("init", url, "--run", run, "--inner.steps=1000000", *SETTINGS)
    manifest = view_manifest(url, run)
    processes.start("merger", url, "--run", run, "--checkpoint-every", "1")
    one, two = (processes.start("island", url, "--run", run, "--name", name) for name in ("one", "two"))
    store = IslandStore(tmp_path / "runs" / run / "islands" / "one", manifest)
    until(lambda: view(url, run).participating == 2, "two islands to take part")
    until(store.find, "the island's checkpoint")
    until(lambda: view(url, run).rounds >= 4, "some rounds")

    one.kill()
    one.wait()
    one = processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: moments(url, run) == {"one": "peer two", "two": "fresh"}, "the heartbeats to report it")

    for island in (one, two):
        island.kill()
        island.wait()
    rounds = view(url, run).rounds
    until(lambda: view(url, run).live == 0, "both to be gone")
    processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: moments(url, run)["one"] == "own checkpoint", "the island to be back with its moments")
    until(lambda: view(url, run).rounds > rounds + 4, "the run to go on")
    until(lambda: balanced(view(url, run)), "balanced books")


def view_manifest(url: str, run: str) -> Manifest:
    transport = connect(url, run)
    try:
        return transport.reader.manifest()
    finally:
        transport.close()


def moments(url: str, run: str) -> dict[str, str]:
    """Return the source of each island's optimiser state, as its heartbeat reports it."""
    return {island.name: island.moments for island in view(url, run).islands}
