"""One island of two processes on two networks of this machine, whose link is cut: no process ends, and no packet comes.

Each process has a network namespace of its own, and a virtual cable joins them. This needs root on Linux.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.islands.data.corpus import OpenCorpus
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: Redis, the merger and the leader are at the first address, the other process is at the second.
ADDRESSES = ("10.213.7.1", "10.213.7.2")
REDIS = """
import sys
from pathlib import Path
from archipelago.ops.launch.embedded_redis import start_server
with start_server(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


IP = shutil.which("ip") or ""


def ip(*command: str) -> None:
    subprocess.run([IP, *command], check=True, capture_output=True, text=True)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces that a cable joins. The host's name is the address of each in its own."""
    if sys.platform != "linux" or not IP or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, the command ip, and root")
    names = [f"archipelago-{os.getpid()}-{side}" for side in "ab"]
    hosts = [Path("/etc/netns") / name / "hosts" for name in names]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address, file in zip(names, ADDRESSES, hosts, strict=True):
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names[0], names[1]
    finally:
        for name, file in zip(names, hosts, strict=True):
            subprocess.run([IP, "netns", "delete", name], capture_output=True)
            shutil.rmtree(file.parent, ignore_errors=True)


def test_a_cut_link_ends_both_processes(
    networks: tuple[str, str], tmp_path: Path, corpus: OpenCorpus, until: Until
) -> None:
    sides = []
    for name in networks:
        (tmp_path / name).mkdir()
        sides.append(Processes(tmp_path / name, IP, "netns", "exec", name))
    ours, theirs = sides
    redis = subprocess.Popen(
        [*ours.prefix, sys.executable, "-P", "-c", REDIS, str(tmp_path / "redis")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert redis.stdout is not None
        at = {"ARCHIPELAGO_URL": redis.stdout.readline().strip(), "ARCHIPELAGO_RUN": "cut", "JAX_PLATFORMS": "cpu"}
        made = ours.start("init", "--run=cut", "--model.size=tiny", "--inner.steps=100000", *SETTINGS, **at)
        assert made.wait() == 0, ours.said(made)
        ours.start("merger", **at)
        place = ("--name=two", f"--coordinator={ADDRESSES[0]}:9000", "--hosts=2", "--wait-seconds=300")
        leader = ours.start("island", *place, "--host-rank=0", **at)
        other = theirs.start("island", *place, "--host-rank=1", **at)
        until(
            lambda: "joined cut" in ours.said(leader) or leader.poll() is not None or other.poll() is not None,
            "the island",
        )
        assert leader.poll() is None, ours.said(leader)
        assert other.poll() is None, theirs.said(other)

        ip("-n", networks[0], "link", "set", "cable", "down")
        assert (leader.wait(), other.wait()) == (75, 75)
        assert ours.said(leader).count("host 1 of this island is lost") == 1
        assert theirs.said(other).count("the leader of this island is lost") == 1
        for side, process in ((ours, leader), (theirs, other)):
            assert "Traceback" not in side.said(process)
    finally:
        for side in sides:
            side.end()
        redis.communicate("")
