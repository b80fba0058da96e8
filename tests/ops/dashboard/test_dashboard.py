"""The dashboard without a browser: its data, the requests that it refuses, and its recovery from an outage."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from archipelago.broker.errors import ArchipelagoError, ConfigError, UnreachableError
from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import Books, Evaluation, Note, Pending, Presence, Refusal
from archipelago.broker.process import guarded
from archipelago.broker.redis.transport import connect
from archipelago.broker.transport import Memory, MergerStatus
from archipelago.ops.commands import run
from archipelago.ops.dashboard import main, metrics, page_data
from archipelago.ops.dashboard.actions import sentence, stamped
from archipelago.ops.dashboard.app import BODY_BYTES_MAX, application
from archipelago.ops.dashboard.assets import FILES, PAGE
from archipelago.ops.dashboard.history import History
from archipelago.ops.dashboard.main import TOKEN_VARIABLE, serving
from archipelago.ops.dashboard.page_data import Rate, Reading, events, measured, state_of
from archipelago.ops.dashboard.page_data import serving as lease
from archipelago.ops.dashboard.watcher import (
    PATIENCE_SECONDS,
    SELDOM_SECONDS,
    Board,
    Fault,
    RareReading,
    Watcher,
    to_json,
)
from archipelago.ops.launch.embedded_redis import Server, start_server
from archipelago.ops.watch.run_view import RunView, observe, summarise
from tests import samples
from tests.failing import failing

ROOT = Path(__file__).parents[3]
TOKEN = "open-sesame"  # noqa: S105 - of the tests alone
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
MANIFEST = samples.manifest()


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_run(broker: MemoryBroker) -> MemoryTransport:
    """Write a run with two islands, an evaluation, and a merged, a refused and a pending contribution."""
    transport = broker.connect("sample")
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    for name in ("a", "b"):
        transport.island.heartbeat(samples.heartbeat(name))
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    merged = transport.island.publish(samples.contribution(), b"payload")
    refused = transport.island.publish(samples.contribution(island="b"), b"payload")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged]))
    transport.merger.refuse(epoch, [(refused, Refusal("b", "x", 0, 1, 0, 100, "the digest is wrong"))])
    transport.island.publish(samples.contribution(sequence=1), b"payload")
    transport.reader.record_evaluation(Evaluation(1, 4, 100, 1.7e9, 5.0))
    transport.reader.note(Note(990.0, "merger", "served", "in epoch 1"))
    return transport


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transport(clock: Clock) -> MemoryTransport:
    return a_run(MemoryBroker(clock=clock))


@pytest.fixture
def watch(transport: MemoryTransport, clock: Clock) -> Watcher:
    return Watcher(transport, transport.reader.manifest(), clock, clock)


@pytest.fixture
def client(watch: Watcher, clock: Clock) -> Iterator[TestClient]:
    watch.update()
    with TestClient(application(watch, TOKEN, clock, clock), "http://localhost") as found:
        yield found


# -- its data ---------------------------------------------------------------------------------------------------------


def test_the_view_contains_everything_that_was_read(client: TestClient) -> None:
    found = client.get("/api/view").json()
    page, charts = found["page"], found["charts"]
    assert found["fault"] is None
    assert (page["run"]["run"], page["run"]["known"], page["run"]["live"], page["run"]["participating"]) == (
        "sample", 2, 2, 1,
    )  # fmt: skip
    assert page["state"]["word"] == "training"
    assert [(i["name"], i["strip"], i["participation"]) for i in page["islands"]] == [("a", [0], 1), ("b", [-1], 0)]
    assert {name: page["books"][name] for name in ("published", "merged", "refused", "pending", "balanced")} == {
        "published": 3, "merged": 1, "refused": 1, "pending": 1, "balanced": True,
    }  # fmt: skip
    assert page["books"]["tokens"]["balanced"]
    assert page["books"]["tokens"]["pending"] == 100
    assert page["serving"] == {
        "who": "merger", "since": 990, "text": "in epoch 1", "epoch": 1, "held": None, "standbys": [],
    }  # fmt: skip
    assert ("b", "refused", "round 1: the digest is wrong") in {
        (event["who"], event["kind"], event["text"]) for event in page["events"]
    }
    assert charts["lines"]["round"] == [1]
    assert charts["held_out"] == {"round": [1], "tokens": [50], "unix_seconds": [1_700_000_000], "loss": [5]}
    assert charts["unit"] == page["run"]["unit"] == "bits per byte"
    assert charts["lines"]["loss"] == [pytest.approx(2.5 / math.log(2), abs=1e-3)]  # The tape has 2.5 nats.
    assert charts["now"] == {name: page["run"][name] for name in ("rounds", "known", "live", "participating")}
    assert page["settings"]["inner.steps"] == str(MANIFEST.config.inner.steps)
    assert page["settings"]["version.jax"] == "1"
    assert page["progress"]["learning_rate"] == pytest.approx(MANIFEST.config.inner.rate_at(4), rel=1e-4)
    assert all(event["remedy"] for event in page["events"])
    assert charts["staleness"] == [1]
    assert charts["queues"]["pending"] == [1]


def test_an_extended_run_shows_the_learning_rate_of_its_length(watch: Watcher) -> None:
    watch.transport.reader.steer({"inner.steps": "6000"})
    (entry,) = watch.transport.reader.tape(1)
    reading = watch.read()
    reading = replace(reading, view=replace(reading.view, step=1900))
    history = History(MANIFEST.shard_layout)
    history.begin(0, [replace(entry, step=1900), replace(entry, round=2, step=1900, steered="inner.steps=6000.0")])
    before, after = (replace(MANIFEST.config.inner, steps=steps).rate_at(1900) for steps in (2000, 6000))
    assert after > 2 * before
    assert page_data.progress(reading, history, MANIFEST.config)["learning_rate"] == after
    assert page_data.charts_of(reading, history, [], MANIFEST)["lines"]["rate"] == [before, after]


def test_a_foreign_host_name_is_refused(watch: Watcher, clock: Clock) -> None:
    """Otherwise a page of that site could read the dashboard from its visitor's machine."""
    hosts = {
        "localhost:8765": 200, "127.0.0.1": 200, "[::1]:8765": 200, "192.0.2.7:8765": 200, "Dash.Example:80": 200,
        "evil.example:8765": 400, "localhost.evil.example": 400, "127.0.0.1.evil.example": 400, "": 400, "[": 400,
    }  # fmt: skip
    with TestClient(application(watch, TOKEN, clock, clock, names=("localhost", "dash.example"))) as client:
        answers = {host: client.get("/api/view", headers={"host": host}).status_code for host in hosts}
    assert answers == hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - the test is about this address
