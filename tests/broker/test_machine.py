"""What the machine of a process says about itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from archipelago.broker import machine
from archipelago.broker.messages import COUNT_MAX
from tests.conftest import Until

QUOTAS: list[tuple[dict[str, str], int]] = [
    ({}, 8),
    ({"cpu.max": "max 100000"}, 8),
    ({"cpu.max": "200000 100000"}, 2),
    ({"cpu.max": "150000 100000"}, 2),
    ({"cpu.max": "10000 100000"}, 1),
    ({"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
    ({"a/b/cpu.max": "900000 100000"}, 8),
    ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ({"cpu.max": "damaged"}, 8),
]


def test_the_quota_of_a_container_limits_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n", encoding="utf-8")
    for number, (files, cores) in enumerate(QUOTAS):
        for name, text in files.items():
            file = tmp_path / str(number) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert machine.usable_cores(tmp_path / str(number), own) == cores, files


def test_any_number_may_be_asked_for_as_that_of_a_process() -> None:
    """Numbers of processes come over the wire."""
    for pid in (-(2**70), -(2**63), -1, 0, 2**31 - 1, 2**31, 2**32, COUNT_MAX, 2**63, 2**70):
        assert machine.has_ended(pid) == (pid > 0), pid
    assert not machine.has_ended(os.getpid())


def test_a_zombie_has_ended(until: Until) -> None:
    """A supervisor may take its time to take note of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not machine.has_ended(process.pid)
        process.kill()
        until(lambda: machine.has_ended(process.pid), "the end of the process")
