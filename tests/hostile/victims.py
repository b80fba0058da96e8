"""A run under attack: what it must keep doing, and how to tell that it still does.

`Victims` is what the attacks need of a run. `ThreadedRun` plays it with a merger and islands on threads of the test;
`ProcessRun` with real processes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.merger.service import Merger
from archipelago.merger.serving import serve
from archipelago.merger.storage import MergerFolder
from archipelago.ops.watch.health import as_json, read_health, trouble
from archipelago.ops.watch.run_view import RunView, observe
from tests.chaos.island_threads import IslandThreads, create
from tests.conftest import Until

#: A run that is unharmed closes this many rounds after an attack.
ROUNDS = 8
#: How long a run may take for these rounds, in seconds. A refused flood may slow it, but must not stop it.
PATIENCE_SECONDS = 240.0
#: A false claim may make the schedule this much faster than the islands, because honest islands differ in speed, too.
SPEED_MAX = 8
CHECKPOINT_SECONDS = 1.0
ISLANDS = ("ada", "bea")


class Victims(Protocol):
    """A run under attack.

    Attributes:
        url: The address of its server.
        run: Its name.
        islands: The names of its honest islands.
        transport: A connection of the test's own.
    """

    url: str
    run: str
    islands: tuple[str, ...]
    transport: RedisTransport

    def steps(self) -> int:
        """Return the inner steps of the fastest honest island."""
        ...

    def assert_running(self) -> None:
        """Assert that no process has ended, and that none has printed a traceback."""
        ...

    def stop_merger(self) -> None:
        """End the merger as a failure would."""
        ...

    def begin_merger(self) -> None:
        """Start another merger."""
        ...


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


def standing(victims: Victims) -> Standing:
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


def status(victims: Victims) -> RunView:
    """Return what `archipelago status --json` reads. Assert that it can be written as JSON."""
    manifest = victims.transport.reader.manifest()
    view, health = observe(victims.transport, manifest), read_health(victims.transport)
    assert json.dumps(as_json(view, health, trouble(view, health, manifest.config.sync.interval)))
    return view


def assert_unharmed(victims: Victims, before: Standing, until: Until) -> Standing:
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
    view = status(victims)
    until(lambda: status(victims).balanced, "balanced books")
    assert view.live <= len(victims.islands) + 1
    return after


class MergerThread:
    """A merger on a thread of the test, with checkpoints in `folder`."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        transport = connect(url, run)
        store = MergerFolder(folder).checkpointer(transport, transport.reader.manifest(), CHECKPOINT_SECONDS)
        self.merger = Merger(transport, live_poll_seconds=0.1, lease_seconds=1.0, checkpointer=store)
        self.fault: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="merger", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            serve(self.merger, self._stopped.is_set)
            assert self._stopped.is_set(), "the merger has left its run"
        except BaseException as fault:  # noqa: BLE001 - the test raises it again
            self.fault = fault

    def assert_running(self) -> None:
        """Raise what ended the merger."""
        if self.fault is not None:
            raise AssertionError("the merger has ended") from self.fault

    def stop(self) -> None:
        """Let it leave."""
        self._stopped.set()
        self._thread.join()


class ThreadedRun:
    """A merger and islands on threads of the test, with a real server."""

    def __init__(self, url: str, run: str, folder: Path, islands: tuple[str, ...] = ISLANDS) -> None:
        self.url, self.run, self.islands, self.folder = url, run, islands, folder
        self.manifest = create(url, run, width=1_000)
        self.transport = connect(url, run)
        self.merger = MergerThread(url, run, folder)
        self.threads = IslandThreads(url, self.manifest, list(islands), pause=0.02)

    def steps(self) -> int:
        return max(thread.island.totals.steps for thread in self.threads.threads)

    def assert_running(self) -> None:
        self.merger.assert_running()
        for thread in self.threads.threads:
            if thread.fault is not None:
                raise AssertionError(f"island {thread.island.name} has ended") from thread.fault

    def stop_merger(self) -> None:
        self.merger.assert_running()
        self.merger.stop()

    def begin_merger(self) -> None:
        self.merger = MergerThread(self.url, self.run, self.folder)

    def end(self) -> None:
        """End all threads."""
        for thread in self.threads.threads:
            thread._stopped.set()
        self.merger.stop()
        for thread in self.threads.threads:
            thread._thread.join()
            thread.link.stop()
        self.transport.close()