def test_a_foreign_host_name_is_refused_on_every_address(watch: Watcher, host: str) -> None:
    with serving(watch, TOKEN, host, 0, ["dash.example"]) as address:
        port = int(address.rpartition(":")[2])
        for name, status in (("127.0.0.1", 200), ("dash.example", 200), ("evil.example", 400)):
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("GET", "/healthz", headers={"Host": name})
                assert connection.getresponse().status == status


def test_the_page_before_the_first_reading(watch: Watcher, clock: Clock) -> None:
    with TestClient(application(watch, TOKEN, clock, clock), "http://localhost") as client:
        assert client.get("/api/view").json() == {"page": None, "charts": None, "fault": None}


@pytest.mark.parametrize("path", [*FILES, "/plotly.min.js"])
def test_all_files_of_the_page_are_served_here(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert len(answer.content) > 1000
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")


def test_the_page_names_no_outside_address() -> None:
    names = sorted(path.name for path in PAGE.iterdir())
    assert names == sorted([*FILES.values(), "report.css"])  # The last is only for the files of `report`.
    for name in names:
        text = (PAGE / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|(?<![:/])//[a-z0-9-]+\.[a-z]", text), name


def test_health_includes_the_state_of_redis(client: TestClient, watch: Watcher) -> None:
    assert client.get("/healthz").json() == {"serving": True, "redis": "answers"}
    watch.board.end_reading(Fault(1000.0, "Redis does not answer", "gone"))
    assert client.get("/healthz").json() == {"serving": True, "redis": "Redis does not answer"}


def test_metrics_are_those_of_the_view(client: TestClient, watch: Watcher, transport: MemoryTransport) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    found = {s.name: s.value for family in text_string_to_metric_families(answer.text) for s in family.samples}
    view = observe(transport, MANIFEST)
    assert set(found) <= {*metrics.RUN, *metrics.BOOKS, metrics.ROUND_AGE, metrics.UNFINISHED, *metrics.RUN_ISLAND}
    assert list(found.values()).count(view.held_out_last) >= 1
    watch.board.end_reading(Fault(1000.0, "Redis does not answer"))
    assert (client.get("/metrics").status_code, client.get("/metrics").text) == (503, "Redis does not answer\n")


def test_there_are_no_metrics_before_the_first_reading(watch: Watcher, clock: Clock) -> None:
    with TestClient(application(watch, TOKEN, clock, clock), "http://localhost") as client:
        assert client.get("/metrics").status_code == 503


# -- refused requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": f"Basic {TOKEN}"},
     {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN},
     {"Authorization": "Bearer ö".encode("latin-1").decode("latin-1")}],
)  # fmt: skip
def test_nothing_changes_without_the_token(
    client: TestClient, transport: MemoryTransport, headers: dict[str, str]
) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = client.post("/api/steer", json={"changes": {"merging": "paused"}}, headers=raw)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert "token" in answer.json()["message"]
    assert transport.reader.control() == {}


