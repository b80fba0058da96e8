"""An island whose name was taken over does not fight for it when a supervisor restarts it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from archipelago.broker.errors import ConfigError
from archipelago.broker.presence import Presence
from archipelago.islands.running import RECORD_FILE, remember, require_free
from tests import samples
from tests.conftest import Until
from tests.failing import failing


def rival(**changes: Any) -> list[Presence]:
    return [Presence(samples.heartbeat(incarnation="new", **changes), 1.0)]


def test_a_restart_is_refused_while_the_newer_process_lives(tmp_path: Path) -> None:
    require_free(tmp_path, "a", rival())  # nobody took the name over
    remember(tmp_path / "a", "a", "new")
    for _ in range(2):
        with failing(ConfigError, "island.replaced"):
            require_free(tmp_path / "a", "a", rival())
    require_free(tmp_path / "a", "b", rival())  # another island in the same folder


def test_the_name_is_free_once_the_newer_process_has_gone(tmp_path: Path) -> None:
    later = [Presence(samples.heartbeat(incarnation="later"), 1.0)]
    for presences in ([], rival(state="left"), later):
        remember(tmp_path, "a", "new")
        require_free(tmp_path, "a", presences)
        assert not (tmp_path / RECORD_FILE).exists()


def test_a_crash_on_the_same_machine_frees_the_name_at_once(tmp_path: Path) -> None:
    remember(tmp_path, "a", "new")
    with failing(ConfigError, "island.replaced"):
        require_free(tmp_path, "a", rival(host=platform.node(), pid=os.getpid()))
    require_free(tmp_path, "a", rival(host=platform.node(), pid=(1 << 22) + 1))
    remember(tmp_path, "a", "new")
    require_free(tmp_path, "a", rival(host=platform.node(), pid=1 << 60))


def test_a_zombie_does_not_keep_the_name(tmp_path: Path, until: Until) -> None:
    """A supervisor may take its time to take note of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        beats = rival(host=platform.node(), pid=process.pid)
        remember(tmp_path, "a", "new")
        with failing(ConfigError, "island.replaced"):
            require_free(tmp_path, "a", beats)
        process.kill()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the end of the process")
        require_free(tmp_path, "a", beats)
