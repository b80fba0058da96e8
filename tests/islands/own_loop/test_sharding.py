"""Any sharding over the devices of one host comes back, and gives the same bits as one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "dtype"), [("auto", "float32"), ("explicit", "bfloat16"), ("mixed", "float32")])
def test_a_mesh_gives_the_bits_of_one_device(kind: str, dtype: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.islands.own_loop.sharded", kind, dtype],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr[-4000:]
