"""A run whose merger is a real process, while the test plays its islands.

Every island answers every round, and the grace window never ends. So a round closes exactly when all islands have
answered, and the members of a round depend neither on speed nor on which process dies.

`python -m tests.chaos.scripted_run URL RUN ROUND ISLAND` publishes one contribution and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.broker.commits import START
from archipelago.broker.config import InnerConfig, RunConfig, WireConfig
from archipelago.broker.errors import UnknownRunError
from archipelago.broker.failpoints import VARIABLE
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Contribution, Refusal, TapeEntry
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.wire import digest, newest, pack
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.state import FragmentState
from tests import samples
from tests.conftest import Until
from tests.harness.processes import Processes

ROOT = Path(__file__).parents[2]
ISLANDS = ("a", "b", "c")
ROUNDS = 10
#: The duration of an inner step that the islands report, so that the grace window outlasts every test.
STEP_SECONDS = 1e4
Answer = tuple[Contribution, bytes]


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
        _, floor, *above = state["seen"][f"{member.island}/x"]
        assert member.sequence < floor or member.sequence in above, "a retry would be merged again"
    # The counters say what was refused. The digest is that of the whole state.
    changing = {"timing", "covered", "seen", "refused", "refused_tokens", "bytes_up", "digest"}
    return {
        "snapshots": [replace(found.snapshot, bytes=0, digest=found.snapshot.held) for found in fragments],
        "payloads": [digest(np.asarray(found.params_N).tobytes()) for found in fragments],
        "outer states": [digest(samples.outer_bits(each)) for each in _loaded(transport, manifest)],
        "tape": [_timeless(entry) for entry in tape],
        "cursors": transport.reader.cursors(),
        "counters": asdict(transport.reader.counters()) | {"bytes_down": 0, "kept": 0},
        "state": {key: state[key] for key in state.keys() - changing},
    }


def _timeless(entry: TapeEntry) -> TapeEntry:
    times = {name: 0.0 for name in vars(entry) if name.endswith("_seconds")}
    members = tuple(replace(member, entry="") for member in entry.members)
    return replace(entry, epoch=0, members=members, **times)  # type: ignore[arg-type]


class ScriptedRun:
    """One run at `url`. `folder` holds the mergers' folder and the logs."""

    def __init__(self, url: str, run: str, folder: Path, until: Until) -> None:
        self.url, self.run, self.folder, self.until = url, run, folder, until
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = Processes(folder, PYTHONPATH=str(ROOT))
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
        return self.processes.python("-m", "archipelago.merger", self.url, *where, *options, **{VARIABLE: failpoint})

    def island(self, number: int, island: str, failpoint: str = "") -> subprocess.Popen[str]:
        """Start a process that publishes one contribution, and is killed at that failpoint."""
        argv = ("-m", "tests.chaos.scripted_run", self.url, self.run, str(number), island)
        return self.processes.python(*argv, **{VARIABLE: failpoint})

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
        self.wait(lambda: self.closed >= number, f"round {number}", tend)

    def await_cover(self, tend: Callable[[], None] = lambda: None) -> None:
        """Wait until a checkpoint covers everything that was merged."""
        keys = self.transport.connection.keys.kept("*")
        self.wait(lambda: not self.transport.connection.redis.keys(keys), "a checkpoint", tend)

    def wait(self, holds: Callable[[], bool], what: str, tend: Callable[[], None] = lambda: None) -> None:
        """Wait until `holds`, while the islands stay alive. Call `tend` repeatedly."""

        def met() -> bool:
            self.beat()
            tend()
            return holds()

        self.until(met, f"{what} of {self.run}")

    @property
    def closed(self) -> int:
        """The last closed round; 0 before the first."""
        newest = self.transport.reader.tape(1)
        return newest[-1].round if newest else 0

    def exists(self) -> bool:
        try:
            self.transport.reader.manifest()
        except UnknownRunError:
            return False
        return True

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for _, event in self.transport.reader.events(START, 0.0, 10_000) if isinstance(event, kind)]

    def refused(self) -> list[str]:
        """Return the identities of refused contributions, without retries of accepted ones."""
        return [refusal.identity_text for refusal in self.events(Refusal) if not refusal.repeat]


def main(url: str, run: str, number: str, island: str) -> None:
    """Publish an island's contribution to a round."""
    transport = connect(url, run)
    transport.island.publish(*answer(transport.reader.manifest(), int(number), island))
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
