"""One island of two processes with two devices each, beside an island of one device, in real processes."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from archipelago.broker.machine import free_port
from archipelago.islands.checkpoint import FILE
from archipelago.ops.launch.embedded_redis import RedisServer
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, view

pytestmark = [pytest.mark.full, pytest.mark.processes]

RUN = "hosts"
#: Two devices in each process.
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def test_two_hosts_train_lose_each_other_and_come_back_together(
    processes: Processes, server: RedisServer, until: Until
) -> None:
    """A host that is killed ends the other one. Their state comes from their checkpoint."""
    url = server.url
    processes.environment |= {"ARCHIPELAGO_URL": url, "ARCHIPELAGO_RUN": RUN}
    processes.ended(processes.start("init", f"--run={RUN}", "--inner.steps=100000", *SETTINGS))
    processes.start("merger", "--checkpoint-every=2")
    place = ["--name=two", f"--coordinator=127.0.0.1:{free_port()}", "--hosts=2", "--wait-seconds=300"]

    def start(rank: int, mesh: str = "fsdp=4") -> subprocess.Popen[str]:
        return processes.start("island", *place, f"--mesh={mesh}", f"--host-rank={rank}", **FLAGS)

    def started() -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        both = start(0), start(1)
        until(lambda: joined(both[0]) or any(host.poll() is not None for host in both), "the island of two hosts")
        assert [host.poll() for host in both] == [None, None], processes.said(both[0])
        return both

    def joined(island: subprocess.Popen[str]) -> bool:
        return f"joined {RUN}" in processes.said(island)

    def rounds() -> int:
        return view(url, RUN).rounds

    for host in (start(0), start(1, "data=4")):
        processes.ended(host, status=2)
        assert "hosts.disagree" in processes.said(host)
    leader, other = started()
    assert "4 cpu (fsdp=4)" in processes.said(leader)
    folder = Path(f"runs/{RUN}/islands/two")
    until(lambda: rounds() >= 2 and (folder / FILE).exists(), "the state of the island on its disk")
    other.kill()
    assert leader.wait() in (75, -signal.SIGABRT), "it notices itself, or JAX does"
    assert ("another process of this island is lost" in processes.said(leader)) == (leader.returncode == 75)

    before = rounds()
    leader, other = started()
    assert "optimiser state: own checkpoint" in processes.said(leader)
    one = processes.start("island", "--name=one", "--evaluate-every=0")
    until(lambda: joined(one), "an island of one device")
    assert "optimiser state: peer two" in processes.said(one)
    until(lambda: rounds() >= before + 4, "rounds of both")
    for process in (other, one):
        process.terminate()
    for process in (leader, other, one):
        processes.ended(process)
    until(lambda: view(url, RUN).pending == 0, "the last contributions to be merged")