@pytest.mark.parametrize("method", ["get", "put", "delete", "patch", "head"])
def test_only_a_post_changes_anything(client: TestClient, transport: MemoryTransport, method: str) -> None:
    answer = client.request(method, "/api/steer?merging=paused", headers=RIGHT)
    assert answer.status_code == 405
    assert transport.reader.control() == {}


@pytest.mark.parametrize(
    ("changes", "control"),
    [
        ({"outer.learning_rate": "0.5"}, {"outer.learning_rate": "0.5"}),
        ({"sync.quorum": "2"}, {"sync.quorum": "2"}),
        ({"sync.grace": "0"}, {"sync.grace": "0.0"}),
        ({"merging": "paused"}, {"merging": "paused"}),
        ({"checkpoint": "now"}, {"checkpoint": "1000.000"}),
        ({"island.b": "drain"}, {"island.b": "drain"}),
        ({"island.b": "expel"}, {"island.b": "expel"}),
        ({}, {}),
    ],
)
def test_each_action_reaches_the_run_and_is_answered(
    client: TestClient, transport: MemoryTransport, changes: dict[str, str], control: dict[str, str]
) -> None:
    answer = client.post("/api/steer", json={"changes": changes}, headers=RIGHT)
    assert answer.status_code == 200
    assert answer.json()["message"]
    assert transport.reader.control() == control


@pytest.mark.parametrize("name", ["outer.learning_rate", "sync.quorum", "sync.grace", "merging", "island.b"])
def test_a_change_can_be_removed(client: TestClient, transport: MemoryTransport, name: str) -> None:
    value = {"merging": "paused", "island.b": "expel"}.get(name, "1")
    transport.reader.steer({name: value})
    answer = client.post("/api/steer", json={"changes": {name: ""}}, headers=RIGHT)
    assert answer.status_code == 200
    assert transport.reader.control() == {}


@pytest.mark.parametrize(
    "body",
    [
        '{"changes": {"outer.learning_rate": "fast"}}',
        '{"changes": {"outer.learning_rate": "-1"}}',
        '{"changes": {"sync.quorum": "0"}}',
        '{"changes": {"sync.grace": "nan"}}',
        '{"changes": {"merging": "perhaps"}}',
        '{"changes": {"island.b": "sink"}}',
        '{"changes": {"island.../x": "drain"}}',
        '{"changes": {"seed": "1"}}',
        '{"changes": {"sync.quorum": 2}}',
        '{"changes": ["sync.quorum"]}',
        '{"changes": null}',
        "[]",
        "not JSON",
        "",
        "[" * 5000,
    ],
    ids=lambda body: body[:40],
)
def test_a_wrong_value_is_refused(client: TestClient, transport: MemoryTransport, body: str) -> None:
    answer = client.post("/api/steer", content=body, headers=RIGHT)
    assert answer.status_code == 400
    assert re.fullmatch(r".+\. .+", answer.json()["message"], re.DOTALL), "what happened, and what to do"
    assert transport.reader.control() == {}


