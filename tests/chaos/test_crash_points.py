"""Real processes of one run are killed at failpoints, between two writes. The run still gives the same bits.

The test plays the islands. Every island answers every round, and the grace window never ends. So a round closes exactly
when all islands have answered, and the members of a round depend neither on speed nor on which process dies.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from archipelago.broker.commits import START, sender_of
from archipelago.broker.config import InnerConfig, RunConfig, WireConfig
from archipelago.broker.errors import UnknownRunError
from archipelago.broker.failpoints import VARIABLE
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Contribution, Refusal, Snapshot, TapeEntry
from archipelago.broker.redis.keys import Keys
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.wire import digest, newest, pack
from archipelago.merger.checkpoint import CheckpointStore
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.state import FragmentState
from archipelago.ops.launch.embedded_redis import RedisServer
from tests import samples
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import Processes

pytestmark = [pytest.mark.full, pytest.mark.processes]

ISLANDS = ("a", "b", "c")
ROUNDS = 10
#: The duration of an inner step that the islands report, so that the grace window outlasts every test.
STEP_SECONDS = 1e4
Answer = tuple[Contribution, bytes]
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
#: A process that publishes one contribution. It loads neither JAX nor pytest.
PUBLISH = """
import json, sys
from archipelago.broker.messages import Contribution
from archipelago.broker.redis.transport import connect
with open(sys.argv[4], "rb") as payload:
    connect(*sys.argv[1:3]).island.publish(Contribution(**json.loads(sys.argv[3])), payload.read())
