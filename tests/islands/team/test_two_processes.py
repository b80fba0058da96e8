"""Islands on a mesh over two processes of two devices each: fsdp, and their own checkpoints.

The small model of the tests for meshes trains in virtual time, so two processes play all parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from archipelago.broker.machine import free_port
from tests.islands.mesh.sharded_runs import ONE, MeshRun
from tests.islands.team.two_processes import STEPS, flat

ROOT = Path(__file__).parents[3]


@pytest.mark.full
@pytest.mark.processes
def test_two_processes_train_as_one_device_and_restore_their_checkpoints(tmp_path: Path) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    program = ["-m", "tests.islands.team.two_processes"]
    port = free_port(2)
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *program, str(rank), str(port), str(tmp_path)],
                    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                    cwd=ROOT,
                    stdout=said,
                    stderr=said,
                )
            )
    try:
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert statuses == [0, 0], "\n".join(log.read_text()[-6000:] for log in logs)
    run = MeshRun()
    island = run.island(ONE)
    run.play(island, STEPS)
    found_N = np.frombuffer((tmp_path / "moments.bytes").read_bytes(), np.float32)
    np.testing.assert_allclose(found_N, flat(jax.tree.leaves(island.inner.optimizer)), atol=2e-4)
