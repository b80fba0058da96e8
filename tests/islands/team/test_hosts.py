"""The processes of an island over several hosts: their flags, and one that waits in vain."""

from __future__ import annotations

import signal
from queue import SimpleQueue

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import INTERRUPTED, StoppedWaiting
from archipelago.islands.options import IslandOptions
from archipelago.islands.team import hosts, jax_team
from archipelago.islands.team.hosts import HostRank, alike, host_rank
from archipelago.islands.team.protocol import Said
from tests.failing import failing


def test_flags_give_a_rank_or_are_refused() -> None:
    wrongs: list[tuple[str | None, int | None, int | None]] = [
        ("node0:9000", None, None), (None, 2, 0), (None, None, 0), ("node0", 2, 0), ("node0:0", 2, 0),
        ("node0:70000", 2, 0), ("node0:9000", 0, 0), ("node0:9000", 2, 2), ("node0:9000", 2, -1),
    ]  # fmt: skip
    for wrong in wrongs:
        with failing(ConfigError, "config.value"):
            host_rank(*wrong)
    assert host_rank(None, None, None) is host_rank(None, 1, None) is None
    here = host_rank("[::1]:9000", 4, 3)
    assert here is not None
    assert here == HostRank("[::1]:9000", 4, 3)


def test_a_process_that_waits_in_vain_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX, which waits here for ever, would abort it. A signal ends it meanwhile."""
    ended: SimpleQueue[ConfigError] = SimpleQueue()
    found = []

    def connect(*about: object) -> object:
        found.append(signal.getsignal(signal.SIGTERM))
        return ended.get()

    monkeypatch.setattr(hosts, "START_SECONDS", 0.0)
    monkeypatch.setattr(hosts, "_end_now", ended.put)
    monkeypatch.setattr(jax_team, "connect", connect)
    before = signal.getsignal(signal.SIGTERM)
    error = hosts.connected(IslandOptions(wait_seconds=0.0), HostRank("node0:9000", 2, 1))
    assert (getattr(error, "code", ""), found) == ("hosts.missing", [signal.SIG_DFL])
    assert signal.getsignal(signal.SIGTERM) == before


def test_processes_of_one_island_have_the_same_number_of_hosts() -> None:
    two, three = (alike(IslandOptions(), HostRank("node0:9000", hosts, 1)) for hosts in (2, 3))
    assert two == alike(IslandOptions(), HostRank("node0:9000", 2, 0)) != three


def test_a_host_whose_leader_was_stopped_while_it_waited_has_its_own_status() -> None:
    with pytest.raises(StoppedWaiting) as found:
        hosts._led(Said(has_left=INTERRUPTED), IslandOptions(stopped_status=75))
    assert found.value.status == 75
