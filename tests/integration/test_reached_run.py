"""A run that others join with their own credentials, on real processes: TLS, roles and signatures together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.broker.process import connect_to
from tests.conftest import Until
from tests.harness.forks import Forks
from tests.harness.processes import SETTINGS, Processes
from tests.servers import redis_program

pytestmark = [pytest.mark.full, pytest.mark.processes]


@pytest.fixture
def hub_and_site(tmp_path: Path, commands: Forks) -> Iterator[tuple[Processes, Processes]]:
    """Commands in the folder of the run's owner, and in that of a guest. Both find a Redis with TLS."""
    redis_program(tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    places = []
    for name in ("hub", "site"):
        (tmp_path / name).mkdir()
        places.append(Processes(tmp_path / name, commands=commands, PATH=path))
    yield places[0], places[1]
    for place in places:
        place.end()
        place.show()


def test_an_invited_island_trains_until_it_is_revoked(
    hub_and_site: tuple[Processes, Processes], tmp_path: Path, until: Until
) -> None:
    hub, site = hub_and_site
    up = hub.start(
        "up", "--open", "--host=localhost", "--run=demo", "--islands=1", "--no-one-process", "--inner.steps=100000",
        "--evaluate-every=2", *(each for each in SETTINGS if "corpus" not in each),
    )  # fmt: skip
    until((hub.folder / "runs/demo/joins/island-0.join").exists, "the join files of our own processes")
    assert "archipelago island demo.NAME.join" in hub.said(up)
    joins = str(tmp_path / "oslo.join")
    hub.ended(hub.start("invite", "oslo", "--run", "demo", "--out", joins))
    island = site.start("island", joins)
    transport = connect_to(str(hub.folder / "runs/demo/admin.join"), None)

    def merged(name: str) -> bool:
        return any(part.island == name for entry in transport.reader.tape(50) for part in entry.members)

    until(lambda: merged("oslo") and merged("island-0"), "contributions of both islands", seconds=600.0)
    until(transport.reader.evaluations, "an evaluation by its own user")
    refused = [entry for entry in transport.connection.redis.acl_log() if entry["reason"] != "auth"]
    assert refused == [], "every process can do all that its code wants to do"
    hub.ended(hub.start("revoke", "oslo", "--run", "demo"))
    site.ended(island, status=2)
    assert "revoked" in site.said(island)
    last = transport.reader.counters().merged
    until(lambda: transport.reader.counters().merged > last + 3, "the others to go on")
    transport.close()
    up.terminate()
    hub.ended(up, status=130)
