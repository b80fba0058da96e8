"""A run that others join with their own credentials, on real processes: TLS, roles and signatures together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.process import connect_to
from archipelago.broker.redis.transport import RedisTransport
from archipelago.ops.launch.redis_program import has_tls
from tests.conftest import Until
from tests.servers import redis_program

pytestmark = [pytest.mark.full, pytest.mark.processes]

STEPS = "--inner.steps=100000"


def started(stack: ExitStack, folder: Path, *arguments: str, path: str = "") -> subprocess.Popen[bytes]:
    """Start a command in a folder. Its output goes to the file `log` there."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "archipelago.ops", *arguments], cwd=folder,
        env={**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL, stderr=stack.enter_context((folder / "log").open("ab")),
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGTERM)
    return process


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def refusals(transport: RedisTransport) -> list[Any]:
    """Return what Redis has refused to logged-in users since it started."""
    found = transport.connection.redis.acl_log()
    return [entry for entry in found if entry["reason"] != "auth"]


def test_an_invited_island_trains_until_it_is_revoked(tmp_path: Path, stack: ExitStack, until: Until) -> None:
    program = redis_program(tmp_path)
    if not has_tls(program):
        pytest.skip("this Redis has no TLS")
    hub, site = tmp_path / "hub", tmp_path / "site"
    up = ["up", "--open", "--host", "localhost", "--run", "demo", "--islands", "1", "--no-one-process", STEPS]
    started(stack, hub, *up, path=str(tmp_path))
    until((hub / "runs/demo/joins/island-0.join").exists, "the join files of our own processes")
    assert "archipelago island demo.NAME.join" in (hub / "log").read_text()
    invited = started(stack, hub, "invite", "oslo", "--run", "demo", "--out", str(tmp_path / "oslo.join"))
    assert invited.wait() == 0
    island = started(stack, site, "island", str(tmp_path / "oslo.join"))
    transport = connect_to(str(hub / "runs/demo/admin.join"), None)
    stack.callback(transport.close)

    def merged(name: str) -> bool:
        return any(part.island == name for entry in transport.reader.tape(50) for part in entry.members)

    until(lambda: merged("oslo") and merged("island-0"), "contributions of both islands", seconds=600.0)
    until(lambda: transport.reader.evaluations(), "an evaluation by its own user")
    assert refusals(transport) == []  # every process can do all that its code wants to do
    assert started(stack, hub, "revoke", "oslo", "--run", "demo").wait() == 0
    until(lambda: island.poll() is not None, "the revoked island to leave")
    assert island.returncode == 2
    assert "revoked" in (site / "log").read_text()
    last = transport.reader.books().merged
    until(lambda: transport.reader.books().merged > last + 3, "the others to go on")
