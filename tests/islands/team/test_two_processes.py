"""Islands on a mesh over two processes of two devices each: fsdp, and their own checkpoints.

The small model of the tests for meshes trains in virtual time, so two processes play all parts.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.islands.mesh.sharded_runs import ONE, MeshRun
from tests.islands.team.starting import two_processes
from tests.islands.team.two_processes import STEPS, flat


@pytest.mark.full
@pytest.mark.processes
def test_two_processes_train_as_one_device_and_restore_their_checkpoints(tmp_path: Path) -> None:
    with two_processes("tests.islands.team.two_processes", tmp_path) as both:
        assert both.wait() == [0, 0], both.said()
    run = MeshRun()
    island = run.island(ONE)
    run.play(island, STEPS)
    found_N = np.frombuffer((tmp_path / "moments.bytes").read_bytes(), np.float32)
    np.testing.assert_allclose(found_N, flat(jax.tree.leaves(island.inner.optimizer)), atol=2e-4)
