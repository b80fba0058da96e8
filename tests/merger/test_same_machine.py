"""A merger that was killed frees the lease at once for one on the same machine, and for no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.broker.redis.keys import is_name
from archipelago.merger import serving
from archipelago.merger.serving import has_ended_here, merger_name, numbering
from tests.conftest import Until
from tests.harness.merger_run import MergerRun

NAME = "from archipelago.merger.serving import merger_name; print(merger_name(), flush=True)"

pytestmark = pytest.mark.skipif(not numbering(), reason="this system does not tell what numbers its processes")


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a merger that has ended."""
    done = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_killed_process_has_ended_before_its_parent_takes_note(until: Until) -> None:
    """A supervisor may take its time for that."""
    with subprocess.Popen([sys.executable, "-c", f"{NAME}; input()"], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert not has_ended_here(name)
        assert not has_ended_here(merger_name()), "this process lives"
        process.kill()
        until(lambda: has_ended_here(name), "the end of the process")


def test_processes_that_are_numbered_elsewhere_are_unknown(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boot").write_text("other", encoding="ascii")
    (tmp_path / "pid").symlink_to("pid:[1]")
    for where, file, is_known in (
        ("_BOOT", "boot", True), ("_NAMESPACE", "pid", True), ("_BOOT", "no such file", False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(serving, where, tmp_path / file)
            numbering.cache_clear()
            assert not has_ended_here(dead), file
            assert bool(numbering()) == is_known, file
            assert re.fullmatch(r"[A-Za-z0-9-]+-[0-9]+-([0-9a-f]{8}-)?[0-9a-f]{6}", merger_name())
        numbering.cache_clear()


def test_other_names_are_unknown_and_those_of_mergers_can_be_parts_of_keys() -> None:
    for name in ("", "merger", "a-1-b", "a-99999999999-00000000-abcdef", "x" * 300, "é-1-2-3"):
        assert not has_ended_here(name)
    assert is_name(merger_name())
    assert merger_name() != merger_name()


def test_the_lease_of_a_dead_merger_is_taken_at_once_and_its_epoch_has_ended(dead: str) -> None:
    run = MergerRun()
    before = run.merger(dead)
    assert not run.idle_merger("elsewhere").acquire()
    here = run.idle_merger(merger_name(), is_gone=has_ended_here)
    assert here.acquire()
    assert here.epoch == before.epoch + 1
    assert not run.idle_merger(merger_name(), is_gone=has_ended_here).acquire(), "the one that serves now lives"
