"""What `up` passes on to its workers, which options it refuses, and when it ends with an error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from archipelago.broker.buckets.copier import FINISH_SECONDS
from archipelago.broker.buckets.folder import BUCKET_VARIABLE
from archipelago.broker.errors import ArchipelagoError, ConfigError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.messages import Books, Pending
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.presence import Presence
from archipelago.broker.transport import Memory
from archipelago.ops.launch import up
from archipelago.ops.launch.local_run import (
    DRAIN_SECONDS,
    KILL_SECONDS,
    LocalRun,
    leave_seconds,
)
from archipelago.ops.launch.supervisor import LAST_LINES, Child
from archipelago.ops.launch.up import UpOptions
from archipelago.ops.watch.reading import summarise
from tests import samples
from tests.failing import failing


def session(folder: Path, *failed: str, is_fatal: bool = False) -> LocalRun:
    """Return a session of a merger and two islands, of which those named have failed."""
    children = [Child(name, [], {}, folder / f"{name}.log") for name in ("merger", "island-0", "island-1")]
    for child in children:
        child.log.write_text("".join(f"line {n}\n" for n in range(10)) + "error: the port is taken\n")
        if child.name in failed:
            child.failed, child.is_fatal = child.last_words(), is_fatal
    return cast(LocalRun, SimpleNamespace(merger=children[0], islands=children[1:]))


def test_a_process_that_cannot_continue_ends_up(tmp_path: Path) -> None:
    for failed, is_fatal in ((["merger"], False), (["island-1"], True), (["island-0", "island-1"], False)):
        with failing(ArchipelagoError, "up.worker-failed") as failure:
            LocalRun._require_workers(session(tmp_path, *failed, is_fatal=is_fatal))
        assert "the port is taken" in failure.value.what
        assert failure.value.remedy.count("\n") == LAST_LINES
    LocalRun._require_workers(session(tmp_path))
    LocalRun._require_workers(session(tmp_path, "island-0"))  # It has left its name to another process.


def test_workers_have_the_time_to_copy_their_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUCKET_VARIABLE, raising=False)
    usual, copying = (leave_seconds(WorkerOptions(bucket=bucket)) for bucket in (None, "s3://bucket/folder"))
    assert copying == usual + FINISH_SECONDS
    monkeypatch.setenv(BUCKET_VARIABLE, "s3://bucket/folder")
    assert leave_seconds(WorkerOptions()) == copying
    # First the islands end, and then the merger, before `up` ends itself.
    assert 2 * copying + DRAIN_SECONDS + KILL_SECONDS < up.END_SECONDS


def test_up_does_not_ask_for_islands_that_it_starts_itself(tmp_path: Path) -> None:
    manifest = samples.manifest()
    silent = [Presence(samples.heartbeat(name), 60.0) for name in ("island-0", "oslo")]
    view = summarise(manifest, [], silent, Books(), Pending(0, 0), memory=Memory(6, 10))
    mine = session(tmp_path)
    mine.manifest = manifest
    assert [(problem.code, problem.who) for problem in LocalRun._problems(mine, view)] == [("island.silent", "oslo")]


def argv(options: UpOptions) -> dict[str, list[str]]:
    manifest = samples.manifest()
    transport = MemoryBroker().connect(manifest.run)
    made = LocalRun(options, manifest, transport, "redis://h", Path("runs/demo"), lambda: False, None, {}, None)
    return {child.name: list(child.argv) for child in (made.merger, *made.islands)}


def test_workers_get_no_flags_by_default() -> None:
    for given in argv(UpOptions()).values():
        assert not {"--metrics-port", "--no-tensorboard", "--wandb", "--log-json", "--threads"} & set(given)


def test_each_worker_gets_the_same_flags_and_a_separate_port() -> None:
    found = argv(UpOptions(islands=2, metrics_port=9310, wandb=True, log_json=True, tensorboard=False))
    for given in found.values():
        assert {"--no-tensorboard", "--wandb", "--log-json"} <= set(given)
    ports = {name: given[given.index("--metrics-port") + 1] for name, given in found.items()}
    assert ports == {"merger": "9310", "island-0": "9311", "island-1": "9312"}


def test_a_missing_package_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with failing(ConfigError, "config.extra"):
        up.main(UpOptions(wandb=True))
    assert not Path("runs").exists()
