"""How the processes of an island come together, what they say to each other, and their mistakes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from jax._src import distributed
from jax._src.lib import _jax  # type: ignore[attr-defined]

from archipelago.broker.errors import ConfigError, HostError, WireError
from archipelago.broker.machine import free_port
from archipelago.islands.hosts import processes
from archipelago.islands.hosts.coordinator import JAX_SILENCE_SECONDS, SHUTDOWN_SECONDS, START_SECONDS
from archipelago.islands.hosts.frames import PIECE_BYTES, Connection, Frame
from archipelago.islands.hosts.loss import LOST_STATUS
from archipelago.islands.hosts.membership import Membership, is_in_cluster, membership
from archipelago.islands.hosts.ports import await_free
from archipelago.islands.hosts.processes import Leading, key_of
from archipelago.islands.hosts.seat import Seat, joined
from archipelago.islands.hosts.team import Team
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
        found = Connection(other).receive(lambda: 1 << 10, PATIENCE_SECONDS)
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


def test_a_damaged_message_is_refused() -> None:
    for data in DAMAGED:
        with connected() as (one, other):
            other.sendall(data)
            with failing(WireError, "hosts.message"):
                Connection(one).receive(lambda: 1 << 10, PATIENCE_SECONDS)


# -- flags -------------------------------------------------------------------------------------------------------------


def test_wrong_flags() -> None:
    wrongs: list[tuple[str | None, int | None, int | None, str]] = [
        ("node0:9000", None, None, "hosts.flags"),
        (None, 2, 0, "hosts.flags"),
        ("node0", 2, 0, "hosts.coordinator"),
        ("node0:0", 2, 0, "hosts.coordinator"),
        ("node0:70000", 2, 0, "hosts.coordinator"),
        ("node0:9000", 0, 0, "hosts.number"),
        ("node0:9000", 2, 2, "hosts.rank"),
        ("node0:9000", 2, -1, "hosts.rank"),
    ]
    for coordinator, hosts, rank, code in wrongs:
        with failing(ConfigError, code):
            membership(coordinator, hosts, rank, {})


def test_right_flags() -> None:
    assert membership(None, None, None, {}) is None
    assert membership(None, 1, None, {"SLURM_NTASKS": "4"}) is None
    place = membership("[::1]:9000", 4, 3, {})
    assert place is not None
    assert (place.host, place.port, place.leads) == ("::1", 9000, False)
    assert (place.address, place.jax_address) == ("[::1]:9000", "[::1]:9001")


def in_slurm(monkeypatch: pytest.MonkeyPatch, **others: str) -> dict[str, str]:
    """Return the environment of the second of two tasks of Slurm, which this process has from now on, too."""
    environ = {
        "SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0", **others,
    }  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return environ


def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = in_slurm(monkeypatch)
    assert is_in_cluster(environ)
    assert not is_in_cluster({"SLURM_NTASKS": "1"})
    assert membership(None, None, None, environ) == Membership("node3", 61440, 2, 1, (0,))
    # A cluster may not say its hosts, as Kubernetes does in a pod without the right to ask for its job.
    with failing(ConfigError, "hosts.cluster") as caught:
        membership(None, None, None, in_slurm(monkeypatch, SLURM_NTASKS="two"))
    assert "two" in caught.value.what
    assert "--hosts 1" in caught.value.remedy


# -- coming together ---------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Membership:
    return Membership("127.0.0.1", free_port(), 2, 0)


@pytest.fixture
def team(place: Membership) -> Iterator[Team]:
    made = Team(place, ABOUT, KEY)
    yield made
    made.end()


def come(place: Membership, rank: int = 1, about: Mapping[str, str] = ABOUT, key: bytes = KEY) -> Seat:
    return joined(replace(place, rank=rank), about, key, PATIENCE_SECONDS)


def gathered(team: Team, place: Membership) -> Seat:
    found: list[Seat] = []
    thread = threading.Thread(target=lambda: found.append(come(place)))
    thread.start()
    team.gather(PATIENCE_SECONDS)
    thread.join()
    return found[0]


def test_hosts_come_together_and_end_together(team: Team, place: Membership, until: Until) -> None:
    seat = gathered(team, place)
    stopped = threading.Event()
    ends: list[tuple[str, int]] = []
    seat.most = 100
    seat.start(lambda sentence, status: ends.append((sentence, status)), stopped.is_set)
    team.tell("step", (1,), [np.arange(3)])
    assert seat.expect("step").arrays[0].tolist() == [0, 1, 2]
    seat.say("devices", "2 of cpu")
    assert team.ask_all("devices", PATIENCE_SECONDS)[1].text(0) == "2 of cpu"
    assert not team.is_stopping
    stopped.set()
    until(lambda: team.is_stopping, "the signal of the other host")
    team.end("", 7)
    assert seat.expect("end").number(1) == 7
    assert not ends
    await_free(place.port, PATIENCE_SECONDS)  # another leader may take it at once


def test_a_lost_host_ends_the_leader(team: Team, place: Membership, until: Until) -> None:
    seat = gathered(team, place)
    lost: list[tuple[str, int]] = []
    team.watch(lambda sentence, status: lost.append((sentence, status)))
    seat._connection.close()
    until(lambda: bool(lost), "the loss")
    assert lost[0][1] == LOST_STATUS == 75
    assert "host 1" in lost[0][0]


def test_a_lost_leader_ends_the_others(team: Team, place: Membership, until: Until) -> None:
    seat = gathered(team, place)
    lost: list[int] = []
    seat.start(lambda sentence, status: lost.append(status), lambda: False)
    team._followers[1].connection.close()
    until(lambda: bool(lost), "the loss")
    assert lost == [LOST_STATUS]


def test_a_computation_that_fails_with_a_lost_host_does_not_end_the_leader_first(
    place: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has noticed the loss says goodbye to the run first, and ends the process with status 75."""
    leading, order = Leading(place, ABOUT, KEY), list[str]()
    says_goodbye, goodbye = threading.Event(), threading.Event()

    class Departing:
        def give_up(self, kind: str, sentence: str) -> None:
            says_goodbye.set()
            goodbye.wait(0.2)

    monkeypatch.setattr(processes, "_exit", lambda status: order.append(f"status {status}"))
    monkeypatch.setattr(leading.team, "end", lambda *_: order.append("end"))
    leading.island = cast(Any, Departing())
    thread = threading.Thread(target=leading._lost, args=("host 1 of this island is lost", LOST_STATUS))
    thread.start()
    says_goodbye.wait()
    leading.end(error=RuntimeError("the peer has closed the connection"))
    goodbye.set()
    thread.join()
    assert order == ["status 75", "end"]


