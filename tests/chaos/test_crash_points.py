"""A real process is killed at each failpoint, between two writes. The run still gives the same bits."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.keys import Keys
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.launch.embedded_redis import Server
from tests.chaos.scripted_run import ISLANDS, ROUNDS, Outcome, ScriptedRun, answer, manifest, outcome
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: The failpoints at which real processes die. The simulation has them all (`tests.simulation.storm`).
REAL = (
    "publish.placed", "publish.done", "acquire.done", "refuse.done", "compact.placed-outer", "commit.watched",
    "commit.done", "announce.done", "restore.placed", "checkpoint.done",
)  # fmt: skip
#: At which visit a merger dies: once there is state to lose, and in a round whose payloads are chunks.
TIMES = {"acquire": 1, "announce": 3, "checkpoint": 2, "refuse": 3, "commit": 3, "compact": 1}
#: The round in which the process of an island dies.
CRASH_ROUND = 3
NO_CHECKPOINTS = ("--checkpoint-every", "10000")
#: A compaction is due after two versions of a fragment.
COMPACTIONS = ("--restart-seconds", "0")
CHECKPOINTS = ("--checkpoint-every", "0.1")


class Victim:
    """A merger that dies at a failpoint, and the merger that is started after it."""

    def __init__(self, scripted: ScriptedRun, failpoint: str, *options: str) -> None:
        self.scripted, self.options = scripted, options
        self.first = self.process = scripted.merger(*options, failpoint=failpoint)

    def tend(self) -> None:
        """Start the second merger when the first is dead."""
        if self.process.poll() is not None:
            assert self.process is self.first, f"the second merger died as well: {self.scripted.said(self.process)}"
            assert self.first.returncode == -signal.SIGKILL, self.scripted.said(self.first)
            self.process = self.scripted.merger(*self.options)

    def leave(self) -> None:
        """End the merger in order."""
        self.process.terminate()
        assert self.scripted.ended(self.process) == 0, self.scripted.said(self.process)


def merger_dies(scripted: ScriptedRun, name: str) -> None:
    """Kill a merger at its n-th visit of a failpoint, and let another one continue."""
    family = name.partition(".")[0]
    covers = family == "checkpoint"
    options = (*(CHECKPOINTS if covers else NO_CHECKPOINTS), *(COMPACTIONS if family == "compact" else ()))
    victim = Victim(scripted, f"{name}:{TIMES[family]}", *options)
    for number in range(1, ROUNDS + 1):
        scripted.publish(number)
        scripted.await_round(number, victim.tend)
        if covers and number == ROUNDS:
            scripted.await_cover(victim.tend)
        # Compactions go on beside the rounds, which may be faster.
        if (family, number) == ("compact", ROUNDS - 1):
            scripted.wait(lambda: victim.first.poll() is not None, "the death of the first merger")
    assert victim.process is not victim.first, f"it never reached {name}"
    assert victim.first.returncode == -signal.SIGKILL
    if covers:
        victim.leave()  # It writes the last checkpoint.
        image = CheckpointStore(scripted.folder / "merger" / "checkpoints").load()
        assert image is not None
        newest_held = [head.held for head in scripted.transport.reader.heads() if head is not None]
        assert [snapshot.held for snapshot, _ in image.snapshots] == newest_held


def island_dies(scripted: ScriptedRun, name: str) -> None:
    """Kill an island while it publishes; then publish the same again."""
    scripted.merger(*NO_CHECKPOINTS)
    for number in range(1, ROUNDS + 1):
        if number == CRASH_ROUND:
            scripted.publish(number, ["a"])
            assert scripted.ended(dying := scripted.island(number, "b", name)) == -signal.SIGKILL, scripted.said(dying)
            assert scripted.ended(again := scripted.island(number, "b")) == 0, scripted.said(again)
            scripted.publish(number, ["c"], with_damaged=False)
        else:
            scripted.publish(number)
        scripted.await_round(number)


def restorer_dies(scripted: ScriptedRun, name: str) -> None:
    """Kill a merger while it restores a run into an empty server. The next merger completes it."""
    scripted.beat()  # The islands train on while Redis is empty.
    dying = scripted.merger("--resume", *NO_CHECKPOINTS, failpoint=name)
    assert scripted.ended(dying) == -signal.SIGKILL, scripted.said(dying)
    assert not scripted.exists(), "the run was restored in part"
    scripted.merger("--resume", *NO_CHECKPOINTS)
    scripted.wait(scripted.exists, "the run to be restored")
    finish_from_halfway(scripted)


def halfway(scripted: ScriptedRun) -> None:
    """Close four rounds and begin the fifth; then let the merger leave with a checkpoint."""
    scripted.create()
    merger = scripted.merger(*NO_CHECKPOINTS)
    for number in range(1, 5):
        scripted.publish(number)
        scripted.await_round(number)
    scripted.publish(5, ISLANDS[:1])
    scripted.wait(
        lambda: len(scripted.refused()) == 5 and scripted.transport.merger.unacknowledged() != [],
        "the call of the fifth round",
    )
    merger.terminate()
    assert scripted.ended(merger) == 0, scripted.said(merger)


def finish_from_halfway(scripted: ScriptedRun) -> None:
    scripted.publish(5, ISLANDS[1:], with_damaged=False)
    scripted.await_round(5)
    scripted.publish(6)
    scripted.await_round(6)


def undisturbed(scripted: ScriptedRun) -> None:
    scripted.merger(*NO_CHECKPOINTS)
    for number in range(1, ROUNDS + 1):
        scripted.publish(number)
        scripted.await_round(number)


# -- checks -----------------------------------------------------------------------------------------------------


def check_stream(scripted: ScriptedRun, name: str) -> None:
    """Assert that each round was announced once, each damaged contribution refused once, and no chunk is left over."""
    first = 5 if name.startswith("restore.") else 1
    assert [snapshot.round for snapshot in scripted.events(Snapshot)] == list(range(first, ROUNDS + 1))
    assert scripted.refused() == [f"a/x/{100 + number}" for number in range(first + (first > 1), ROUNDS + 1)]
    with redis.Redis.from_url(scripted.url) as client:
        # A compaction may be written meanwhile.
        run = scripted.run
        scripted.wait(lambda: chunks(client, run)[0] == pointed_to(client, run), "no chunk that is left over")
        uploads = {key.rpartition(":")[0] for key in chunks(client, run)[1] if ":c:b:x." in key}
        assert len(uploads) == (name == "publish.placed"), "chunks without an entry must expire"


def chunks(client: Any, run: str) -> tuple[set[str], set[str]]:
    """Return the chunks of the run that stay, and those that expire."""
    found = {key.decode() for key in client.scan_iter(match=f"*{run}:s0}}:[cm]:*", count=1000)}
    lasting = {key for key in found if client.ttl(key) == -1}
    return lasting, found - lasting


def pointed_to(client: Any, run: str) -> set[str]:
    """Return the chunks to which an entry, a fragment or an outer state refers."""
    keys = Keys(run)
    rows = [(name, fields) for name in ISLANDS for _, fields in client.xrange(keys.updates(name))]
    rows += [("", client.hgetall(key)) for p in range(2) for key in (keys.fragment(p), keys.outer(p))]
    full = [int(client.hget(keys.fragment(p), "version")) for p in range(2)]
    rows += [("", client.hgetall(keys.difference(p, v))) for p in range(2) for v in range(full[p] + 1, ROUNDS)]
    found = [(owner, row[b"chunks_name"].decode(), int(row[b"chunks"])) for owner, row in rows if b"chunks_name" in row]
    return {keys.chunk(name, index, owner) for owner, name, count in found for index in range(count)}


# -- the tests -------------------------------------------------------------------------------------------------------


class CrashRuns:
    """Plays whole runs, each to its outcome."""

    def __init__(self, url: str, folder: Path, until: Until) -> None:
        self.url, self.folder, self.until = url, folder, until

    def undisturbed(self) -> Outcome:
        """Play a run in which no process dies."""
        scripted = self._scripted("undisturbed")
        try:
            scripted.create()
            undisturbed(scripted)
            return outcome(scripted.transport)
        finally:
            scripted.end()

    def disturbed(self, name: str) -> Outcome:
        """Play a run in which a process dies at that failpoint."""
        scripted = self._restored(name) if name.startswith("restore.") else self._scripted(name)
        try:
            if name.startswith("restore."):
                restorer_dies(scripted, name)
            else:
                scripted.create()
                (island_dies if name.startswith("publish.") else merger_dies)(scripted, name)
            check_stream(scripted, name)
            return outcome(scripted.transport)
        finally:
            scripted.end()

    def _scripted(self, name: str) -> ScriptedRun:
        return ScriptedRun(self.url, f"crash-{name}", self.folder / name, self.until)

    def _restored(self, name: str) -> ScriptedRun:
        """Return a run whose merger's folder is halfway, and whose Redis is empty: another database of the server."""
        before = self._scripted(name)
        try:
            halfway(before)
        finally:
            before.end()
        return ScriptedRun(self.url.removesuffix("/0") + "/1", before.run, before.folder, self.until)


@pytest.fixture(scope="module")
def runs(server: Server, tmp_path_factory: pytest.TempPathFactory, until: Until) -> CrashRuns:
    return CrashRuns(server.url, tmp_path_factory.mktemp("crashes"), until)


@pytest.fixture(scope="module")
def expected(runs: CrashRuns) -> Outcome:
    """Return the outcome of the run in which no process dies."""
    return runs.undisturbed()


@pytest.mark.parametrize("name", REAL)
def test_a_run_that_is_killed_there_gives_the_same_bits(name: str, runs: CrashRuns, expected: Outcome) -> None:
    found = runs.disturbed(name)
    books = with_a_retry(expected.books) if name == "publish.done" else expected.books
    assert found == replace(expected, books=books)


def with_a_retry(books: dict[str, int]) -> dict[str, int]:
    """Return the books after island b published again, which was refused as a retry."""
    sent, payload = answer(manifest("any"), CRASH_ROUND, "b")
    more = {"published": 1, "published_tokens": sent.tokens, "refused": 1, "refused_tokens": sent.tokens}
    return books | {key: books[key] + count for key, count in (more | {"bytes_up": len(payload)}).items()}
