"""A real process is killed between any two writes, at each failpoint; the run comes to the same bits as undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.failpoints import FAILPOINTS
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.keys import Keys
from archipelago.broker.transport import START
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.launch.embedded_redis import Server
from tests import samples
from tests.chaos.scripted import ISLANDS, ROUNDS, Outcome, Play, answer, manifest, outcome
from tests.conftest import Until

pytestmark = pytest.mark.processes

PROCESSES = 2
"""runs that are played side by side"""
TIMES = {"acquire": 1, "release": 1, "checkpoint": 2, "trim": 2, "refuse": 3, "announce": 3, "renew": 3, "commit": 3}
"""At which time a merger dies there: once there is something to lose, and in a round whose payloads are chunks."""
CRASH_ROUND = 3
"""the round that an island's process dies in"""
NO_CHECKPOINTS = ("--checkpoint-every", "10000")
CHECKPOINTS = ("--checkpoint-every", "0.1")


class Victim:
    """A merger that dies at a failpoint, and the one that is started then."""

    def __init__(self, play: Play, failpoint: str, *options: str) -> None:
        self.play, self.options = play, options
        self.first = self.process = play.merger(*options, failpoint=failpoint)

    def tend(self) -> None:
        """Starts the second one when the first is dead."""
        if self.process.poll() is not None:
            assert self.process is self.first, f"the second died, too: {self.play.said(self.process)}"
            assert self.first.returncode == -signal.SIGKILL, self.play.said(self.first)
            self.process = self.play.merger(*self.options)

    def leave(self) -> None:
        """Ends the run in order: what only happens then kills then, and a second one comes."""
        self.process.terminate()
        self.play.wait(lambda: self.process.poll() is not None, "the merger's end")
        if self.process is self.first:
            self.tend()
            self.play.wait(lambda: "serving from" in self.play.said(self.process), "the second merger")
            self.process.terminate()
        assert self.play.ended(self.process) == 0, self.play.said(self.process)


def merger_dies(play: Play, name: str) -> None:
    """At its n-th time there; then another one goes on."""
    family = name.partition(".")[0]
    assert family in TIMES, f"nobody has said when a merger is to die at {name}: see TIMES"
    covers = family in ("checkpoint", "trim")
    victim = Victim(play, f"{name}:{TIMES[family]}", *(CHECKPOINTS if covers else NO_CHECKPOINTS))
    for number in range(1, ROUNDS + 1):
        play.say(number)
        play.await_round(number, victim.tend)
        if covers and number % 2 == 0:
            play.await_cover(victim.tend)
        if family == "renew" and number == CRASH_ROUND:  # which goes by time, and the rounds may be quicker
            play.wait(lambda: victim.first.poll() is not None, "the death of the first merger")
    if family == "release":
        victim.leave()
    assert victim.process is not victim.first, f"it never came to {name}"
    assert victim.first.returncode == -signal.SIGKILL
    if covers:
        victim.leave()  # with the last checkpoint
        image = CheckpointStore(play.folder / "merger" / "checkpoints").load()
        assert image is not None
        assert [(s, p) for s, p in image.snapshots] == [play.transport.reader.fragment(p) for p in range(2)]


def island_dies(play: Play, name: str) -> None:
    """While it says its answer; then the same is said again."""
    play.merger(*NO_CHECKPOINTS)
    for number in range(1, ROUNDS + 1):
        if number == CRASH_ROUND:
            play.say(number, ["a"])
            assert play.ended(dying := play.island(number, "b", name)) == -signal.SIGKILL, play.said(dying)
            assert play.ended(again := play.island(number, "b")) == 0, play.said(again)
            play.say(number, ["c"], with_damaged=False)
        else:
            play.say(number)
        play.await_round(number)
    actions = samples.actions(CRASH_ROUND, island="b")
    found = [actions for _, actions in play.transport.merger.actions(START)]
    assert actions in found
    assert set(found) == {actions}, "two actions that differ say the same"


def restorer_dies(play: Play, name: str) -> None:
    """While it brings a run back from its folder into a server that has nothing; the next one completes it."""
    play.beat()  # islands train on while Redis has nothing
    dying = play.merger("--resume", *NO_CHECKPOINTS, failpoint=name)
    assert play.ended(dying) == -signal.SIGKILL, play.said(dying)
    assert play.exists() == (name == "restore.done"), "a run is there whole, or not at all"
    play.merger("--resume", *NO_CHECKPOINTS)
    play.wait(play.exists, "the run to be there again")
    finish_from_halfway(play)


def halfway(play: Play) -> None:
    """Four rounds, and the fifth has its first answer; then the merger leaves, with a checkpoint."""
    play.create()
    merger = play.merger(*NO_CHECKPOINTS)
    for number in range(1, 5):
        play.say(number)
        play.await_round(number)
    play.say(5, ISLANDS[:1])
    play.wait(
        lambda: len(play.refused()) == 5 and play.transport.merger.unacknowledged() != [], "the fifth round's call"
    )
    merger.terminate()
    assert play.ended(merger) == 0, play.said(merger)


