"""The attacks on real processes: a merger, and islands that train on real text, with all commands of an operator.

The simulation makes the same attacks (`tests.simulation.attacked`). Here one run is attacked once, and then everything
happens to it that could meet what the attacks have left.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import redis

from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, view
from tests.hostile.attacker import Attacker, as_island
from tests.hostile.attacks import ATTACKS, OWN, make, own_stream
from tests.integration.conftest import corpus_folder

__all__ = ["corpus_folder"]

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: By this step, a run without attacks has a training loss below 2.6 nats a byte; it begins above 5.
LEARNT_STEPS, LEARNT_LOSS = 400, 2.9
#: A run that is unharmed closes this many rounds after an attack.
ROUNDS = 8
#: A false claim may make the schedule this much faster than the islands, because honest islands differ in speed, too.
SPEED_MAX = 8


@dataclass(frozen=True)
class Standing:
    """What a run has reached at one moment.

    Attributes:
        closed: The last closed round.
        step: The run's global step.
        fastest: The inner steps of the fastest honest island.
        passes: The furthest pass over any shard.
        merged: Merged tokens of each island.
    """

    closed: int
    step: int
    fastest: int
    passes: int
    merged: Counter[str]


class AttackedRun:
    """A merger and islands as processes. `islands` are the names of the honest ones."""

    def __init__(self, url: str, folder: Path, corpora: Path, until: Until) -> None:
        self.url, self.run, self.folder, self.until = url, f"hostile-{uuid.uuid4().hex[:8]}", folder, until
        self.processes = Processes(folder, ARCHIPELAGO_DATA=str(corpora), OMP_NUM_THREADS="1")
        self.processes.run("init", url, "--run", self.run, *SETTINGS, "--inner.steps=1000000")
        self.transport = connect(url, self.run)
        self.living = {name: self.start_island(name) for name in ("ada", "bea")}
        self.living["merger"] = self.start_merger()

    @property
    def islands(self) -> set[str]:
        return self.living.keys() - {"merger"}

    def start_island(self, name: str, **environment: str) -> subprocess.Popen[str]:
        """Start an island in a folder of its own. Faster steps would take the processor from the other tests."""
        folder = str(self.folder / "islands" / f"{name}-{len(self.processes.all)}")
        return self.processes.start(
            "island", self.url, "--run", self.run, "--name", name, "--folder", folder, "--step-seconds-min", "0.02",
            **environment,
        )  # fmt: skip

    def start_merger(self) -> subprocess.Popen[str]:
        """Start a merger that writes checkpoints often."""
        return self.processes.start(
            "merger", self.url, "--run", self.run, "--folder", str(self.folder / "merger"), "--checkpoint-every", "3",
            "--lease-seconds", "1",
        )  # fmt: skip

    def attacker(self, client: redis.Redis, name: str) -> Attacker:
        return Attacker(client, self.transport.reader.manifest(), name, victim="ada")

    def command(self, verb: str) -> int:
        """Run a command to its end, and return its exit status."""
        process = self.processes.start(verb, self.url, "--run", self.run, "--json")
        out, _ = process.communicate()
        assert out, self.processes.said(process)
        return process.returncode

    def assert_running(self) -> None:
        """Assert that all processes live, and that none has ever printed a traceback."""
        for name, process in self.living.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self.processes.said(process)}"
        for process in self.processes.all:
            assert "Traceback" not in self.processes.said(process), self.processes.said(process)

    def steps(self) -> list[int]:
        """Return the inner steps of the honest islands, ascending."""
        beats = [presence.heartbeat for presence in self.transport.reader.presences()]
        return sorted(beat.steps for beat in beats if beat.island in self.islands)

    def standing(self) -> Standing:
        """Return what the run has reached. What follows from the islands' steps is read after them."""
        fastest, reader = max(self.steps(), default=0), self.transport.reader
        tape = reader.tape(1 << 20)  # read once, so that rounds and tokens are those of one moment
        merged = Counter[str]()
        for member in (member for entry in tape for member in entry.members):
            merged[member.island] += member.tokens
        passes = max((cursor[0] for cursor in reader.cursors().values()), default=0)
        return (
            Standing(tape[-1].round, tape[-1].step, fastest, passes, merged) if tape else Standing(0, 0, 0, 0, merged)
        )

    def await_unharmed(self, before: Standing) -> None:
        """Wait until all honest islands take part in further rounds, as if nothing had happened."""

        def goes_on() -> bool:
            self.assert_running()
            since = [entry for entry in self.transport.reader.tape(1 << 12) if entry.round > before.closed]
            present = Counter(member.island for entry in since for member in entry.members)
            # Steps never go back. If they seem to, the heartbeat of the fastest island cannot be read at this moment.
            readable = max(self.steps(), default=0) >= before.fastest
            return readable and len(since) >= ROUNDS and all(present[island] >= 2 for island in self.islands)

        self.until(goes_on, f"rounds with all of {self.islands} since {before}")
        after, fastest = self.standing(), max(self.steps())  # the steps are read after what follows from them
        interval = self.transport.reader.manifest().config.sync.interval
        possible, made = SPEED_MAX * (fastest - before.fastest + 4 * interval), after.step - before.step
        assert made <= possible, f"the run went {made} steps ahead while its islands made {possible}"
        assert after.passes <= before.passes + 2 + (fastest - before.fastest), "a cursor jumped"
        assert all(after.merged[island] > before.merged[island] for island in self.islands)
        self.until(lambda: view(self.url, self.run).balanced, "balanced books")
        assert view(self.url, self.run).live <= len(self.islands) + 1


