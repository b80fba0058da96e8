"""How the processes of an island come together, what they say to each other, and their mistakes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from jax._src import distributed
from jax._src.lib import _jax  # type: ignore[attr-defined]

from archipelago.broker.errors import ConfigError, HostError, WireError
from archipelago.broker.machine import free_port
from archipelago.islands.team.coordinator import JAX_SILENCE_SECONDS, SHUTDOWN_SECONDS, START_SECONDS, await_free
from archipelago.islands.team.follower import HostFollower, joined
from archipelago.islands.team.leader import HostLeader
from archipelago.islands.team.messages import LOST_STATUS, PIECE_BYTES, Connection, Frame, in_words
from archipelago.islands.team.ranks import HostRank, host_rank, key_of
from tests.conftest import PATIENCE_SECONDS, Until
from tests.failing import failing

KEY = key_of("redis://:secret@host")
ABOUT = {"jax": "1.0", "--mesh": "data=2"}


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    with one, other:
        yield one, other


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was() -> None:
    arrays: tuple[Any, ...] = (
        np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7, np.int32), np.zeros((0, 4), np.uint8),
        np.arange(3).astype(jnp.bfloat16), np.ones(2).astype(jnp.float8_e4m3fn),
    )  # fmt: skip
    with connected() as (one, other):
        Connection(one).send(Frame("step", (3, "text", None, True, 0.5), arrays))
        found = Connection(other).receive(PATIENCE_SECONDS, lambda: 1 << 10)
    assert (found.kind, found.values) == ("step", (3, "text", None, True, 0.5))
    for got, sent in zip(found.arrays, arrays, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
        assert got.shape == np.shape(sent)


class Sent:
    """A socket that keeps what is sent, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def setsockopt(self, *_: int) -> None:
        pass

    def sendall(self, content: bytes) -> None:
        self.calls.append(bytes(content))


