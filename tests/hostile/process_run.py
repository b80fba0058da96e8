"""A run of real processes under attack: a merger and islands that train on real text, and what they must keep doing."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.watch.health import as_json, read_health, trouble
from archipelago.ops.watch.run_view import RunView, observe
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes

LEASE_SECONDS = "1"
#: Faster islands would take the processor from the other tests, for as long as this run is attacked.
STEP_SECONDS = "0.02"
#: A run that is unharmed closes this many rounds after an attack.
ROUNDS = 8
#: How long a run may take for these rounds, in seconds. A refused flood may slow it, but must not stop it.
PATIENCE_SECONDS = 240.0
#: A false claim may make the schedule this much faster than the islands, because honest islands differ in speed, too.
SPEED_MAX = 8


class ProcessRun:
    """A merger and islands as processes.

    Args:
        url: The address of the server, for the merger and the test.
        run: The name of the run, which is created.
        folder: Where the processes keep their files and logs.
        corpora: The folder with the corpus `small-text`.
    """

    def __init__(self, url: str, run: str, folder: Path, corpora: Path) -> None:
        self.url, self.run, self.folder = url, run, folder
        self.islands: tuple[str, ...] = ("ada", "bea")
        self.environment = {"ARCHIPELAGO_DATA": str(corpora), "OMP_NUM_THREADS": "1"}
        self.processes = Processes(folder)
        self.processes.run("init", url, "--run", run, *SETTINGS, "--inner.steps=1000000", **self.environment)
        self.transport = connect(url, run)
        self.members = [self.start_island(name) for name in self.islands]
        self.mergers = [self.start_merger()]

    def start_island(self, name: str) -> subprocess.Popen[str]:
        """Start an island in a folder of its own."""
        folder = str(self.folder / "islands" / f"{name}-{len(self.processes.all)}")
        return self.processes.start(
            "island", self.url, "--run", self.run, "--name", name, "--folder", folder,
            "--step-seconds-min", STEP_SECONDS, **self.environment,
        )  # fmt: skip

    def start_merger(self) -> subprocess.Popen[str]:
        """Start a merger that writes checkpoints often."""
        return self.processes.start(
            "merger", self.url, "--run", self.run, "--folder", str(self.folder / "merger"), "--checkpoint-every", "3",
            "--lease-seconds", LEASE_SECONDS, **self.environment,
        )  # fmt: skip

    def await_training(self, until: Until) -> None:
        """Wait until all islands take part in rounds."""

        def training() -> bool:
            self.assert_running()
            tape = self.transport.reader.tape(20)
            return {m.island for entry in tape for m in entry.members} >= set(self.islands)

        until(training, "all islands to take part")

    def steps(self) -> int:
        beats = [p.heartbeat for p in self.transport.reader.presences() if p.heartbeat.island in self.islands]
        return max((beat.steps for beat in beats), default=0)

    def slowest(self) -> int:
        """Return the steps of the island that has made the fewest."""
        return min(p.heartbeat.steps for p in self.transport.reader.presences() if p.heartbeat.island in self.islands)

    def assert_running(self) -> None:
        for process in (*self.members, self.mergers[-1]):
            assert process.poll() is None, f"ended with {process.returncode}: {self.processes.said(process)}"
        self.assert_no_traceback()

    def assert_no_traceback(self) -> None:
        """Assert that no process has printed a traceback."""
        for process in self.processes.all:
            said = self.processes.said(process)
            assert "Traceback" not in said, said

    def stop_merger(self) -> None:
        self.mergers[-1].kill()
        self.mergers[-1].wait()

    def begin_merger(self) -> None:
        self.mergers.append(self.start_merger())

    def status(self) -> int:
        """Run `archipelago status --json`, and return its exit status."""
        shown = self.processes.start("status", self.url, "--run", self.run, "--json", **self.environment)
        out, _ = shown.communicate()
        assert out, self.processes.said(shown)
        return shown.returncode

    def end(self) -> None:
        """End all processes."""
        self.transport.close()
        self.processes.end()


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


def standing(victims: ProcessRun) -> Standing:
    """Return what the run has reached. What follows from the islands' steps is read after them."""
    fastest, reader = victims.steps(), victims.transport.reader
    tape = reader.tape(1 << 20)  # read once, so that rounds and tokens are those of one moment
    merged = Counter[str]()
    for entry in tape:
        for member in entry.members:
            merged[member.island] += member.tokens
    passes = max((cursor[0] for cursor in reader.cursors().values()), default=0)
    last = tape[-1] if tape else None
    return Standing(last.round if last else 0, last.step if last else 0, fastest, passes, merged)


def status(transport: RedisTransport) -> RunView:
    """Return what `archipelago status --json` reads. Assert that it can be written as JSON."""
    manifest = transport.reader.manifest()
    view, health = observe(transport, manifest), read_health(transport)
    assert json.dumps(as_json(view, health, trouble(view, health, manifest.config.sync.interval)))
    return view


def assert_unharmed(victims: ProcessRun, before: Standing, until: Until) -> Standing:
    """Assert that the run goes on as if nothing had happened. Return what it has reached."""
    victims.assert_running()
    deadline = time.monotonic() + PATIENCE_SECONDS

    def goes_on() -> bool:
        victims.assert_running()
        assert time.monotonic() < deadline, f"no {ROUNDS} rounds with all islands since {before}: {standing(victims)}"
        tape = victims.transport.reader.tape(1 << 12)
        since = [entry for entry in tape if entry.round > before.closed]
        present = Counter(member.island for entry in since for member in entry.members)
        # Steps never go back. If they seem to, the heartbeat of the fastest island cannot be read at this moment.
        readable = victims.steps() >= before.fastest
        return readable and len(since) >= ROUNDS and all(present[island] >= 2 for island in victims.islands)

    until(goes_on, "rounds with all honest islands")
    after = standing(victims)
    after = replace(after, fastest=victims.steps())  # later than what follows from them, however slow the machine is
    manifest = victims.transport.reader.manifest()
    interval = manifest.config.sync.interval
    made = after.step - before.step
    possible = SPEED_MAX * (after.fastest - before.fastest + 4 * interval)
    assert made <= possible, f"the run went {made} steps ahead while its islands made {possible}"
    assert after.passes <= before.passes + 2 + (after.fastest - before.fastest), "a cursor jumped"
    for island in victims.islands:
        assert after.merged[island] > before.merged[island]
    view = status(victims.transport)
    until(lambda: status(victims.transport).balanced, "balanced books")
    assert view.live <= len(victims.islands) + 1
    return after