def finish_from_halfway(play: Play) -> None:
    play.say(5, ISLANDS[1:], with_damaged=False)
    play.await_round(5)
    play.say(6)
    play.await_round(6)


def undisturbed(play: Play) -> None:
    play.merger(*NO_CHECKPOINTS)
    for number in range(1, ROUNDS + 1):
        play.say(number)
        play.await_round(number)


# -- what must be so however it went -----------------------------------------------------------------------------


def check_stream(play: Play, name: str) -> None:
    """Each round was announced once, each broken answer refused once, and no chunk lies about."""
    first = 5 if name.startswith("restore.") else 1
    assert [snapshot.round for snapshot in play.events(Snapshot)] == list(range(first, ROUNDS + 1))
    assert play.refused() == [f"a/x/{100 + number}" for number in range(first + (first > 1), ROUNDS + 1)]
    with redis.Redis.from_url(play.url) as client:
        lasting, expiring = chunks(client, play.run)
        assert lasting == pointed_to(client, play.run)
        uploads = {key.rpartition(":")[0] for key in expiring if ":c:b.x." in key}
        assert len(uploads) == (name == "publish.placed"), "what never got its entry goes by itself"


def chunks(client: Any, run: str) -> tuple[set[str], set[str]]:
    """Chunks of the run that stay, and those that expire."""
    found = {key.decode() for key in client.scan_iter(match=f"*{run}:s0}}:c:*", count=1000)}
    lasting = {key for key in found if client.ttl(key) == -1}
    return lasting, found - lasting


def pointed_to(client: Any, run: str) -> set[str]:
    """Chunks that an entry, a fragment or an outer state points to."""
    keys = Keys(run)
    rows = [fields for _, fields in client.xrange(keys.updates)]
    rows += [client.hgetall(key) for p in range(2) for key in (keys.fragment(p), keys.outer(p))]
    found = [(row[b"chunks_name"].decode(), int(row[b"chunks"])) for row in rows if b"chunks_name" in row]
    return {keys.chunk(name, index) for name, count in found for index in range(count)}


# -- the tests -------------------------------------------------------------------------------------------------------


class Stage:
    """Plays whole runs, each from its beginning to its outcome."""

    def __init__(self, url: str, folder: Path, until: Until) -> None:
        self.url, self.folder, self.until = url, folder, until

    def undisturbed(self) -> Outcome:
        """Nobody dies."""
        play = self._play("undisturbed")
        try:
            play.create()
            undisturbed(play)
            return outcome(play.transport)
        finally:
            play.end()

    def disturbed(self, name: str) -> Outcome:
        """Somebody dies there."""
        play = self._restored(name) if name.startswith("restore.") else self._play(name)
        try:
            if name.startswith("restore."):
                restorer_dies(play, name)
            else:
                play.create()
                (island_dies if name.startswith(("publish.", "actions.")) else merger_dies)(play, name)
            check_stream(play, name)
            return outcome(play.transport)
        finally:
            play.end()

    def _play(self, name: str) -> Play:
        return Play(self.url, f"crash-{name}", self.folder / name, self.until)

    def _restored(self, name: str) -> Play:
        """A run whose merger's folder is halfway, and whose Redis has nothing: another database of the server."""
        before = self._play(name)
        try:
            halfway(before)
        finally:
            before.end()
        return Play(self.url.removesuffix("/0") + "/1", before.run, before.folder, self.until)


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory, until: Until
) -> Iterator[dict[str, Future[Outcome]]]:
    """The runs of the tests that were chosen, under way."""
    stage = Stage(server.url, tmp_path_factory.mktemp("crashes"), until)
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = [str(item.callspec.params["name"]) for item in here if hasattr(item, "callspec")]
    with ThreadPoolExecutor(PROCESSES) as threads:
        runs = {"": threads.submit(stage.undisturbed)}
        yield runs | {name: threads.submit(stage.disturbed, name) for name in chosen}
        threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", FAILPOINTS)
def test_killed_there_it_comes_to_the_same_bits(name: str, played: dict[str, Future[Outcome]]) -> None:
    expected, found = played[""].result(), played[name].result()
    assert found.payloads == expected.payloads
    assert found.snapshots == expected.snapshots
    assert found.outers == expected.outers
    assert found.tape == expected.tape
    assert found.cursors == expected.cursors
    assert found.state == expected.state
    assert found.books == said_twice(expected.books) if name == "publish.done" else found.books == expected.books


def said_twice(books: dict[str, int]) -> dict[str, int]:
    """The books when island b said its answer once more, which was refused as a repeat."""
    said, payload = answer(manifest("any"), CRASH_ROUND, "b")
    more = {"published": 1, "published_tokens": said.tokens, "refused": 1, "refused_tokens": said.tokens}
    return books | {key: books[key] + count for key, count in (more | {"bytes_up": len(payload)}).items()}