def test_a_large_array_is_sent_in_pieces() -> None:
    """The time limit of a socket holds for each call, so a slow link would look like a lost host otherwise."""
    sock, array = Sent(), np.arange(2 * PIECE_BYTES // 8 + 1)
    Connection(cast(socket.socket, sock)).send(Frame("take", (), (array,)))
    assert [len(call) for call in sock.calls[1:]] == [PIECE_BYTES, PIECE_BYTES, 8]
    assert b"".join(sock.calls[1:]) == array.tobytes()


def framed(content: Any) -> bytes:
    header: bytes = msgpack.packb(content)
    return len(header).to_bytes(4) + header


DAMAGED = [
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"GET / HTTP/1.1\r\n\r\n",
    (3).to_bytes(4) + b"\xc1\xc1\xc1",
    framed(["kind", []]),
    framed([1, [], []]),
    framed(["kind", [[1]], []]),
    framed(["kind", [{}], []]),
    framed(["kind", [], [["object", [1]]]]),
    framed(["kind", [], [["float32", [-1]]]]),
    framed(["kind", [], [["float32", [1 << 40]]]]),
    framed(["kind", [], [["float32", [1 << 30, 1 << 30, 1 << 30]]]]),
    framed(["kind", [], [["uint8", [1] * 40]]]),
]


def test_a_silent_process_is_noticed() -> None:
    with connected() as (one, _), pytest.raises(TimeoutError) as caught:
        Connection(one).receive(0.01)
    assert "silent" in in_words(caught.value)


def test_a_damaged_message_is_refused() -> None:
    for data in DAMAGED:
        with connected() as (one, other):
            other.sendall(data)
            with failing(WireError, "hosts.message"):
                Connection(one).receive(PATIENCE_SECONDS, lambda: 1 << 10)


# -- flags -------------------------------------------------------------------------------------------------------------


def test_flags_give_a_rank_or_are_refused() -> None:
    wrongs: list[tuple[str | None, int | None, int | None]] = [
        ("node0:9000", None, None), (None, 2, 0), (None, None, 0), ("node0", 2, 0), ("node0:0", 2, 0),
        ("node0:70000", 2, 0), ("node0:9000", 0, 0), ("node0:9000", 2, 2), ("node0:9000", 2, -1),
    ]  # fmt: skip
    for wrong in wrongs:
        with failing(ConfigError, "hosts.flags"):
            host_rank(*wrong)
    assert host_rank(None, None, None) is host_rank(None, 1, None) is None
    here = host_rank("[::1]:9000", 4, 3)
    assert here is not None
    assert (here.host, here.port, here.leads) == ("::1", 9000, False)
    assert (here.address, here.jax_address) == ("[::1]:9000", "[::1]:9001")


# -- coming together ---------------------------------------------------------------------------------------------------


@pytest.fixture
def here() -> HostRank:
    return HostRank("127.0.0.1", free_port(), 2, 0)


@pytest.fixture
def exits() -> list[int]:
    """The exit statuses of the leader and of the others, which end no process here."""
    return []


@pytest.fixture
def leader(here: HostRank, exits: list[int]) -> Iterator[HostLeader]:
    made = HostLeader(here, ABOUT, KEY, exits.append)
    yield made
    made.end()


def tried(here: HostRank, rank: int = 1, about: Mapping[str, str] = ABOUT, key: bytes = KEY) -> HostFollower | str:
    """Return a host that has come to the leader, or the code of what refuses it."""
    try:
        return joined(replace(here, rank=rank), about, key, PATIENCE_SECONDS, exits=lambda status: None)
    except ConfigError as error:
        return error.code


def both(leader: HostLeader, *comes: Callable[[], HostFollower | str]) -> list[HostFollower | str]:
    """Let hosts come in threads of their own while the leader waits for one."""
    found: list[HostFollower | str] = []
    threads = [threading.Thread(target=lambda come=come: found.append(come())) for come in comes]
    for thread in threads:
        thread.start()
    leader.gather(PATIENCE_SECONDS)
    for thread in threads:
        thread.join()
    return found


def gathered(leader: HostLeader, here: HostRank) -> HostFollower:
    (found,) = both(leader, lambda: tried(here))
    assert isinstance(found, HostFollower)
    return found


def test_hosts_come_together_and_end_together(
    leader: HostLeader, here: HostRank, exits: list[int], until: Until
) -> None:
    follower = gathered(leader, here)
    stopped = threading.Event()
    follower.most = 100
    follower.start(stopped.is_set)
    leader.tell("step", (1,), [np.arange(3)])
    assert follower.expect("step").arrays[0].tolist() == [0, 1, 2]
    follower.say("devices", "2 of cpu")
    assert leader.ask_all("devices", PATIENCE_SECONDS)[1].text(0) == "2 of cpu"
    assert not leader.is_stopping
    stopped.set()
    until(lambda: leader.is_stopping, "the signal of the other host")
    leader.end(7)
    assert follower.expect("end").number(1) == 7
    assert not exits
    await_free(here.port, PATIENCE_SECONDS)  # another leader may take it at once


def test_a_lost_host_ends_the_leader_after_its_island_has_said_goodbye(
    leader: HostLeader, here: HostRank, exits: list[int], until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    """A computation that fails with the lost host does not end the leader first, with another status."""
    says_goodbye, goodbye = threading.Event(), threading.Event()

    class Departing:
        def give_up(self, kind: str, sentence: str) -> None:
            says_goodbye.set()
            goodbye.wait()

    follower = gathered(leader, here)
    leader.island = cast(Any, Departing())
    follower._connection.close()
    says_goodbye.wait()
    ends = threading.Thread(target=lambda: leader.end(error=RuntimeError("the peer has closed the connection")))
    ends.start()
    assert not exits
    goodbye.set()
    ends.join()
    assert exits == [LOST_STATUS] == [75]
    assert "host 1 of this island is lost" in capsys.readouterr().err


def test_a_lost_leader_ends_the_others(leader: HostLeader, here: HostRank, until: Until) -> None:
    follower, ends = gathered(leader, here), list[int]()
    follower._exits = ends.append
    follower.start()
    leader._others[1].connection.close()
    until(lambda: ends == [LOST_STATUS], "the loss")


def test_a_host_that_has_failed_itself_does_not_repeat_the_leaders_error() -> None:
    """Both find the same mistake, and each says one sentence."""
    ends: list[int] = []
    with connected() as (one, other):
        follower, connection = HostFollower(Connection(one), ends.append), Connection(other)
        follower.fail("the mesh needs 8 devices", 2)
        follower.start()
        connection.send(Frame("end", ("the leader of this island has ended: the mesh needs 8 devices", 2)))
        assert follower.expect("end").number(1) == 2
        assert not ends
        assert connection.receive(PATIENCE_SECONDS).kind == "failed"
        connection.close()


def test_hosts_that_disagree_are_refused_on_both_sides(leader: HostLeader, here: HostRank) -> None:
    refused: list[HostFollower | str] = []
    thread = threading.Thread(target=lambda: refused.append(tried(here, about={**ABOUT, "jax": "2.0"})))
    thread.start()
    with failing(ConfigError, "hosts.disagree"):
        leader.gather(PATIENCE_SECONDS)
    thread.join()
    assert refused == ["hosts.disagree"]


class SlowLeader(HostLeader):
    """A leader that lets two processes pass the check before either enters, if nothing prevents that."""

    meeting = threading.Barrier(2)

    def require_fit(self, rank: int, about: Mapping[str, str]) -> None:
        super().require_fit(rank, about)
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.2)


def test_a_stranger_and_a_host_that_joins_twice_are_refused_and_disturb_nobody(here: HostRank) -> None:
    """Of two that come at once with one rank, one is let in."""
    leader = SlowLeader(here, ABOUT, KEY, lambda status: None)
    found = both(leader, lambda: tried(here), lambda: tried(here))
    assert [each for each in found if isinstance(each, str)] == ["hosts.flags"]
    (follower,) = (each for each in found if isinstance(each, HostFollower))
    assert [tried(here, rank) for rank in (0, 1, 2)] == ["hosts.flags"] * 3
    assert tried(here, key=key_of("redis://:guess@host")) == "hosts.stranger"
    follower.start()
    leader.tell("go")
    assert follower.expect("go").kind == "go"
    leader.end()


def test_hosts_that_do_not_come(leader: HostLeader, here: HostRank) -> None:
    with failing(HostError, "hosts.missing"):
        joined(replace(here, rank=1), ABOUT, KEY, 0.0)
    with failing(HostError, "hosts.missing"):
        leader.gather(0.0)


def test_a_port_that_is_taken_is_refused_or_awaited(
    leader: HostLeader, here: HostRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two coordinators of JAX could share a port, and hosts would reach either."""
    with closing(socket.create_server(("", here.port), family=socket.AF_INET)) as taken:
        with failing(ConfigError, "hosts.port"):
            leader.gather(1.0)
        with failing(ConfigError, "hosts.port"):
            await_free(here.port, 0.0)
        monkeypatch.setattr("archipelago.islands.team.coordinator.time.sleep", lambda seconds: taken.close())
        await_free(here.port, 60.0)


# -- what is used of JAX's private modules -----------------------------------------------------------------------------


def test_the_private_parts_of_jax_are_as_the_coordinator_uses_them() -> None:
    state = distributed.State()
    assert all(hasattr(state, name) for name in ("coordinator_address", "process_id", "num_processes", "client"))
    assert isinstance(distributed.global_state, distributed.State)
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(
        address, 1, heartbeat_timeout=JAX_SILENCE_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
    )
    client = _jax.get_distributed_runtime_client(
        address, 0, init_timeout=START_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS,
        heartbeat_timeout=JAX_SILENCE_SECONDS, use_compression=True, shutdown_on_destruction=False,
    )  # fmt: skip
    client.connect()
    client.shutdown()
    service.shutdown()
