"""Islands on four devices, which XLA makes of one processor: the tests in `four_devices*.py`, in one other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]


def test_the_tests_for_four_devices_pass() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    tests = sorted(map(str, Path(__file__).parent.glob("four_devices*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--durations=10", "-p", "no:cacheprovider", *tests],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert Path(os.environ["HOME"]).is_dir(), "the inner pytest deleted the home folder that it shares with this one"
