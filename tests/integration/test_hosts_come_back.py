"""An island of two processes that are both killed: it comes back from its own checkpoint, alone or with its run."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from archipelago.broker.redis.transport import connect
from archipelago.islands.checkpoint import IslandStore
from archipelago.merger.storage import MergerFolder
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.launch.redis_probe import two_free_ports
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, balanced, view

pytestmark = [pytest.mark.full, pytest.mark.processes]


def kill(*killed: subprocess.Popen[str]) -> None:
    for process in killed:
        process.kill()
        process.wait()


def test_an_island_of_two_hosts_comes_back_from_its_checkpoint(
    processes: Processes,
    server: Server,
    until: Until,
) -> None:
    at = {"ARCHIPELAGO_URL": server.url, "ARCHIPELAGO_RUN": "back", "JAX_PLATFORMS": "cpu"}
    made = processes.start("init", "--run=back", "--model.size=tiny", "--inner.steps=100000", *SETTINGS, **at)
    assert made.wait() == 0, processes.said(made)
    merger = processes.start("merger", "--checkpoint-every=2", **at)
    place = ("--name=two", f"--coordinator=127.0.0.1:{two_free_ports()}", "--hosts=2", "--wait-seconds=300")

    def start() -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        one, other = (
            processes.start("island", *place, "--evaluate-every=0", f"--host-rank={rank}", **at) for rank in (0, 1)
        )
        until(lambda: "joined back" in processes.said(one) or one.poll() is not None, "the island of two hosts")
        assert one.poll() is None, processes.said(one)
        return one, other

    def rounds() -> int:
        return view(server.url, "back").rounds

    first = start()
    folder = Path("runs/back/islands/two")
    until(lambda: rounds() >= 2 and any(path.name.isdecimal() for path in folder.glob("*")), "a checkpoint")
    kill(*first)

    # No peer has the optimiser's state.
    before, second = rounds(), start()
    assert "optimiser state: own checkpoint" in processes.said(second[0])
    until(lambda: rounds() >= before + 2, "rounds of the island from its checkpoint")
    until(lambda: balanced(view(server.url, "back")), "balanced books")

    # Redis loses the run. It goes back to a checkpoint, and so does the island, whole.
    transport = connect(server.url, "back")
    theirs, own = MergerFolder(Path("runs/back/merger")).store, IslandStore(folder, transport.reader.manifest())

    def agree() -> bool:
        """Stop the merger where the island has written the checkpoint of the same number."""
        if own.find(theirs.numbers()[-1]) is None:
            return False
        merger.send_signal(signal.SIGSTOP)
        if own.find(theirs.numbers()[-1]) is None:
            merger.send_signal(signal.SIGCONT)
            return False
        return True

    until(agree, "the island's checkpoint of the same number")
    kill(merger, *second)
    number = theirs.numbers()[-1]
    lost = rounds()
    transport.connection.redis.flushall()
    processes.start("merger", "--resume", "--checkpoint-every=2", **at)
    until(lambda: "back" in transport.reader.runs(), "the run")
    transport.close()
    third = start()
    assert f"the island went back with the run to checkpoint {number}" in processes.said(third[0])
    until(lambda: rounds() >= lost + 2, "more rounds than were lost")
    until(lambda: balanced(view(server.url, "back")), "balanced books")
    third[1].terminate()
    assert [process.wait() for process in third] == [0, 0]
