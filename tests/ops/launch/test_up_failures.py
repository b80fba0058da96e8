"""`up` ends with an error when a process cannot continue, and when nothing has measured the held-out loss."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from archipelago.broker.buckets.copier import FINISH_SECONDS
from archipelago.broker.buckets.folder import BUCKET_VARIABLE
from archipelago.broker.errors import ArchipelagoError
from archipelago.broker.messages import Books, Pending, Presence
from archipelago.broker.observe.options import WorkerOptions
from archipelago.broker.transport import Memory
from archipelago.ops.launch import up
from archipelago.ops.launch.session import (
    DRAIN_SECONDS,
    EVALUATE_SECONDS,
    KILL_SECONDS,
    Session,
    leave_seconds,
)
from archipelago.ops.launch.supervisor import LAST_LINES, Child
from archipelago.ops.watch import run_summary
from archipelago.ops.watch.run_view import summarise
from tests import samples
from tests.failing import failing


def session(folder: Path, *failed: str, is_fatal: bool = False) -> Session:
    """Return a session of a merger and two islands, of which those named have failed."""
    children = [Child(name, [], {}, folder / f"{name}.log") for name in ("merger", "island-0", "island-1")]
    for child in children:
        child.log.write_text("".join(f"line {n}\n" for n in range(10)) + "error: the port is taken\n")
        if child.name in failed:
            child.failed, child.is_fatal = child.last_words(), is_fatal
    return cast(Session, SimpleNamespace(merger=children[0], islands=children[1:]))


@pytest.mark.parametrize(
    ("failed", "is_fatal"),
    [(["merger"], False), (["island-1"], True), (["island-0", "island-1"], False)],
    ids=["the merger", "a mistake of one island", "all islands"],
)
def test_a_process_that_cannot_continue_ends_up(failed: list[str], is_fatal: bool, tmp_path: Path) -> None:
    with failing(ArchipelagoError, "up.worker-failed") as failure:
        Session._require_workers(session(tmp_path, *failed, is_fatal=is_fatal))
    assert "the port is taken" in failure.value.what
    assert failure.value.remedy.count("\n") == LAST_LINES


def test_an_island_that_left_its_name_to_another_process_ends_nothing(tmp_path: Path) -> None:
    Session._require_workers(session(tmp_path))
    Session._require_workers(session(tmp_path, "island-0"))


def test_workers_have_the_time_to_copy_their_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUCKET_VARIABLE, raising=False)
    usual, copying = (leave_seconds(WorkerOptions(bucket=bucket)) for bucket in (None, "s3://bucket/folder"))
    assert copying == usual + FINISH_SECONDS
    monkeypatch.setenv(BUCKET_VARIABLE, "s3://bucket/folder")
    assert leave_seconds(WorkerOptions()) == copying
    # First the islands end, and then the merger, before `up` ends itself.
    assert 2 * copying + DRAIN_SECONDS + EVALUATE_SECONDS + KILL_SECONDS < up.END_SECONDS


def test_up_does_not_ask_for_islands_that_it_starts_itself(tmp_path: Path) -> None:
    manifest = samples.manifest()
    silent = [Presence(samples.heartbeat(name), 60.0) for name in ("island-0", "oslo")]
    view = summarise(manifest, [], silent, Books(), Pending(0, 0), [], {}, {}, Memory(6, 10))
    mine = session(tmp_path)
    mine.manifest = manifest
    assert [(problem.code, problem.who) for problem in Session._problems(mine, view)] == [("island.silent", "oslo")]


@pytest.mark.parametrize(
    ("found", "has_trained", "kept"),
    [
        ({"run": "a", "islands": 3, "seconds": 9.0}, False, True),
        ({"run": "a", "islands": 3, "seconds": 9.0}, True, False),
        ({"run": "a", "seconds": 9.0}, False, False),  # of another version
        (None, False, False),
    ],
)
def test_a_call_that_trained_nothing_keeps_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, object] | None, has_trained: bool, kept: bool
) -> None:
    report, written = {"run": "a", "islands": 3, "seconds": 0.0}, []
    monkeypatch.setattr(run_summary, "read", lambda folder: found)
    monkeypatch.setattr(run_summary, "write", lambda folder, report: written.append(report))
    assert up._kept_report(tmp_path, report, has_trained=has_trained) == (found if kept else report)
    assert written == ([] if kept else [report])


@pytest.mark.parametrize(("first", "last", "has"), [(7.5, 2.0, True), (7.5, math.nan, False), (math.nan, 2.0, False)])
def test_a_report_without_a_loss_is_a_failure(first: float, last: float, has: bool) -> None:
    assert up._has_losses({"held_out_first": first, "held_out_last": last}) is has
