"""One island of two processes with two devices each, beside an island of one device, in real processes."""

from __future__ import annotations

import signal

import pytest

from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_probe import two_free_ports
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, view

pytestmark = [pytest.mark.full, pytest.mark.processes]

FLAGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def test_two_hosts_train_sync_hand_over_and_end_together(
    processes: Processes,
    server: Server,
    until: Until,
) -> None:
    url = server.url
    at = {"ARCHIPELAGO_URL": url, "ARCHIPELAGO_RUN": "hosts"}
    made = processes.start("init", "--run=hosts", "--model.size=tiny", "--inner.steps=100000", *SETTINGS, **at)
    assert made.wait() == 0, processes.said(made)
    processes.start("merger", **at)
    port = two_free_ports()

    def start(rank: int) -> list[str]:
        return ["island", "--name=two", f"--coordinator=127.0.0.1:{port}", "--hosts=2", f"--host-rank={rank}"]

    hosts = [processes.start(*start(rank), "--wait-seconds=300", **at, **FLAGS) for rank in (0, 1)]

    def rounds() -> int:
        return view(url, "hosts").rounds

    until(lambda: rounds() >= 2 or any(host.poll() is not None for host in hosts), "rounds of two hosts")
    assert [host.poll() for host in hosts] == [None, None]
    assert "4 cpu (data=4)" in processes.said(hosts[0])

    twice = processes.start(*start(1), **at, **FLAGS)
    assert twice.wait() == 2, processes.said(twice)

    one = processes.start("island", "--name=one", "--evaluate-every=0", **at)
    until(lambda: "joined hosts" in processes.said(one), "an island of one device")
    assert "optimiser state: peer two" in processes.said(one)
    before = rounds()
    until(lambda: rounds() >= before + 4, "rounds of both")

    hosts[1].send_signal(signal.SIGKILL)
    assert hosts[0].wait() == 75, processes.said(hosts[0])
    assert "host 1 of this island is lost" in processes.said(hosts[0])

    again = [processes.start(*start(rank), "--wait-seconds=300", **at, **FLAGS) for rank in (0, 1)]
    until(lambda: "joined hosts" in processes.said(again[0]), "the island of two hosts again")
    assert "optimiser state: peer one" in processes.said(again[0])
    again[0].send_signal(signal.SIGKILL)
    assert again[1].wait() == 75, processes.said(again[1])
    assert "the leader of this island is lost" in processes.said(again[1])
    one.send_signal(signal.SIGTERM)
    assert one.wait() == 0