def test_a_request_that_is_too_large_is_not_read(client: TestClient) -> None:
    answer = client.post("/api/steer", content=b" " * BODY_BYTES_MAX + b'{"changes": {}}', headers=RIGHT)
    assert (answer.status_code, "too large" in answer.json()["message"]) == (400, True)


def test_a_request_that_breaks_off_is_no_error(watch: Watcher, clock: Clock, transport: MemoryTransport) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/steer", "query_string": b"",
             "headers": [(b"authorization", RIGHT["Authorization"].encode())]}  # fmt: skip
    asyncio.run(application(watch, TOKEN, clock, clock)(scope, receive, send))
    assert sent[0]["status"] == 400
    assert transport.reader.control() == {}


def test_steering_while_redis_is_away(
    client: TestClient, transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steer(changes: dict[str, str]) -> None:
        raise UnreachableError("the Redis does not answer", "Is it running?")

    monkeypatch.setattr(transport.reader, "steer", steer)
    answer = client.post("/api/steer", json={"changes": {"merging": "paused"}}, headers=RIGHT)
    assert (answer.status_code, answer.json()["message"]) == (503, "the Redis does not answer. Is it running?")


# -- the watcher ------------------------------------------------------------------------------------------------------


def board(watch: Watcher) -> dict[str, Any]:
    return {"page": json.loads(watch.board.page), "charts": json.loads(watch.board.charts)}


def close_round(transport: MemoryTransport, number: int, **changes: Any) -> None:
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    commit = samples.commit([], round_number=number)
    transport.merger.commit(epoch, replace(commit, tape=replace(commit.tape, **changes)))


def test_an_outage_is_a_fault_from_its_beginning_to_its_end(
    watch: Watcher, transport: MemoryTransport, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.update()

    def silent(count: int) -> Any:
        raise UnreachableError("redis://somewhere does not answer", "Is it running?")

    with monkeypatch.context() as outage:
        outage.setattr(transport.reader, "tape", silent)
        for _ in range(3):
            clock.now += 1.0
            watch.update()
        fault = watch.board.fault(clock())
        assert fault is not None
        assert (fault.since_unix_seconds, fault.what) == (1001.0, "Redis does not answer")
        assert "redis://somewhere" in fault.more
    numbers = watch.board.page_number
    watch.update()
    assert watch.board.fault(clock()) is None
    assert watch.board.page_number == numbers + 1


def test_a_reading_that_hangs_is_an_outage() -> None:
    seen = Board()
    seen.begin_reading(50.0, 7000.0)
    assert seen.fault(50.0 + PATIENCE_SECONDS) is None
    fault = seen.fault(50.1 + PATIENCE_SECONDS)
    assert fault is not None
    assert (fault.since_unix_seconds, fault.what) == (7000.0, "Redis does not answer")
    seen.end_reading(None)
    assert seen.fault(1e9) is None


def test_rounds_are_followed_across_a_gap(watch: Watcher, transport: MemoryTransport, clock: Clock) -> None:
    watch.update()
    for number in range(2, 80):  # A reading requests fewer entries than this.
        close_round(transport, number, digest=f"{number:032x}")
    clock.now += 10.0
    watch.update()
    found = board(watch)
    assert found["charts"]["lines"]["round"] == list(range(1, 80))
    assert found["page"]["run"]["rounds"] == 79
    assert found["page"]["round_seconds"] == 0


def test_a_new_run_of_the_same_name_has_a_new_history(clock: Clock) -> None:
    broker = MemoryBroker(clock=clock)
    transport = a_run(broker)
    close_round(transport, 2)
    watch = Watcher(transport, transport.reader.manifest(), clock, clock)
    watch.update()
    assert board(watch)["charts"]["lines"]["round"] == [1, 2]
    broker.runs.clear()
    a_run(broker)
    clock.now += 10.0
    watch.update()
    assert board(watch)["charts"]["lines"]["round"] == [1]


def test_costly_readings_are_rare(clock: Clock) -> None:
    made: list[float] = []

    def read() -> float:
        clock.now += 2.0  # The reading takes this long.
        made.append(clock.now)
        return clock.now

    seldom = RareReading(read, clock)
    assert [seldom.newest(), seldom.newest()] == [1002.0, 1002.0]
    clock.now += SELDOM_SECONDS + 30.0  # 2 s of 40 s are the allowed share of a twentieth.
    assert seldom.newest() == 1002.0
    clock.now += 10.0
    assert seldom.newest() == clock.now
    seldom.forget()
    assert seldom.newest() == clock.now
    assert len(made) == 3


def test_every_value_becomes_valid_json() -> None:
    text = to_json({"a": [float("nan"), float("inf"), 1.0, 0.123456789, 1.7e9 + 0.25], "b": (True, None, "x", 7)})
    assert json.loads(text) == {"a": [None, None, 1, 0.12346, 1_700_000_000], "b": [True, None, "x", 7]}


# -- pure parts -------------------------------------------------------------------------------------------------------


def view(**changes: Any) -> RunView:
    base = summarise(MANIFEST, [], [], Books(), Pending(0, 0), [], {}, {}, Memory(0, 0))
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "control", "seconds", "word"),
    [
        ({}, {}, 0.0, "waiting"),
        ({"known": 2}, {}, 0.0, "no islands"),
        ({"rounds": 3}, {}, 0.0, "no islands"),
        ({"known": 2, "live": 2}, {}, 0.0, "starting"),
        ({"known": 2, "live": 2, "rounds": 3}, {}, 1e6, "training"),  # No contribution waits.
        ({"known": 2, "live": 2, "rounds": 3, "pending": 1}, {}, 1.0, "training"),
        ({"known": 2, "live": 2, "rounds": 3, "pending": 1}, {}, 59.0, "training"),  # `status` has the same limit.
        ({"known": 2, "live": 2, "rounds": 3, "pending": 1}, {}, 61.0, "stalled"),
        ({"known": 2, "live": 2, "rounds": 3, "pending": 1}, {"merging": "paused"}, 61.0, "paused"),
        ({"known": 2, "rounds": 3, "step": 2000}, {}, 0.0, "finished"),
        ({"known": 2, "rounds": 3, "step": 2000}, {"merging": "paused"}, 0.0, "finished"),
    ],
)
def test_the_state_of_a_run(changes: dict[str, int], control: dict[str, str], seconds: float, word: str) -> None:
    assert state_of(Reading(view(**changes), 0.0, seconds, 1, control), interval=24)["word"] == word


