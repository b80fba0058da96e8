"""How the processes of an island over several hosts come together, and their mistakes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace

import pytest

from archipelago.broker.errors import ArchipelagoError, ConfigError, HostError
from archipelago.broker.machine import free_port
from archipelago.islands.team.meeting import MESSAGE_MAX, Stopped, come, gather
from archipelago.islands.team.ranks import HostRank, host_rank, key_of
from tests.conftest import PATIENCE_SECONDS
from tests.failing import failing

KEY = key_of("redis://:secret@host")
ABOUT = {"jax": "1.0", "--mesh": "data=2"}


def never() -> bool:
    return False


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
    assert (here.host, here.port, here.leads) == ("::1", 9000, False)
    assert (here.address, here.jax_address) == ("[::1]:9000", "[::1]:9001")


@pytest.fixture
def here() -> HostRank:
    return HostRank("127.0.0.1", free_port(2), 3, 0)


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor() as made:
        yield made


def coming(here: HostRank, about: Mapping[str, str] = ABOUT, key: bytes = KEY, stopped: Stopped = never) -> str:
    """Come to the leader as another host, and return the code of what refuses it, or `go`."""
    try:
        come(here, about, key, PATIENCE_SECONDS, stopped)
    except ArchipelagoError as error:
        return error.code
    except KeyboardInterrupt:
        return "stopped"
    return "go"


def gathering(here: HostRank) -> None:
    gather(here, ABOUT, KEY, PATIENCE_SECONDS, never)


def test_hosts_come_together_and_whoever_has_gone_may_come_again(here: HostRank, threads: Executor) -> None:
    leading = threads.submit(gathering, here)
    signal = threading.Event()
    gone = threads.submit(coming, replace(here, rank=1), stopped=signal.is_set)
    signal.set()
    assert gone.result() == "stopped"
    others = [threads.submit(coming, replace(here, rank=rank)) for rank in (1, 2)]
    assert [other.result() for other in others] == ["go", "go"]
    leading.result()
    with closing(socket.create_server(("", here.port))):
        pass  # nobody listens any more, so another leader may take it at once


def test_a_host_whose_rank_is_wrong_or_taken_and_a_stranger_disturb_nobody(here: HostRank, threads: Executor) -> None:
    leading = threads.submit(gathering, here)
    assert [coming(replace(here, rank=rank)) for rank in (0, 3)] == ["config.value"] * 2
    assert coming(replace(here, rank=2), key=key_of("redis://:guess@host")) == "hosts.stranger"
    twins = [threads.submit(coming, replace(here, rank=1)) for _ in range(2)]
    refused, waiting = wait(twins, return_when=FIRST_COMPLETED)
    assert [twin.result() for twin in refused] == ["config.value"]
    assert coming(replace(here, rank=2)) == "go"
    assert [twin.result() for twin in waiting] == ["go"]
    leading.result()


@pytest.mark.parametrize(
    "said",
    [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1}\n', b'{"rank": [], "about": 1}\n', b"9" * MESSAGE_MAX],
)
def test_a_process_that_says_nonsense_disturbs_nobody(here: HostRank, threads: Executor, said: bytes) -> None:
    here = replace(here, hosts=2)
    leading = threads.submit(gathering, here)
    with closing(connected(here)) as sock:
        sock.sendall(said + b"\n")
    with closing(connected(here)):
        pass  # this one goes without a word
    assert coming(replace(here, rank=1)) == "go"
    leading.result()


def connected(here: HostRank) -> socket.socket:
    """Return a connection to the leader, as soon as it listens."""
    while True:
        try:
            return socket.create_connection((here.host, here.port))
        except ConnectionRefusedError:
            continue


def test_hosts_that_disagree_are_refused_on_both_sides(here: HostRank, threads: Executor) -> None:
    other = threads.submit(coming, replace(here, rank=1), {**ABOUT, "jax": "2.0"})
    with failing(ConfigError, "hosts.disagree"):
        gathering(here)
    assert other.result() == "hosts.disagree"


def test_hosts_that_do_not_come(here: HostRank) -> None:
    with failing(HostError, "hosts.missing"):
        come(replace(here, rank=1), ABOUT, KEY, 0.0, never)
    with failing(HostError, "hosts.missing"):
        gather(here, ABOUT, KEY, 0.0, never)


def test_a_leader_that_is_stopped_lets_nobody_wait(here: HostRank, threads: Executor) -> None:
    signal = threading.Event()
    leading = threads.submit(gather, here, ABOUT, KEY, PATIENCE_SECONDS, signal.is_set)
    _, waiting = wait([threads.submit(coming, replace(here, rank=1)) for _ in range(2)], return_when=FIRST_COMPLETED)
    signal.set()
    assert [host.result() for host in waiting] == ["hosts.missing"]
    assert isinstance(leading.exception(), KeyboardInterrupt)


@pytest.mark.parametrize("place", [0, 1])
def test_a_port_that_is_taken_is_refused(here: HostRank, place: int) -> None:
    """Two coordinators of JAX could share a port, and hosts would reach either."""
    with closing(socket.create_server(("", here.port + place))), failing(ConfigError, "hosts.port"):
        gathering(here)