"""
#: After this round, Redis loses everything, and a merger dies while it restores the run from its checkpoint.
LOST_AFTER = 8


def manifest(run: str) -> Manifest:
    """Return two fragments: one whose payloads need several chunks, and one whose payloads fit into stream entries."""
    tensors = (Tensor("embedding", (8, 40_000), "embedding"), Tensor("layers.0", (64, 16)), Tensor("norm", (16,)))
    config = RunConfig(inner=InnerConfig(steps=1 << 20), wire=WireConfig(up="float32"))
    config = replace(config, sync=replace(config.sync, fragments=2, window=2))
    return Manifest(run, config, tensors, balanced(tensors, 2), Corpus("text", "0" * 32, 1000), {"jax": "1"})


def answer(of: Manifest, number: int, island: str) -> Answer:
    """Return the contribution of an island to a round. The last island is always one version behind."""
    index, p = ISLANDS.index(island), of.fragment_of(number)
    random = np.random.default_rng([number, index])
    payload = pack(random.standard_normal(of.sizes[p], dtype=np.float32), "float32", 1)
    said = samples.contribution(
        payload, island=island, sequence=number, round=number, fragment=p,
        base=max(0, of.version_after(number) - 1 - (island == ISLANDS[-1])), tokens=100 * (index + 1), steps=4 + index,
        global_step=6 * number, loss=2.0 + 0.1 * index, step_seconds=STEP_SECONDS, data=f"{index}:0:{number}",
    )  # fmt: skip
    return said, payload


def damaged(of: Manifest, number: int) -> Answer:
    """Return a contribution that must be refused."""
    said, payload = answer(of, number, ISLANDS[0])
    return replace(said, sequence=100 + number, digest="0" * 32), payload


def _loaded(transport: RedisTransport, manifest: Manifest) -> list[FragmentState]:
    """Return the fragments as a merger that starts has them, although another one may write a compaction meanwhile."""
    while True:
        before = [transport.reader.fragment(p)[0].version for p in range(2)]
        found = load(transport, RoundMerge.of(manifest), None).fragments
        if before == [transport.reader.fragment(p)[0].version for p in range(2)]:
            return list(found.values())


def outcome(transport: RedisTransport) -> dict[str, Any]:
    """Return the result of a run, without wall-clock times, entry ids, and what depends on the times of checkpoints.

    Assert that the merger remembers all merged contributions.
    """
    manifest = transport.reader.manifest()
    fragments = [newest(transport.reader, manifest, p) for p in range(2)]
    tape = transport.reader.tape(1000)
    state = json.loads(transport.reader.merger_state())
    for member in (member for entry in tape for member in entry.members):
        floor, above, _ = state["seen"][f"{member.island}/x"]
        assert member.sequence < floor or member.sequence in above, "a retry would be merged again"
    # The counters say what was refused. The digest is that of the whole state.
    changing = {"timing", "covered", "seen", "refused", "refused_tokens", "bytes_up", "digest"}
    return {
        "snapshots": [replace(found.snapshot, bytes=0, digest=found.snapshot.held) for found in fragments],
        "payloads": [digest(np.asarray(found.params_N).tobytes()) for found in fragments],
        "outer states": [digest(samples.outer_bits(each)) for each in _loaded(transport, manifest)],
        "tape": [_timeless(entry) for entry in tape],
        "cursors": transport.reader.cursors(),
        "counters": asdict(transport.reader.counters()) | {"kept": 0},
        "state": {key: state[key] for key in state.keys() - changing},
    }


def _timeless(entry: TapeEntry) -> TapeEntry:
    times = {name: 0.0 for name in vars(entry) if name.endswith("_seconds")}
    members = tuple(replace(member, entry="") for member in entry.members)
    return replace(entry, epoch=0, members=members, **times)  # type: ignore[arg-type]


class ScriptedRun:
    """One run at `url`. `folder` holds the mergers' folder and the logs."""

    def __init__(self, url: str, run: str, folder: Path, until: Until, commands: Forks) -> None:
        self.url, self.run, self.folder, self.until = url, run, folder, until
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = Processes(folder, commands=commands)
        self.said = self.processes.said
        self.manifest = manifest(run)
        self.transport = connect(url, run)
        self._beaten_at = float("-inf")

    def create(self) -> None:
        self.transport.create(self.manifest, samples.first_snapshots(self.manifest, value=1.0))
        self.beat()

    def end(self) -> None:
        self.processes.end()
        self.transport.close()

    def merger(self, *options: str, failpoint: str = "") -> subprocess.Popen[str]:
        """Start a merger, which is killed at that failpoint."""
        where = ["--run", self.run, "--folder", str(self.folder / "merger"), "--lease-seconds", "0.5"]
        return self.processes.start("merger", self.url, *where, *options, **{VARIABLE: failpoint})

    def island(self, number: int, island: str, failpoint: str = "") -> subprocess.Popen[str]:
        """Start a process that publishes one contribution, and is killed at that failpoint."""
        said, payload = answer(self.manifest, number, island)
        (file := self.folder / "payload").write_bytes(payload)
        argv = (self.url, self.run, json.dumps(asdict(said)), str(file))
        return self.processes.python("-P", "-c", PUBLISH, *argv, **{VARIABLE: failpoint})

    def ended(self, process: subprocess.Popen[str]) -> int:
        """Wait for the end of a process while the islands stay alive. Return its exit status."""

        def over() -> bool:
            self.beat()
            return process.poll() is not None

        self.until(over, f"the end of a process that printed: {self.said(process)}")
        assert process.returncode is not None
        return process.returncode

    def beat(self) -> None:
        """Send a heartbeat of each island, at most once a second."""
        if time.monotonic() - self._beaten_at > 1.0:
            for island in ISLANDS:
                self.transport.island.heartbeat(samples.heartbeat(island))
            self._beaten_at = time.monotonic()

    def publish(self, number: int, islands: Iterable[str] = ISLANDS, *, with_damaged: bool = True) -> None:
        """Publish the islands' contributions to a round."""
        if with_damaged:
            self.transport.island.publish(*damaged(self.manifest, number))
        for island in islands:
            self.transport.island.publish(*answer(self.manifest, number, island))

    def await_round(self, number: int, tend: Callable[[], None] = lambda: None) -> None:
        self.wait(lambda: any(e.round >= number for e in self.transport.reader.tape(1)), f"round {number}", tend)

    def wait(self, holds: Callable[[], bool], what: str, tend: Callable[[], None] = lambda: None) -> None:
        """Wait until `holds`, while the islands stay alive. Call `tend` repeatedly."""

        def met() -> bool:
            self.beat()
            tend()
            return holds()

        self.until(met, f"{what} of {self.run}")

    def exists(self) -> bool:
        try:
            self.transport.reader.manifest()
        except UnknownRunError:
            return False
        return True


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
    events = [event for _, event in scripted.transport.reader.events(START, 0.0, 10_000)]
    rounds = range(first, last + 1)
    assert [event.round for event in events if isinstance(event, Snapshot)] == [*rounds]
    refused = [event.identity_text for event in events if isinstance(event, Refusal) and not event.repeat]
    assert refused == [f"a/x/{100 + number}" for number in rounds], "retries of accepted ones do not count"
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
    """Return the chunks to which an entry, a merged one, a fragment, an outer state or a difference refers."""
    keys = Keys(run)
    rows = [(keys.chunk_prefix(name), fields) for name in ISLANDS for _, fields in client.xrange(keys.updates(name))]
    for entry in map(bytes.decode, client.smembers(keys.kept_entries)):
        rows.append((keys.kept_prefix(sender_of(entry)), client.hgetall(keys.kept(entry))))
    mergers = [key for p in range(2) for key in (keys.fragment(p), keys.outer(p))]
    mergers += [keys.difference(p, version) for p in range(2) for version in range(1, ROUNDS + 1)]
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
    server: RedisServer, tmp_path: Path, until: Until, commands: Forks
) -> None:
    @contextmanager
    def scripted(name: str) -> Iterator[ScriptedRun]:
        """Play in a database of its own, which is empty."""
        url = server.url.removesuffix("/0") + "/1"
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        made = ScriptedRun(url, RUN, tmp_path / name, until, commands)
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
        store = CheckpointStore(run.folder / "merger" / "checkpoints")
        for number in range(1, LOST_AFTER + 1):
            if number == LOST_AFTER:  # the second checkpoint, which kills a merger, needs a further round
                run.wait(lambda: bool(store.numbers()), "a first checkpoint", victims.tend)
            publish(run, number)
            run.await_round(number, victims.tend)
        kept = Keys(RUN).kept("*")
        run.wait(lambda: not run.transport.connection.redis.keys(kept), "a checkpoint of all rounds", victims.tend)
        assert not victims.left, "some mergers have not died"
        image = store.load()
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