@pytest.mark.parametrize(
    ("status", "step", "word"),
    [
        (MergerStatus("m", 1, 4.0, 0.5), 4, "training"),
        (MergerStatus("", 1, 0.0, 0.5), 4, "no merger"),
        (MergerStatus(), 4, "training"),  # This broker does not know its merger.
        (MergerStatus("", 1, 0.0, 0.5), 2000, "training"),  # The islands of a run that has ended are about to leave.
    ],
)
def test_a_run_without_a_merger_is_not_shown_as_training(status: MergerStatus, step: int, word: str) -> None:
    seen = view(known=2, live=2, rounds=3, step=step)
    assert state_of(Reading(seen, 0.0, 0.0, 1, merger_status=status), interval=24)["word"] == word


def test_events_are_newest_first_and_repeated_refusals_are_counted() -> None:
    late = [(10.0 + n, Refusal("b", "x", n, n, 0, 100, "too old")) for n in range(3)]
    other = (13.0, Refusal("a", "x", 0, 9, 0, 100, "too old"))
    notes = [Note(1.0, "b", "joined", "new"), Note(11.5, "merger", "served", "in epoch 2")]
    found = [(e["unix_seconds"], e["who"], e["kind"], e["times"]) for e in events(notes, [*late, other])]
    assert found == [
        (13.0, "a", "refused", 1), (12.0, "b", "refused", 1), (11.5, "merger", "served", 1), (11.0, "b", "refused", 2),
        (1.0, "b", "joined", 1),
    ]  # fmt: skip