@pytest.fixture
def attacked(server: RedisServer, tmp_path: Path, corpus_folder: Path, until: Until) -> Iterator[AttackedRun]:
    started = AttackedRun(server.url, tmp_path, corpus_folder, until)
    yield started
    started.transport.close()
    started.processes.end()


def another_text(corpora: Path, folder: Path) -> Path:
    """Return a copy of the corpora whose largest file has another byte."""
    shutil.copytree(corpora, folder)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    text = bytearray(largest.read_bytes())
    text[len(text) // 3] ^= 1
    largest.write_bytes(bytes(text))
    return folder


def test_no_attack_stops_a_run(attacked: AttackedRun, corpus_folder: Path, tmp_path: Path, until: Until) -> None:
    attacked.await_unharmed(Standing(0, 0, 0, 0, Counter()))
    before, dice = attacked.standing(), random.Random(1)
    with redis.Redis.from_url(attacked.url) as client:
        for attack in (*dice.sample(ATTACKS, len(ATTACKS)), own_stream):
            make(attack, attacked.attacker(client, "mallory"), dice)
        url = as_island(attacked.url, attacked.run, "sybil", client)
    with redis.Redis.from_url(url) as client:  # with the rights of an island
        attacker = attacked.attacker(client, "sybil")
        attacker.send()  # these are permitted
        attacker.beat()
        for attack in OWN:
            make(attack, attacker, dice)
    attacked.await_unharmed(before)

    # Another merger, a newcomer, and a second island of one name: the newer one stays, and counts its steps from zero.
    before, older = attacked.standing(), attacked.living["ada"]
    before = Standing(before.closed, before.step, attacked.steps()[0], before.passes, before.merged)
    attacked.living["merger"].kill()
    attacked.living |= {"merger": attacked.start_merger(), "newcomer": attacked.start_island("newcomer")}
    attacked.living["ada"] = attacked.start_island("ada")
    corpora = {"ARCHIPELAGO_DATA": str(another_text(corpus_folder, tmp_path / "corpora"))}
    forger = attacked.start_island("forger", **corpora)
    assert forger.wait() == 2, attacked.processes.said(forger)
    until(lambda: older.poll() is not None, "the older island of that name to leave")
    attacked.await_unharmed(before)
    assert attacked.command("status") == 0

    # The run has been attacked almost from its beginning, and has learnt all the same.
    until(lambda: attacked.transport.reader.tape(1)[-1].step > LEARNT_STEPS, "a few hundred steps")
    members = [member for entry in attacked.transport.reader.tape(48) for member in entry.members]
    assert fmean(m.loss for m in members if m.island in attacked.islands and not math.isnan(m.loss)) < LEARNT_LOSS