def test_a_host_that_has_failed_itself_does_not_repeat_the_leaders_error() -> None:
    """Both find the same mistake, and each says one sentence."""
    ends: list[str] = []
    with connected() as (one, other):
        seat, leader = Seat(Connection(one)), Connection(other)
        seat.fail("the mesh needs 8 devices", 2)
        seat.start(lambda sentence, status: ends.append(sentence), lambda: False)
        leader.send(Frame("end", ("the leader of this island has ended: the mesh needs 8 devices", 2)))
        assert seat.expect("end").number(1) == 2
        assert not ends
        assert leader.receive(lambda: 0, PATIENCE_SECONDS).kind == "failed"
        leader.close()


def test_hosts_that_disagree_are_refused_on_both_sides(team: Team, place: Membership) -> None:
    refused: list[str] = []

    def try_it() -> None:
        try:
            come(place, about={**ABOUT, "jax": "2.0"})
        except ConfigError as error:
            refused.append(error.code)

    thread = threading.Thread(target=try_it)
    thread.start()
    with failing(ConfigError, "hosts.disagree"):
        team.gather(PATIENCE_SECONDS)
    thread.join()
    assert refused == ["hosts.disagree"]


def test_a_stranger_and_a_host_that_joins_twice_are_refused_and_disturb_nobody(team: Team, place: Membership) -> None:
    seat = gathered(team, place)
    for rank in (0, 1):
        with failing(ConfigError, "hosts.twice"):
            come(place, rank)
    with failing(ConfigError, "hosts.stranger"):
        come(place, key=key_of("redis://:guess@host"))
    assert set(team._followers) == {1}
    seat.start(lambda sentence, status: None, lambda: False)
    team.tell("go")
    assert seat.expect("go").kind == "go"


def test_of_two_that_come_at_once_with_one_rank_one_is_let_in(
    team: Team, place: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Seat | str] = []
    refusal, meeting = team._refusal, threading.Barrier(2)

    def checked(*about: Any) -> Any:
        """Let both processes pass the check before either enters, if the leader allows it."""
        refused = refusal(*about)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return refused

    monkeypatch.setattr(team, "_refusal", checked)

    def try_it() -> None:
        try:
            found.append(come(place))
        except ConfigError as error:
            found.append(error.code)

    threads = [threading.Thread(target=try_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    team.gather(PATIENCE_SECONDS)
    for thread in threads:
        thread.join()
    assert [each for each in found if isinstance(each, str)] == ["hosts.twice"]
    (seat,) = (each for each in found if isinstance(each, Seat))
    seat.start(lambda sentence, status: None, lambda: False)
    team.tell("go")
    assert seat.expect("go").kind == "go"


def test_hosts_that_do_not_come(team: Team, place: Membership) -> None:
    with failing(HostError, "hosts.away"):
        joined(replace(place, rank=1), ABOUT, KEY, 0.0)
    with failing(HostError, "hosts.missing"):
        team.gather(0.0)


def test_a_port_that_is_taken(place: Membership) -> None:
    with closing(socket.create_server(("", place.port), family=socket.AF_INET)), failing(ConfigError, "hosts.port"):
        Team(place, ABOUT, KEY).gather(1.0)


def test_the_port_of_jax_is_awaited(place: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two coordinators of JAX could share a port, and hosts would reach either."""
    taken = socket.create_server(("", place.port))
    with failing(ConfigError, "hosts.port"):
        await_free(place.port, 0.0)
    monkeypatch.setattr("archipelago.islands.hosts.ports.time.sleep", lambda seconds: taken.close())
    await_free(place.port, 60.0)


def test_the_key_is_the_content_of_a_join_file(tmp_path: Path) -> None:
    for name in ("a.join", "b.join"):
        (tmp_path / name).write_text("secret")
    assert key_of(str(tmp_path / "a.join")) == key_of(str(tmp_path / "b.join"))
    assert key_of("redis://a") != key_of("redis://b")


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
