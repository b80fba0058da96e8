"""Real processes on a real server: `up`, the single commands, outages, and the end of all processes."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from archipelago.broker.manifest import Manifest
from archipelago.broker.redis.transport import connect
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.launch.redis_probe import free_port
from tests.conftest import Until, gone
from tests.harness.processes import SETTINGS, Processes, balanced, rounds_of, seen_island, url_of, view

pytestmark = [pytest.mark.full, pytest.mark.processes]


def test_up_trains_reports_and_continues(processes: Processes, tmp_path: Path, until: Until) -> None:
    """The test presses Ctrl-C, and then runs the same command to its end."""
    args = ["up", "--run=job", "--islands=2", "--inner.steps=1500", "--evaluate-every=2", *SETTINGS]
    first = processes.start(*args)
    config = tmp_path / "runs/job/redis/server.conf"
    until(lambda: rounds_of(config, "job") >= 4, "some rounds")
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130, processes.said(first)
    interrupted = json.loads((tmp_path / "runs/job/report.json").read_text())
    assert not interrupted["finished"]
    assert interrupted["pending"] == 0

    found = processes.run(*args)
    assert found["finished"]
    assert found["steps"] >= 1500
    assert found["rounds"] > interrupted["rounds"] > 0
    assert found["tokens_merged"] > interrupted["tokens_merged"]
    assert found["held_out_last"] < 0.7 * found["held_out_first"]
    assert found["held_out_one_process"] < 0.7 * found["held_out_first"]
    assert found["pending"] == 0
    assert found["contributions"] == found["merged"] + found["refused"]
    assert found == json.loads((tmp_path / "runs/job/report.json").read_text())
    for key in ("tokens_per_second", "bytes_up", "bytes_down", "islands"):
        assert found[key] > 0, key
    assert (tmp_path / "runs/job/loss.png").read_bytes().startswith(b"\x89PNG")
    logs = (tmp_path / "runs/job/logs/island-0.log").read_text()
    assert "optimiser state: own checkpoint" in logs or "optimiser state: peer" in logs


def test_up_extends_a_finished_run(processes: Processes) -> None:
    args = ["up", "--run=longer", "--islands=1", "--no-one-process", *SETTINGS]
    first = processes.run(*args, "--inner.steps=40")
    second = processes.run(*args, "--inner.steps=120")
    assert (first["finished"], second["finished"]) == (True, True)
    assert first["steps"] < 120 <= second["steps"]
    refused = processes.start(*args, "--inner.steps=90")
    assert refused.wait() == 2
    assert "Traceback" not in processes.said(refused)


def test_up_starts_a_killed_redis_and_merger_again(processes: Processes, tmp_path: Path, until: Until) -> None:
    launcher = processes.start("up", "--run=storm", "--islands=1", "--inner.steps=100000", *SETTINGS)
    config = tmp_path / "runs/storm/redis/server.conf"
    until(lambda: rounds_of(config, "storm") >= 4, "some rounds")
    for name in (str(config), "archipelago.merger"):  # Words of their command lines.
        victim = next(c for c in psutil.Process(launcher.pid).children(recursive=True) if name in " ".join(c.cmdline()))
        before = rounds_of(config, "storm")
        victim.kill()
        until(lambda before=before: rounds_of(config, "storm") > before + 4, f"rounds after the {name} died")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait() == 130
    report = json.loads((tmp_path / "runs/storm/report.json").read_text())
    assert report["pending"] == 0
    assert "Traceback" not in processes.said(launcher)


def test_no_process_survives_a_killed_launcher(processes: Processes, until: Until) -> None:
    launcher = processes.start("up", "--run=killed", "--islands=1", "--inner.steps=100000", *SETTINGS)
    us = psutil.Process(launcher.pid)
    until(lambda: len(us.children(recursive=True)) >= 3, "server, merger and island")
    children = us.children(recursive=True)
    launcher.kill()
    launcher.wait()
    until(lambda: all(gone(child.pid) for child in children), "all processes to end")


def test_the_single_commands_make_a_run(processes: Processes, server: Server, until: Until) -> None:
    """A third island joins with the URL and the name of the run alone, and one leaves on SIGTERM."""
    url, run = server.url, "by-hand"
    made = processes.run("init", url, "--run", run, "--inner.steps=100000", *SETTINGS)
    assert made["created"]
    assert not processes.run("init", url, "--run", run, "--inner.steps=100000", *SETTINGS)["created"]
    processes.start("merger", url, "--run", run)
    islands = [processes.start("island", url, "--run", run, "--name", name) for name in ("one", "two")]
    until(lambda: view(url, run).participating == 2, "two islands to participate")
    islands.append(processes.start("island", ARCHIPELAGO_URL=url, ARCHIPELAGO_RUN=run))
    until(lambda: view(url, run).participating == 3, "the newcomer to participate")
    seen = processes.run("status", url, "--run", run)
    assert (seen["live"], seen["known"]) == (3, 3)
    assert {island["state"] for island in seen["islands"]} == {"training"}

    islands[0].send_signal(signal.SIGTERM)
    assert islands[0].wait() == 0, processes.said(islands[0])
    left = view(url, run)
    assert seen_island(left, "one").state == "left"
    until(lambda: view(url, run).live == 2, "the island to be gone")
    rounds = view(url, run).rounds
    until(lambda: view(url, run).rounds > rounds + 6, "the others to continue")
    until(lambda: view(url, run).evaluated_round > rounds, "one of the others to evaluate the published parameters")
    assert view(url, run).evaluated_by != "one"
    assert view(url, run).books.refused == 0
    until(lambda: balanced(view(url, run)), "balanced books")
    transport = connect(url, run)
    assert sum(member.island == "one" for entry in transport.reader.tape(100_000) for member in entry.members) > 0
    transport.close()


def test_a_killed_merger_is_replaced_by_a_waiting_one(processes: Processes, server: Server, until: Until) -> None:
    url, run = server.url, "standby"
    processes.run("init", url, "--run", run, "--inner.steps=100000", *SETTINGS)
    first = processes.start("merger", url, "--run", run)
    processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: view(url, run).rounds >= 4, "some rounds")
    processes.start("merger", url, "--run", run)
    first.kill()
    rounds = view(url, run).rounds
    until(lambda: view(url, run).rounds > rounds + 4, "the second merger to continue")
    until(lambda: balanced(view(url, run)), "balanced books")


def test_mergers_and_standbys_end_with_their_run(processes: Processes, server: Server, until: Until) -> None:
    url, run = server.url, "ending"
    processes.run("init", url, "--run", run, "--inner.steps=36", *SETTINGS)
    mergers = [processes.start("merger", url, "--run", run, "--folder", f"m{n}", "--json") for n in range(2)]
    transport = connect(url, run)
    until(lambda: len(transport.reader.standbys()) == 1, "the second merger to stand by")
    processes.run("island", url, "--run", run, "--name", "one", "--scan-steps=1")
    for merger in mergers:
        out, _ = merger.communicate()
        assert merger.returncode == 0, processes.said(merger)
        assert json.loads(out)["finished"] is True
    assert transport.reader.standbys() == []
    assert balanced(view(url, run))
    assert processes.run("rm", run, url, "--yes")["keys"] > 0
    assert run not in transport.reader.runs()
    transport.close()


def test_a_standby_becomes_the_island_that_is_killed(processes: Processes, tmp_path: Path, until: Until) -> None:
    """It takes the name and the log of the island, and is no island before that."""
    args = ["up", "--run=job", "--islands=2", "--standbys=1", "--inner.steps=100000", *SETTINGS]
    launcher = processes.start(*args)
    logs, config = tmp_path / "runs/job/logs", tmp_path / "runs/job/redis/server.conf"

    def training() -> dict[str, int]:
        transport = connect(url_of(config), "job")
        try:
            return {p.heartbeat.island: p.heartbeat.pid for p in transport.reader.presences() if p.is_training}
        finally:
            transport.close()

    until(lambda: rounds_of(config, "job") >= 2, "some rounds")
    until(lambda: "ready" in _text(logs / "standby-0.log"), "the standby")
    until(lambda: sorted(training()) == ["island-0", "island-1"], "both islands to train")
    (standby,) = _pids("--standby", launcher.pid)
    os.kill(training()["island-1"], signal.SIGKILL)
    until(lambda: training().get("island-1") == standby, "the standby to train as the island")
    until(lambda: len(_pids("--standby", launcher.pid)) == 2, "the next standby")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, processes.said(launcher)
    until(lambda: gone(standby) and not _pids("--standby", launcher.pid), "all processes to end")
    assert json.loads((tmp_path / "runs/job/report.json").read_text())["pending"] == 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _pids(flag: str, parent: int) -> list[int]:
    """Return the IDs of the launcher's processes with that flag."""
    found = psutil.process_iter(["cmdline", "ppid"])
    return [p.pid for p in found if p.info["ppid"] == parent and flag in (p.info["cmdline"] or ())]


