"""The files of `ops/deploy` fit the programs: command lines, probes, grace periods. No orchestrator is needed."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import yaml

from archipelago.broker.machine import free_port
from archipelago.broker.observe.probes import ALIVE, READY
from archipelago.broker.process import LEAVE_SECONDS, OUTAGE
from archipelago.islands.sync.leaving import FAREWELL_SECONDS, FLUSH_SECONDS
from archipelago.ops.launch.embedded_redis import find_program
from tests.test_documents import require_parsable

DEPLOY = Path(__file__).parents[3] / "ops" / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def parts(value: object, key: str) -> Iterator[Any]:
    """Yield the values of that key, at any depth."""
    if isinstance(value, dict):
        yield from (value[key] for found in value if found == key)
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from parts(part, key)


def containers() -> list[dict[str, Any]]:
    """Return all containers of Archipelago in the files for Kubernetes."""
    found = [each for path in KUBERNETES for document in documents(path) for each in parts(document, "containers")]
    return [container for each in found for container in each if container["image"] == "archipelago"]


def is_worker(container: dict[str, Any]) -> bool:
    return container["image"] == "archipelago" and container["args"][0] in ("island", "merger")


def command_lines() -> list[list[str]]:
    """Return the arguments of every call of `archipelago`."""
    lines = [list(map(str, container["args"])) for container in containers()]
    services = documents(DEPLOY / "compose.yaml")[0]["services"].values()
    lines += [service["command"] for service in services if "command" in service]
    texts = [unit["Service"]["ExecStart"] for unit in units().values()]
    texts += [documents(path)[0]["run"] for path in sorted((DEPLOY / "skypilot").glob("*.yaml"))]
    texts += [(DEPLOY / "slurm" / "worker.sbatch").read_text(encoding="utf-8").replace('"$kind"', "island")]
    for text in texts:
        plain = re.sub(r'"?\$(?:@|\{[^}]*\}|\(?\w+\)?)"?|%i', "x1", text.replace("\\\n", " "))
        lines += [
            shlex.split(line) for line in re.findall(r"(?:bin/|srun )archipelago +((?:island|merger|up) .*)", plain)
        ]
    return [[re.sub(r"\$\(\w+\)|\$\{.*\}", "x1", word) for word in line] for line in lines]


def units() -> dict[str, configparser.ConfigParser]:
    """Return the units of systemd by their names."""
    found = {}
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        found[path.name] = configparser.ConfigParser(interpolation=None, strict=True)
        found[path.name].optionxform = str  # type: ignore[assignment, method-assign]
        found[path.name].read_string(path.read_text(encoding="utf-8"))
    return found


def test_every_command_line_can_be_parsed() -> None:
    lines = command_lines()
    assert {line[0] for line in lines} == {"init", "island", "merger", "dash", "up"}
    assert len(lines) >= 12
    for line in lines:
        words = ["small" if before == "--model.size" else word for before, word in zip(["", *line], line, strict=False)]
        require_parsable([word for word in words if word not in ("--config", "/config/run.toml")], "ops/deploy")


def test_workers_have_the_time_that_they_need_to_leave() -> None:
    assert LEAVE_SECONDS > 2 * (FLUSH_SECONDS + FAREWELL_SECONDS)
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]
    assert all(int(service["stop_grace_period"].removesuffix("s")) >= LEAVE_SECONDS for service in compose.values())
    pods = [pod for path in KUBERNETES for document in documents(path) for pod in parts(document, "spec")]
    workers = [pod for pod in pods if any(map(is_worker, pod.get("containers", [])))]
    assert len(workers) == 4
    assert all(pod["terminationGracePeriodSeconds"] >= LEAVE_SECONDS for pod in workers)
    assert all(int(unit["Service"]["TimeoutStopSec"]) >= LEAVE_SECONDS for unit in units().values())
    signal = re.search(r"^#SBATCH --signal=TERM@(\d+)$", (DEPLOY / "slurm/worker.sbatch").read_text(), re.MULTILINE)
    assert signal is not None and int(signal[1]) >= LEAVE_SECONDS


def test_a_stopped_worker_is_started_again_where_only_failures_are() -> None:
    for container in containers():
        if is_worker(container):
            assert f"--stopped-status={OUTAGE}" in container["args"]
    policies = [policy for path in KUBERNETES for each in documents(path) for policy in parts(each, "podFailurePolicy")]
    codes = [rule["onExitCodes"] for policy in policies for rule in policy["rules"] if "onExitCodes" in rule]
    assert [code["values"] for code in codes].count([OUTAGE]) == 4
    recovered = documents(DEPLOY / "skypilot/island.yaml")[0]["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert OUTAGE in recovered


def test_probes_ask_for_pages_that_workers_serve() -> None:
    for container in containers():
        probes = {name: value["httpGet"]["path"] for name, value in container.items() if name.endswith("Probe")}
        if is_worker(container):
            assert probes["livenessProbe"] == ALIVE
            assert probes["startupProbe"] == READY
            port = container["ports"][0]["containerPort"]
            assert f"--probe-port={port}" in container["args"]
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert f"http://127.0.0.1:9310{ALIVE}" in compose


def test_an_island_on_a_spot_machine_takes_the_content_of_a_join_file(tmp_path: Path) -> None:
    program = tmp_path / "archipelago" / "bin" / "archipelago"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$ARCHIPELAGO_URL"\n', encoding="utf-8")
    program.chmod(0o755)
    run = documents(DEPLOY / "skypilot/island.yaml")[0]["run"]
    for given, used in (('{"name": "oslo"}', f"{tmp_path}/island.join"), ("redis://HOST:6379", "redis://HOST:6379")):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ISLAND": "", "ARCHIPELAGO_URL": given}
        assert subprocess.check_output(["/bin/sh", "-c", run], env=environment, text=True).strip() == used
    join = tmp_path / "island.join"
    assert (join.read_text(encoding="utf-8"), join.stat().st_mode & 0o777) == ('{"name": "oslo"}', 0o600)


def test_a_redis_without_a_usable_password_says_so(tmp_path: Path) -> None:
    for password in ("", "two words", "a@b"):
        done = subprocess.run(
            ["/bin/sh", str(DEPLOY / "kubernetes/redis/redis.sh")],
            env={"PATH": os.environ["PATH"], "REDIS_PASSWORD": password, "REDIS_FOLDER": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1 and "REDIS_PASSWORD" in done.stderr
        assert not list(tmp_path.iterdir())


def test_the_users_of_the_redis_survive_its_restart(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(str(find_program().path))
    port = free_port()
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "REDIS_PASSWORD": "first-1",
        "REDIS_FOLDER": str(tmp_path),
        "REDIS_PORT": str(port),
    }
    for start, password in enumerate(["first-1", "second_2"]):
        environment["REDIS_PASSWORD"] = password
        process = subprocess.Popen(
            ["/bin/sh", str(DEPLOY / "kubernetes/redis/redis.sh")], env=environment, stdout=subprocess.DEVNULL
        )
        try:
            client = connected(port, password)
            if start == 0:
                client.execute_command("ACL", "SETUSER", "oslo", "on", ">secret", "~x", "+get")
                client.execute_command("ACL", "SAVE")
                client.set("x", "1")
            assert {"default", "oslo"} == set(client.acl_users())
            assert client.get("x") == b"1"
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            client.close()
        finally:
            process.terminate()
            process.wait()


def connected(port: int, password: str) -> Any:
    client = redis.Redis(port=port, password=password)
    deadline = time.monotonic() + 60.0
    while True:
        try:
            client.ping()
        except (redis.ConnectionError, redis.BusyLoadingError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)
            continue
        return client
