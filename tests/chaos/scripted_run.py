"""A run whose merger is a real process, while the test plays its islands.

Every island answers every round, and the grace window never ends. So a round closes exactly when all islands have
answered, and the members of a round depend neither on speed nor on which process dies.

`python -m tests.chaos.scripted_run URL RUN ROUND ISLAND` publishes one contribution and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from archipelago.broker.commits import START
from archipelago.broker.config import InnerConfig, RunConfig, WireConfig
from archipelago.broker.errors import UnknownRunError
from archipelago.broker.failpoints import VARIABLE
from archipelago.broker.manifest import Corpus, Manifest, Tensor, balanced
from archipelago.broker.messages import Contribution, Refusal, Snapshot, TapeEntry
from archipelago.broker.published import newest
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.broker.wire import digest, pack
from archipelago.merger import outer
from archipelago.merger.restore import load
from archipelago.merger.round_merge import RoundMerge
from archipelago.merger.state import FragmentState
from tests import samples
from tests.conftest import Until

ROOT = Path(__file__).parents[2]
ISLANDS = ("a", "b", "c")
ROUNDS = 6
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


@dataclass(frozen=True)
class Outcome:
    """The result of a run, without wall-clock times, entry ids, and what depends on the times of checkpoints.

    Attributes:
        snapshots: The header of each fragment's newest version, without what depends on the times of compactions.
        payloads: The digest of each fragment's newest published parameters.
        outers: The digest of each outer state, as a merger that starts now has it.
        tape: All rounds.
        cursors: The merged position in each data shard.
        books: Counts of contributions.
        state: The merger's state.
    """

    snapshots: list[Snapshot]
    payloads: list[str]
    outers: list[str]
    tape: list[TapeEntry]
    cursors: dict[str, tuple[int, int]]
    books: dict[str, int]
    state: dict[str, Any]


def _loaded(transport: RedisTransport, manifest: Manifest) -> list[FragmentState]:
    """Return the fragments as a merger that starts has them, although another one may write a compaction meanwhile."""
    while True:
        before = [transport.reader.fragment(p)[0].version for p in range(2)]
        found = load(transport, RoundMerge.of(manifest), None).fragments
        if before == [transport.reader.fragment(p)[0].version for p in range(2)]:
            return found


def outcome(transport: RedisTransport) -> Outcome:
    """Return the result of a run. Assert that the merger remembers all merged contributions."""
    manifest = transport.reader.manifest()
    fragments = [newest(transport.reader, manifest, p) for p in range(2)]
    loaded = _loaded(transport, manifest)
    tape = transport.reader.tape(1000)
    state = json.loads(transport.reader.merger_state())
    for entry in tape:
        assert all(_has_seen(state, m.island, m.sequence) for m in entry.members), "a retry would be merged again"
    books = asdict(transport.reader.books()) | {"bytes_down": 0, "kept": 0}
    # The accounts hold times. Refusals by code that a merger counted after its last commit die with it. The digest is
    # that of the whole state.
    changing = {"timing", "covered", "seen", "accounts", "refused", "digest"}
    timeless = {key: state[key] for key in state.keys() - changing}
    return Outcome(
        snapshots=[replace(found.snapshot, bytes=0, digest=found.snapshot.held) for found in fragments],
        payloads=[digest(np.asarray(found.params_N).tobytes()) for found in fragments],
        outers=[digest(outer.dump(fragment.params_N, fragment.outer)) for fragment in loaded],
        tape=[_timeless(entry) for entry in tape],
        cursors=transport.reader.cursors(),
        books=books,
        state=timeless,
    )


def _has_seen(state: dict[str, Any], island: str, sequence: int) -> bool:
    floor, *above = state["seen"][f"{island}/x"]
    return sequence < floor or sequence in above


def _timeless(entry: TapeEntry) -> TapeEntry:
    members = tuple(replace(member, entry="") for member in entry.members)
    times = {
        "quorum_seconds": 0.0,
        "grace_seconds": 0.0,
        "open_seconds": 0.0,
        "merge_seconds": 0.0,
        "spectra_seconds": 0.0,
        "busy_seconds": 0.0,
        "unix_seconds": 0.0,
    }
    return replace(entry, epoch=0, members=members, **times)  # type: ignore[arg-type]


@dataclass
class ScriptedRun:
    """One run at `url`. `folder` holds the mergers' folder and the logs."""

    url: str
    run: str
    folder: Path
    until: Until
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manifest = manifest(self.run)
        self.transport = connect(self.url, self.run)
        self._beaten_at = float("-inf")

    def create(self) -> None:
        """Create the run, with all islands alive."""
        self.transport.create(self.manifest, samples.first_snapshots(self.manifest, value=1.0))
        self.beat()

    def end(self) -> None:
        """End all processes and the connection."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.transport.close()

    # -- processes --------------------------------------------------------------------------------------------------

    def merger(self, *options: str, failpoint: str = "") -> subprocess.Popen[bytes]:
        """Start a merger, which is killed at that failpoint."""
        where = ["--run", self.run, "--folder", str(self.folder / "merger"), "--lease-seconds", "0.5"]
        return self._start(["-m", "archipelago.merger", self.url, *where, *options], failpoint)

    def island(self, number: int, island: str, failpoint: str = "") -> subprocess.Popen[bytes]:
        """Start a process that publishes one contribution, and is killed at that failpoint."""
        return self._start(["-m", "tests.chaos.scripted_run", self.url, self.run, str(number), island], failpoint)

    def _start(self, argv: Sequence[str], failpoint: str) -> subprocess.Popen[bytes]:
        with self._log(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *argv], cwd=ROOT, env={**os.environ, VARIABLE: failpoint}, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def _log(self, index: int) -> Path:
        return self.folder / f"process-{index}.log"

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """Return what a process has printed so far."""
        return self._log(self.processes.index(process)).read_text()

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process while the islands stay alive. Return its exit status."""

        def over() -> bool:
            self.beat()
            return process.poll() is not None

        self.until(over, f"the end of a process that printed: {self.said(process)}")
        assert process.returncode is not None
        return process.returncode

    # -- islands ----------------------------------------------------------------------------------------------------

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
        """Wait until that round has closed."""
        self.wait(lambda: self.closed >= number, f"round {number}", tend)

    def await_cover(self, tend: Callable[[], None] = lambda: None) -> None:
        """Wait until a checkpoint covers everything that was merged."""
        self.wait(lambda: self.transport.reader.books().kept == 0, "a checkpoint", tend)

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
        """Whether Redis holds the run."""
        try:
            self.transport.reader.manifest()
        except UnknownRunError:
            return False
        return True

    def events(self, kind: type[Any]) -> list[Any]:
        """Return all events of that type."""
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
