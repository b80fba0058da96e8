"""The single commands on a real server: a run is created, watched, hit by outages and kills, steered, and deleted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.machine import free_port
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, seen_island, view

pytestmark = [pytest.mark.full, pytest.mark.processes]

RUN = "by-hand"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with start_server(tmp_path / "redis") as running:
        yield running


def probed(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def require_log(said: str, who: str, island: str | None) -> None:
    """Fail unless every line of a log is a JSON object that names its worker."""
    lines = [json.loads(line) for line in said.splitlines()]
    for line in lines:
        assert {"time", "level", "message"} <= line.keys()
        assert (line["who"], line["run"], line.get("island")) == (who, RUN, island)
    assert island or any("round" in line for line in lines)


def test_the_single_commands_make_a_run_that_survives_an_outage(
    processes: Processes, own_server: RedisServer, tmp_path: Path, until: Until
) -> None:
    """It is watched, a standby replaces its killed merger, an island leaves on SIGTERM, and the run ends.

    Redis is killed and restarts from its append-only file. An island that starts in the outage waits for it.
    """
    url = own_server.url
    init = ["init", url, "--run", RUN, "--inner.steps=1000000", *SETTINGS]
    assert processes.run(*init)["created"]
    assert not processes.run(*init)["created"]
    ports, seen = (free_port(), free_port()), ["--run", RUN, "--log-json"]
    merger = processes.start("merger", url, *seen, f"--probe-port={ports[0]}", "--stopped-status=75", "--folder=m0")
    oslo = processes.start("island", url, *seen, f"--probe-port={ports[1]}", "--name=oslo", "--stopped-status=75")
    two = processes.start("island", "--evaluate-every=1", "--name=two", ARCHIPELAGO_URL=url, ARCHIPELAGO_RUN=RUN)
    until(lambda: view(url, RUN).participating == 2, "two islands to participate")
    until(lambda: view(url, RUN).rounds >= 6, "some rounds")
    probes = [(port, path) for port in ports for path in ("healthz", "readyz")]
    assert [probed(*probe) for probe in probes] == ["serving\n"] * 2 + ["training\n"] * 2
    for folder in (tmp_path / "runs" / RUN / "islands/oslo/tensorboard", tmp_path / "m0/tensorboard"):
        until(lambda folder=folder: any(path.stat().st_size > 100 for path in folder.glob("*tfevents*")), str(folder))
    status = processes.run("status", url, "--run", RUN)
    assert (status["live"], status["known"]) == (2, 2)
    assert {island["state"] for island in status["islands"]} == {"training"}

    standby, transport = (
        processes.start("merger", url, "--run", RUN, "--folder=m1", "--json", "--threads=5"),
        connect(url, RUN),
    )
    until(lambda: len(transport.reader.standbys()) == 1, "the second merger to stand by")
    until(lambda: re.search(r'"round": [0-9]', processes.said(merger)), "a line about a round")
    merger.kill()
    rounds = view(url, RUN).rounds
    until(lambda: view(url, RUN).rounds > rounds + 4, "the second merger to continue")
    require_log(processes.said(merger), "merger", None)
    tasks = Path(f"/proc/{standby.pid}/task").glob("*/comm")
    assert [task.read_text() for task in tasks].count("tf_XLAEigen\n") == 5

    oslo.send_signal(signal.SIGTERM)
    processes.ended(oslo, status=75)
    require_log(processes.said(oslo), "oslo", "oslo")
    assert seen_island(view(url, RUN), "oslo").state == "left"
    rounds = view(url, RUN).rounds
    until(lambda: view(url, RUN).evaluations[-1].round > rounds, "the other one to evaluate the published parameters")
    assert view(url, RUN).evaluations[-1].by != "oslo"
    assert any(member.island == "oslo" for entry in transport.reader.tape(100_000) for member in entry.members)
    transport.close()

    before, printed = view(url, RUN), processes.said(two)
    os.kill(own_server.pid, signal.SIGKILL)
    own_server.close()
    died = time.monotonic()
    until(lambda: processes.said(two) != printed, "the island to notice")
    newcomer = processes.start("island", url, "--run", RUN, "--name", "new")
    until(lambda: processes.said(newcomer), "the newcomer to notice")
    until(lambda: time.monotonic() - died > 2.0, "an outage of two seconds")
    assert two.poll() is None
    with start_server(tmp_path / "redis") as again:
        assert again.url == url
        assert view(url, RUN).rounds >= before.rounds - 1
        until(lambda: view(url, RUN).rounds > before.rounds + 4, "rounds to continue")
        said = seen_island(before, "two").steps
        until(lambda: seen_island(view(url, RUN), "two").steps != said, "its next heartbeat")
        after = seen_island(view(url, RUN), "two")
        assert after.steps - said > 0.3 * 2.0 / max(after.step_seconds, 1e-3), "the island stood still"
        until(lambda: view(url, RUN).participating == 2, "the newcomer to participate")

        steps = view(url, RUN).step + 50
        processes.ended(processes.start("steer", url, "--run", RUN, f"inner.steps={steps}"))
        for island in (two, newcomer):
            processes.ended(island)
        assert json.loads(processes.ended(standby))["finished"] is True
        assert view(url, RUN).counters.refused == 0
        assert view(url, RUN).pending == 0
        assert processes.run("rm", RUN, url, "--yes")["keys"] > 0
        transport = connect(url, RUN)
        assert transport.reader.standbys() == []
        assert RUN not in transport.reader.runs()
        transport.close()
