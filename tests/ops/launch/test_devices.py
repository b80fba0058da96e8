"""`up` gives each island accelerators of its own, and refuses what the machine cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.islands.mesh import MeshShape
from archipelago.ops.launch import devices, up
from archipelago.ops.launch.devices import Accelerators, accelerators, shared_out
from archipelago.ops.launch.local_run import LocalRun
from archipelago.ops.launch.up import UpOptions
from tests import samples
from tests.failing import failing

FOUR = Accelerators("cuda", ("0", "1", "2", "3"), "H100")
TPU = Accelerators("tpu", ("0", "1", "2", "3"), "TPU v4")


def test_each_island_gets_equally_many() -> None:
    assert accelerators({"JAX_PLATFORMS": "cpu"}) is None
    assert shared_out(None, 64, 3, mesh=MeshShape(data=8)) is None
    shares = shared_out(FOUR, 2)
    assert shares is not None
    visible = [shares.environment(n) for n in range(2)]
    assert visible == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert len(shares.describe(["a", "b"])) == 2
    odd = shared_out(FOUR, 3)
    assert odd is not None
    assert odd.names == (("0",), ("1",), ("2",))
    assert len(odd.describe(["a", "b", "c"])) == 4, "the fourth is not used"


def test_islands_share_accelerators_only_if_they_may() -> None:
    with failing(code="up.devices"):
        shared_out(FOUR, 5)
    shares = shared_out(FOUR, 5, may_share=True)
    assert shares is not None
    assert shares.names == (("0",), ("1",), ("2",), ("3",), ("0",))


def test_there_are_no_more_islands_than_accelerators_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, islands in ((None, 3), (Accelerators("cuda", ("0",), "H100"), 1), (FOUR, 3)):
        monkeypatch.setattr(up, "accelerators", lambda found=found: found)
        assert up._with_devices(UpOptions())[0].islands == islands


def test_chips_of_a_tpu_belong_to_one_process_and_a_mesh_must_fit_into_a_share() -> None:
    shares = shared_out(TPU, 2)
    assert shares is not None
    assert shares.environment(1) == {
        "TPU_VISIBLE_CHIPS": "2,3", "TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1"
    }  # fmt: skip
    with failing(code="up.devices"):
        shared_out(TPU, 5, may_share=True)
    with failing(code="up.devices"):
        shared_out(TPU, 2, standbys=1)
    assert shared_out(FOUR, 2, mesh=MeshShape(fsdp=2)) is not None
    with failing(code="mesh.devices"):
        shared_out(FOUR, 2, mesh=MeshShape(fsdp=4))


def test_another_process_asks_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    answers: tuple[tuple[str, dict[str, str], tuple[str, ...] | None], ...] = (
        ('["cuda", 2, "H100"]', {}, ("0", "1")),
        ('["cuda", 2, "H100"]', {"CUDA_VISIBLE_DEVICES": "GPU-5, GPU-7"}, ("GPU-5", "GPU-7")),
        ('["cpu", 1, "cpu"]', {}, None),
        ("the driver is broken", {}, None),
    )
    for answer, environ, names in answers:
        done = SimpleNamespace(stdout=f"a warning\n{answer}\n")
        monkeypatch.setattr(subprocess, "run", lambda *given, done=done, **more: done)
        found = accelerators(environ)
        assert (found.names if found else None) == names, answer


@pytest.mark.full
def test_the_question_is_answered_in_a_real_process() -> None:
    """JAX finds a processor here, and the question must not fail before it says so."""
    asked = subprocess.run(
        [sys.executable, "-c", devices._QUESTION], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert asked.stdout.startswith('["cpu", ')


def session_of(options: UpOptions) -> LocalRun:
    """Return a session of `up` on a machine with four accelerators. It has started nothing."""
    manifest = samples.manifest()
    transport: Any = MemoryBroker().connect(manifest.run)
    folder, shares = Path("runs/demo"), shared_out(FOUR, 2)
    return LocalRun(options, manifest, transport, "redis://h", folder, lambda: False, None, {}, shares)


def test_islands_and_standbys_get_their_devices_and_their_mesh() -> None:
    session = session_of(UpOptions(islands=2, standbys=3, mesh="fsdp=2"))
    shown = [child.environment.get("CUDA_VISIBLE_DEVICES") for child in (*session.islands, *session.standbys.all)]
    assert shown == ["0,1", "2,3", "0,1", "2,3", "0,1"]
    for child in (*session.islands, *session.standbys.all):
        assert child.argv[list(child.argv).index("--mesh") + 1] == "fsdp=2"
    assert "CUDA_VISIBLE_DEVICES" not in session.merger.environment