def test_an_outage_of_redis_slows_no_island(processes: Processes, tmp_path: Path, until: Until) -> None:
    """The server is killed and restarts from its append-only file. An island that starts in the outage waits for it."""
    run, folder = "outage", tmp_path / "redis"
    server = start_server(folder)
    url = server.url
    processes.run("init", url, "--run", run, "--inner.steps=100000", *SETTINGS)
    processes.start("merger", url, "--run", run)
    island = processes.start("island", url, "--run", run, "--name", "one")
    until(lambda: view(url, run).rounds >= 4, "some rounds")
    before, printed = view(url, run), processes.said(island)
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    died = time.monotonic()
    until(lambda: processes.said(island) != printed, "the island to notice")
    newcomer = processes.start("island", url, "--run", run, "--name", "two")
    until(lambda: processes.said(newcomer), "the newcomer to notice")
    until(lambda: time.monotonic() - died > 2.0, "an outage of two seconds")
    assert island.poll() is None
    with start_server(folder) as again:
        assert again.url == url
        back = view(url, run)
        assert back.rounds >= before.rounds - 1
        until(lambda: view(url, run).rounds > before.rounds + 4, "rounds to continue")
        said = seen_island(before, "one").steps
        until(lambda: seen_island(view(url, run), "one").steps != said, "its next heartbeat")
        after = seen_island(view(url, run), "one")
        until(lambda: view(url, run).participating == 2, "the newcomer to participate")
        assert after.steps - said > 0.3 * 2.0 / max(after.step_seconds, 1e-3), "the island stood still"
        until(lambda: balanced(view(url, run)), "balanced books")
        processes.end()