def test_the_newest_merger_holds_the_lease() -> None:
    notes = [Note(5.0, "merger-b", "served", "epoch 2"), Note(1.0, "merger-a", "served", "epoch 1")]
    assert lease(notes, 2)["who"] == "merger-b"
    assert lease([], 0) == {"who": "", "since": None, "text": "", "epoch": 0, "held": None}
    assert lease(notes, 2, MergerStatus("00b81fc22d7c", 2))["held"] is True
    assert lease(notes, 2, MergerStatus("", 2))["held"] is False  # The merger has died without a note.


def islands(**changes: Any) -> Any:
    beats = [Presence(samples.heartbeat("a", **changes), 0.0)]
    return summarise(MANIFEST, [], beats, Books(), Pending(0, 0), [], {}, {}, Memory(0, 0)).islands


def test_rates_converge_and_survive_a_restart() -> None:
    rates = measured({}, islands(bytes_up=1000), 0.0)
    assert (rates["a"].up, rates["a"].down) == (0.0, 0.0)
    for second in range(1, 120):
        rates = measured(rates, islands(bytes_up=1000 + 50 * second, bytes_down=7 * second), float(second))
    assert rates["a"].up == pytest.approx(50.0, rel=1e-3)
    assert rates["a"].down == pytest.approx(7.0, rel=1e-3)
    again = measured(rates, islands(bytes_up=0), 120.0)["a"]
    assert 0.0 < again.up < 50.0
    assert measured({"a": again}, islands(bytes_up=10), 120.0)["a"] == again  # No time has passed.
    assert isinstance(again, Rate)


def test_the_use_of_a_link_is_relative_to_its_speed() -> None:
    (island,) = islands(uplink_bytes_per_second=200.0, downlink_bytes_per_second=math.nan)
    lane = page_data._lane(island, [], Rate(0.0, 0, 0, 50.0, 7.0), {})
    assert lane["up_share"] == 0.25
    assert math.isnan(lane["down_share"]), "nothing was measured of its way down"
    for nonsense in (0.0, -1.0, math.nan):
        (island,) = islands(uplink_bytes_per_second=nonsense)
        assert math.isnan(page_data._lane(island, [], Rate(0.0, 0, 0, 50.0, 7.0), {})["up_share"])


def test_confirmations_and_stamps() -> None:
    assert len(sentence({"merging": "", "island.b": ""}).split(". ")) == 2, "a sentence for each change"
    assert sentence({})
    assert stamped({"checkpoint": "now", "merging": "paused"}, 12.5) == {"checkpoint": "12.500", "merging": "paused"}


# -- as a process -----------------------------------------------------------------------------------------------------


@contextmanager
def stream(address: str) -> Iterator[http.client.HTTPResponse]:
    host, port = address.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("GET", "/api/events")
        with connection.getresponse() as answer:
            yield answer


def next_event(answer: http.client.HTTPResponse, wanted: str) -> Any:
    """Return the data of the next event of that name."""
    while line := answer.readline().decode():
        if line == f"event: {wanted}\n":
            return json.loads(answer.readline().decode().removeprefix("data: "))
    pytest.fail("the stream ended")


def test_events_come_live_and_the_stream_ends_with_the_server(transport: MemoryTransport) -> None:
    watch = Watcher(transport, transport.reader.manifest())
    with ExitStack() as server, ExitStack() as page:
        address = server.enter_context(serving(watch, TOKEN, "127.0.0.1", 0))
        answer = page.enter_context(stream(address))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert next_event(answer, "page")["run"]["rounds"] == 1
        assert next_event(answer, "charts")["lines"]["round"] == [1]
        close_round(transport, 2)
        while next_event(answer, "page")["run"]["rounds"] != 2:
            pass
        while next_event(answer, "charts")["lines"]["round"] != [1, 2]:
            pass
        server.close()  # The page is connected meanwhile.
        assert not answer.read().endswith(b"data: ")
    assert not [thread for thread in threading.enumerate() if thread.name == "pages"]


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    """Return the URL of a database with one run, `sample`."""
    mine = server.url.removesuffix("/0") + "/6"
    transport = connect(mine, "sample")
    if "sample" not in transport.reader.runs():
        transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    transport.close()
    yield mine


