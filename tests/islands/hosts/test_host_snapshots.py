"""What the leader passes on of a snapshot: each host decodes the same bytes to the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from archipelago.broker.config import WireConfig
from archipelago.broker.errors import WireError
from archipelago.broker.wire import pack
from archipelago.islands.hosts.snapshots import HeldSnapshots, relay_to
from archipelago.islands.hosts.team import Team
from archipelago.islands.sync.connection.snapshots import Download
from tests.failing import failing
from tests.islands.mesh.sharded_runs import CONFIG, ONE, MeshRun, manifest

DIFFERENCES = replace(CONFIG, wire=WireConfig(up="int4", thin="", down="int4"))


class ToldTeam:
    """A team that keeps what the leader tells it."""

    def __init__(self) -> None:
        self.told: list[Download] = []

    def tell(self, kind: str, values: tuple[int, ...], arrays: list[Any]) -> None:
        assert kind == "hold"
        fragment, number, base = values
        payloads = tuple(array.tobytes() for array in arrays)
        self.told.append(Download(number, fragment, None if base < 0 else base, payloads))


def test_each_host_decodes_the_bits_of_the_leader() -> None:
    run, team = MeshRun(manifest(DIFFERENCES)), ToldTeam()
    island = run.island(ONE, relay=relay_to(cast(Team, team)))
    held, seen, taken = HeldSnapshots(run.manifest), 0, []
    island.take_over, original = (lambda arrival: (taken.append(arrival), original(arrival))), island.take_over  # type: ignore[method-assign, assignment, func-returns-value]
    for _ in range(20):
        run.play(island, 1)
        for download in team.told[seen:]:
            held.hold(download)
        seen = len(team.told)
        while taken:
            arrival = taken.pop()
            assert held.take(0, arrival.number).tobytes() == arrival.params_N.tobytes()
            held.forget(0, arrival.number)
    assert len(held._held[0]) <= 1, "older ones are forgotten"
    assert [download.base for download in team.told[:3]] == [None, 1, 2]
    size = sum(len(payload) for payload in team.told[-1].payloads)
    assert 6 * size < 4 * manifest().parameters, "the host gets the compressed payload"


def test_a_snapshot_that_did_not_come_is_named() -> None:
    of = manifest(DIFFERENCES)
    held = HeldSnapshots(of)
    with failing(WireError, "hosts.message"):
        held.hold(Download(2, 0, 1, (b"",)))
    with failing(WireError, "hosts.message"):
        held.take(0, 1)
    held.hold(Download(1, 0, None, (b"no payload",)))
    with failing(WireError):
        held.take(0, 1)


def test_newer_snapshots_stay_until_they_are_adopted() -> None:
    of = manifest()
    held = HeldSnapshots(of)
    for number in (1, 2):
        vector_N = np.full(of.sizes[0], number, np.float32)
        held.hold(Download(number, 0, None, (pack(vector_N, "float32", 1),)))
    assert held.take(0, 1)[0] == 1.0
    held.forget(0, 1)
    assert held.take(0, 2)[0] == 2.0
    with failing(WireError, "hosts.message"):
        held.take(0, 1)
