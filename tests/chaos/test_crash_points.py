"""Real processes of one run are killed at failpoints, between two writes. The run still gives the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from archipelago.broker.commits import sender_of
from archipelago.broker.messages import Snapshot
from archipelago.broker.redis.keys import Keys
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.chaos.scripted_run import ISLANDS, ROUNDS, ScriptedRun, answer, manifest, outcome
from tests.conftest import Until

pytestmark = [pytest.mark.full, pytest.mark.processes]

RUN = "crashed"
NO_CHECKPOINTS = ("--checkpoint-every", "10000")
#: A compaction is due after two versions of a fragment.
COMPACTIONS = ("--restart-seconds", "0")
CHECKPOINTS = ("--checkpoint-every", "0.1")
#: The failpoints at which the mergers of a run die, one after the other, and their options. The simulation has all
#: failpoints (`tests.simulation.storm`).
MERGERS = (
    ("acquire.done", NO_CHECKPOINTS), ("refuse.done", NO_CHECKPOINTS), ("announce.done:2", NO_CHECKPOINTS),
    ("commit.placed", NO_CHECKPOINTS), ("commit.done", NO_CHECKPOINTS),
    ("compact.placed", (*NO_CHECKPOINTS, *COMPACTIONS)), ("checkpoint.done:2", (*CHECKPOINTS, *COMPACTIONS)),
    ("", (*CHECKPOINTS, *COMPACTIONS)),
)  # fmt: skip
#: The failpoints at which the process of island b dies while it publishes, by round. Payloads of odd rounds are chunks.
#: The island publishes the same again.
PUBLISHERS = {3: "publish.placed", 5: "publish.done"}
#: After this round, Redis loses everything, and a merger dies while it restores the run from its checkpoint.
LOST_AFTER = 8


class Victims:
    """The mergers of a run. Each dies at its failpoint, and the next one follows it."""

    def __init__(self, scripted: ScriptedRun) -> None:
        self.scripted, self.left = scripted, list(MERGERS)
        self._start()

    def _start(self) -> None:
        self.failpoint, options = self.left.pop(0)
        self.process = self.scripted.merger(*options, failpoint=self.failpoint)

    def tend(self) -> None:
        """Start the next merger when one is dead."""
        if self.process.poll() is not None:
            said = self.scripted.said(self.process)
            assert self.failpoint and self.process.returncode == -signal.SIGKILL, said
            self._start()


def publish(scripted: ScriptedRun, number: int) -> None:
    """Publish the answers to a round. In some rounds, the process of an island dies meanwhile."""
    if (name := PUBLISHERS.get(number)) is None:
        return scripted.publish(number)
    scripted.publish(number, ["a"])
    assert scripted.ended(dying := scripted.island(number, "b", name)) == -signal.SIGKILL, scripted.said(dying)
    with redis.Redis.from_url(scripted.url) as client:
        uploads = [key for key in chunks(client, scripted.run)[1] if ":c:b:x." in key]
        assert uploads or name != "publish.placed", "chunks without an entry must expire"
    assert scripted.ended(again := scripted.island(number, "b")) == 0, scripted.said(again)
    return scripted.publish(number, ["c"], with_damaged=False)


def check_stream(scripted: ScriptedRun, first: int, last: int) -> None:
    """Assert that each round was announced once, each damaged contribution refused once, and no chunk is left over."""
    assert [snapshot.round for snapshot in scripted.events(Snapshot)] == list(range(first, last + 1))
    assert scripted.refused() == [f"a/x/{100 + number}" for number in range(first, last + 1)]
    with redis.Redis.from_url(scripted.url) as client:
        # A compaction may be written meanwhile.
        run = scripted.run
        scripted.wait(lambda: chunks(client, run)[0] == pointed_to(client, run), "no chunk that is left over")


def chunks(client: Any, run: str) -> tuple[set[str], set[str]]:
    """Return the chunks of the run that stay, and those that expire."""
    found = {key.decode() for key in client.scan_iter(match=f"*{run}:s0}}:[cm]:*", count=1000)}
    lasting = {key for key in found if client.ttl(key) == -1}
    return lasting, found - lasting


def pointed_to(client: Any, run: str) -> set[str]:
    """Return the chunks to which an entry, a merged one, a fragment or an outer state refers."""
    keys = Keys(run)
    rows = [(keys.chunk_prefix(name), fields) for name in ISLANDS for _, fields in client.xrange(keys.updates(name))]
    for entry in map(bytes.decode, client.smembers(keys.kept_entries)):
        rows.append((keys.kept_prefix(sender_of(entry)), client.hgetall(keys.kept(entry))))
    full = [int(client.hget(keys.fragment(p), "version")) for p in range(2)]
    mergers = [key for p in range(2) for key in (keys.fragment(p), keys.outer(p))]
    mergers += [keys.difference(p, version) for p in range(2) for version in range(full[p] + 1, ROUNDS)]
    rows += [(keys.chunk_prefix(), client.hgetall(key)) for key in mergers]
    return {
        f"{prefix}{row[b'chunks_name'].decode()}:{index}"
        for prefix, row in rows
        if b"chunks_name" in row
        for index in range(int(row[b"chunks"]))
    }


def with_a_retry(counters: dict[str, int]) -> dict[str, int]:
    """Return the counters after island b published again, which was refused as a retry."""
    (number,) = (number for number, name in PUBLISHERS.items() if name == "publish.done")
    sent, payload = answer(manifest("any"), number, "b")
    more = {"published": 1, "published_tokens": sent.tokens, "refused": 1, "refused_tokens": sent.tokens}
    return counters | {key: counters[key] + count for key, count in (more | {"bytes_up": len(payload)}).items()}


def test_a_run_whose_processes_are_killed_gives_the_same_bits(
    server: RedisServer, tmp_path: Path, until: Until
) -> None:
    @contextmanager
    def scripted(name: str) -> Iterator[ScriptedRun]:
        """Play in a database of its own, which is empty."""
        url = server.url.removesuffix("/0") + "/1"
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        made = ScriptedRun(url, RUN, tmp_path / name, until)
        try:
            yield made
        finally:
            made.end()

    with scripted("undisturbed") as run:
        run.create()
        run.merger(*NO_CHECKPOINTS)
        for number in range(1, ROUNDS + 1):
            run.publish(number)
            run.await_round(number)
        expected = outcome(run.transport)

    with scripted("crashed") as run:
        run.create()
        victims = Victims(run)
        for number in range(1, LOST_AFTER + 1):
            publish(run, number)
            run.await_round(number, victims.tend)
        run.await_cover(victims.tend)
        assert not victims.left, "some mergers have not died"
        image = CheckpointStore(run.folder / "merger" / "checkpoints").load()
        assert image is not None
        newest_held = [head.held for head in run.transport.reader.heads() if head is not None]
        assert [full.snapshot.held for full in image.fragments] == newest_held
        check_stream(run, 1, LOST_AFTER)
        victims.process.terminate()
        assert run.ended(victims.process) == 0, run.said(victims.process)

    with scripted("crashed") as run:
        run.beat()  # The islands train on while Redis is empty.
        dying = run.merger("--resume", *NO_CHECKPOINTS, failpoint="restore.placed")
        assert run.ended(dying) == -signal.SIGKILL, run.said(dying)
        assert not run.exists(), "the run was restored in part"
        run.merger("--resume", *NO_CHECKPOINTS)
        run.wait(run.exists, "the run to be restored")
        for number in range(LOST_AFTER + 1, ROUNDS + 1):
            run.publish(number)
            run.await_round(number)
        check_stream(run, LOST_AFTER + 1, ROUNDS)
        found = outcome(run.transport)
    assert found == {**expected, "counters": with_a_retry(expected["counters"])}