def test_a_port_in_use_is_an_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert guarded(lambda: run(["dash", url, "--run", "sample", "--port", str(port), "--no-open"])) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--run", "nothing"], "broker.unknown-run"),
        (["--run", "sample", "--port", "70000"], "config.port"),
        (["--run", "sample", "--token", ""], "config.token"),
        (["--run", "sample", "--token", "a b"], "config.token"),
        (["--run", "sample", "--token", "schlüssel"], "config.token"),
        (["--run", "sample", "--host", "no.such.host.invalid"], "config.dash-host"),
        (["--run", "sample", "--host", "a" * 70], "config.dash-host"),
    ],
)
def test_a_wrong_option_is_an_error(url: str, args: list[str], code: str, handlers: None) -> None:
    with failing(ArchipelagoError, code):
        run(["dash", url, *args, "--no-open"])


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    assert len(main._token(None)) > 20
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert main._token(None) == TOKEN


def test_a_missing_server_is_an_error(handlers: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with failing(UnreachableError):
        run(["dash", f"redis://127.0.0.1:{port}", "--run", "sample", "--no-open"])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_a_signal_ends_it_while_a_page_is_connected(url: str, number: int) -> None:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "archipelago.ops",
        "dash",
        url,
        "--run",
        "sample",
        "--port",
        "0",
        "--no-open",
        "--json",
    ]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = json.loads(process.stdout.readline())
        greeting = process.stderr.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#token=open-sesame", greeting)
        assert found, greeting
        assert told == {"run": "sample", "address": found[1], "token": TOKEN}
        with stream(found[1]) as answer:
            assert next_event(answer, "page")["run"]["run"] == "sample"
            process.send_signal(number)
            assert process.wait() == 0
        assert process.stderr.read().count("\n") == 1  # It prints the token, and nothing about its end.


def test_it_loads_no_jax_and_no_plotly() -> None:
    code = "import sys, archipelago.ops.dashboard.main, archipelago.ops.dashboard.app, uvicorn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("archipelago.").partition(".")[0] for name in done.stdout.split()}
    assert {"starlette", "uvicorn", "redis"} <= loaded
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "islands", "plotly", "matplotlib"}


def test_an_outage_of_redis_is_shown_and_ends(tmp_path: Path) -> None:
    """The test stops and restarts its own server."""
    first = start_server(tmp_path / "redis")
    transport = connect(first.url, "sample")
    transport.create(MANIFEST, samples.first_snapshots(MANIFEST))
    watch = Watcher(transport, transport.reader.manifest())
    with serving(watch, TOKEN, "127.0.0.1", 0) as address, stream(address) as answer:
        assert next_event(answer, "page")["run"]["run"] == "sample"
        first.stop()
        fault = next_event(answer, "fault")
        while fault is None:
            fault = next_event(answer, "fault")
        assert fault["what"] == "Redis does not answer"
        assert "Connection refused" in fault["more"]
        assert first.url not in fault["more"]
        with start_server(tmp_path / "redis"):
            while next_event(answer, "fault") is not None:
                pass
            assert next_event(answer, "page")["run"]["run"] == "sample"
    transport.close()


def test_a_missing_chart_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with failing(ConfigError, "config.extra"):
        application(None, TOKEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "plotly"])
def test_the_dashboard_without_its_extra_is_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch, handlers: None, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or "dashboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with failing(ConfigError, "config.extra"):
        run(["dash", url, "--run", "sample", "--no-open"])


def test_the_list_of_verbs_and_status_need_no_extra(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("starlette", "uvicorn", "plotly", "matplotlib", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    assert run(["--help"]) == 0
    assert run(["status", url, "--run", "sample"]) == 1
