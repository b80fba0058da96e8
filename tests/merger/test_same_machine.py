"""A merger that was killed frees the lease at once for one on the same machine, and for no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.merger import standby
from archipelago.merger.service import Merger
from archipelago.merger.standby import has_ended_here, merger_name, numbering
from tests.conftest import Until
from tests.harness.merger_run import MergerRun

NAME = "from archipelago.merger.standby import merger_name; print(merger_name(), flush=True)"

pytestmark = pytest.mark.skipif(not numbering(), reason="this system does not tell what numbers its processes")


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a merger that has ended."""
    done = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_that_has_ended_is_told_from_one_that_lives(dead: str) -> None:
    assert has_ended_here(dead)
    assert not has_ended_here(merger_name()), "this process lives"


def test_a_killed_process_has_ended_before_its_parent_takes_note(until: Until) -> None:
    """A supervisor may take its time for that."""
    with subprocess.Popen([sys.executable, "-c", f"{NAME}; input()"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert not has_ended_here(name)
        process.kill()
        until(lambda: has_ended_here(name), "the end of the process")


@pytest.mark.parametrize("changed", ["another machine", "another container", "no system that tells"])
def test_processes_that_are_numbered_elsewhere_are_unknown(
    changed: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed == "another container":
        (tmp_path / "pid").symlink_to("pid:[1]")
        monkeypatch.setattr(standby, "_NAMESPACE", tmp_path / "pid")
    else:
        if changed == "another machine":
            (tmp_path / "boot").write_text("other", encoding="ascii")
        monkeypatch.setattr(standby, "_BOOT", tmp_path / "boot")
    numbering.cache_clear()
    try:
        assert not has_ended_here(dead)
        assert bool(numbering()) == (changed != "no system that tells")
        assert re.fullmatch(r"[A-Za-z0-9-]+-[0-9]+-([0-9a-f]{8}-)?[0-9a-f]{6}", merger_name())
    finally:
        numbering.cache_clear()


@pytest.mark.parametrize("name", ["", "merger", "a-1-b", "a-99999999999-00000000-abcdef", "x" * 300, "é-1-2-3"])
def test_other_names_are_unknown(name: str) -> None:
    assert not has_ended_here(name)


def test_the_lease_of_a_dead_merger_is_taken_at_once_and_its_epoch_has_ended(dead: str) -> None:
    run = MergerRun()
    before = run.merger(dead)
    elsewhere = Merger(run.broker.connect("sample"), run.clock, "elsewhere")
    assert not elsewhere.acquire()
    here = Merger(run.broker.connect("sample"), run.clock, merger_name(), is_gone=has_ended_here)
    assert here.acquire()
    assert here.epoch == before.epoch + 1
    third = Merger(run.broker.connect("sample"), run.clock, merger_name(), is_gone=has_ended_here)
    assert not third.acquire(), "the one that serves now lives"
