"""Mistakes in starting an island over several hosts: one sentence on each process, and no traceback."""

from __future__ import annotations

import subprocess

import pytest

from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_probe import two_free_ports
from tests.harness.processes import SETTINGS, Processes

pytestmark = [pytest.mark.full, pytest.mark.processes]

TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def errors(processes: Processes, process: subprocess.Popen[str]) -> str:
    """Return the error of a process, after checking that it is the only one."""
    said = processes.said(process)
    assert "Traceback" not in said, said
    found = [line for line in said.splitlines() if line.startswith("error")]
    assert len(found) == 1, said
    return found[0]


def test_each_host_says_one_sentence(processes: Processes, server: Server) -> None:
    at = {"ARCHIPELAGO_URL": server.url, "ARCHIPELAGO_RUN": "mistakes", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    made = processes.start("init", "--run=mistakes", "--model.size=tiny", *SETTINGS, **at)
    assert made.wait() == 0, processes.said(made)

    def start(rank: int, port: int, *flags: str, **more: str) -> subprocess.Popen[str]:
        place = (f"--coordinator=127.0.0.1:{port}", "--hosts=2", f"--host-rank={rank}")
        return processes.start("island", "--name=two", *place, *flags, **{**at, **more})

    patient, hasty = "--wait-seconds=300", "--wait-seconds=1"
    for leader, other, word in [
        ([], TWO_DEVICES, "devices"),
        (["--mesh=data=2"], ["--mesh=fsdp=2"], "--mesh"),
        (["--mesh=data=8"], ["--mesh=data=8"], "8 devices"),
        (["--batch-size=1"], ["--batch-size=1"], "its mesh has 1"),
    ]:
        port, more = two_free_ports(), other if isinstance(other, dict) else {}
        both = [start(0, port, patient, *leader), start(1, port, patient, *(() if more else other), **more)]
        assert [process.wait() for process in both] == [2, 2], [processes.said(process) for process in both]
        for process in both:
            assert word in errors(processes, process)

    port = two_free_ports()
    alone = [start(rank, port if rank else two_free_ports(), hasty) for rank in (0, 1)]
    assert [process.wait() for process in alone] == [75, 75]
    assert "the hosts 1 of this island have not come" in errors(processes, alone[0])
    assert "the leader of this island does not answer" in errors(processes, alone[1])

    port = two_free_ports()
    waiting = start(0, port, patient)
    stranger = start(1, port, patient, ARCHIPELAGO_URL=f"{server.url}?other")
    assert stranger.wait() == 2
    assert "does not know this process" in errors(processes, stranger)
    assert waiting.poll() is None