def test_init_with_another_config_is_refused(processes: Processes, server: Server) -> None:
    url, run = server.url, "other-config"
    processes.run("init", url, "--run", run, *SETTINGS)
    other = processes.start("init", url, "--run", run, *SETTINGS, "--outer.learning-rate=0.3")
    assert other.wait() == 2
    said = processes.said(other)
    assert "Traceback" not in said
    transport = connect(url, run)
    manifest: Manifest = transport.reader.manifest()
    transport.close()
    assert manifest.config.outer.learning_rate == 0.7


def test_an_island_with_another_text_is_refused(processes: Processes, server: Server, tmp_path: Path) -> None:
    url, run = server.url, "other-text"
    processes.run("init", url, "--run", run, *SETTINGS)
    text = tmp_path / "other.txt"
    text.write_text("another text entirely\n" * 10_000)
    environment = {"ARCHIPELAGO_DATA": str(tmp_path / "other-corpora")}
    processes.run("prepare", str(text), "--name", "small-text", **environment)
    island = processes.start("island", url, "--run", run, **environment)
    assert island.wait() == 2
    said = processes.said(island)
    assert "Traceback" not in said


def scraped(port: int) -> dict[str, float]:
    """Return the values of a worker's metrics by name; nothing while it does not serve them."""
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    except OSError:
        return {}
    with answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def probed(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def test_workers_serve_metrics_write_curves_and_log_json(
    processes: Processes, server: Server, tmp_path: Path, until: Until
) -> None:
    url, run = server.url, "observed"
    processes.run("init", url, "--run", run, "--inner.steps=100000", *SETTINGS)
    ports = free_port(), free_port()
    seen = ["--run", run, "--log-json", "--stopped-status=75"]
    merger = processes.start("merger", url, *seen, f"--metrics-port={ports[0]}", "--checkpoint-every=0")
    island = processes.start("island", url, *seen, f"--metrics-port={ports[1]}", "--name=oslo")
    until(lambda: scraped(ports[0]).get("archipelago_merger_round", 0) >= 6, "some rounds")
    until(lambda: scraped(ports[1]).get("archipelago_island_loss", 0) > 0, "a loss")
    probes = [(port, path) for port in ports for path in ("healthz", "readyz")]
    assert [probed(*probe) for probe in probes] == ["serving\n"] * 2 + ["training\n"] * 2
    curves = tmp_path / "runs" / run
    for folder in (curves / "islands/oslo/tensorboard", curves / "merger/tensorboard"):
        until(lambda folder=folder: any(path.stat().st_size > 100 for path in folder.glob("*tfevents*")), str(folder))
    for worker in (island, merger):
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 75, processes.said(worker)
    for worker, who in ((merger, "merger"), (island, "oslo")):
        lines = [json.loads(line) for line in processes.said(worker).splitlines()]
        assert {said["who"] for said in lines} == {who}
        assert {said["run"] for said in lines} == {run}
        assert {said.get("island") for said in lines} == {"oslo" if worker is island else None}
        assert any(said.get("round", 0) > 0 for said in lines) or worker is island
        assert all({"time", "level", "message"} <= said.keys() for said in lines)
