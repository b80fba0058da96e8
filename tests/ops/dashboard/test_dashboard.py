"""The dashboard without a browser: its data, the requests that it refuses, and its recovery from an outage."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from archipelago.broker.errors import UnknownRunError, UnreachableError
from archipelago.broker.memory.transport import MemoryBroker, MemoryTransport
from archipelago.broker.messages import Evaluation, Note, Refusal
from archipelago.broker.transport import Transport
from archipelago.ops.dashboard import metrics, page_data
from archipelago.ops.dashboard.app import application
from archipelago.ops.dashboard.main import serving
from archipelago.ops.dashboard.page_data import FILES, PAGE, Board, Boards
from archipelago.ops.experiments.virtual_time import VirtualClock
from archipelago.ops.watch.reading import PATIENCE_SECONDS, SELDOM_SECONDS, SILENT, Watcher
from archipelago.ops.watch.run_list import RunEntry
from tests import samples
from tests.failing import failing
from tests.intercept import Intercepted

MANIFEST = samples.manifest()


def a_run(broker: MemoryBroker) -> MemoryTransport:
    """Write a run with two islands, an evaluation, and a merged, a refused and a pending contribution."""
    transport = samples.begin(broker.connect("sample"))
    for name in ("a", "b"):
        transport.island.heartbeat(samples.heartbeat(name))
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    merged = transport.island.publish(samples.contribution(), b"payload")
    refused = transport.island.publish(samples.contribution(island="b"), b"payload")
    transport.merger.updates(0.0)
    transport.merger.commit(epoch, samples.commit([merged]))
    samples.refuse(transport, epoch, [(refused, Refusal("b", "x", 0, 1, 0, 100, "the digest is wrong"))])
    transport.island.publish(samples.contribution(sequence=1), b"payload")
    transport.reader.record_evaluation(Evaluation(1, 4, 100, 1.7e9, 5.0))
    transport.reader.note(Note(990.0, "merger", "served", "in epoch 1"))
    return transport


class Away(Intercepted):
    """A connection whose Redis can be away for some methods. `before` is called with the name of each method."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.away: set[str] = set()
        self.before: Callable[[str], object] = str

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.before(name)
        if name in self.away:
            raise UnreachableError("redis://somewhere does not answer", "Is it running?")
        return method(*args, **kwargs)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def transport(clock: VirtualClock) -> Away:
    return Away(a_run(MemoryBroker(clock=clock)))


@pytest.fixture
def watch(transport: Away, clock: VirtualClock) -> Watcher:
    return Watcher(transport, clock=clock, wall=clock)


@pytest.fixture
def boards(watch: Watcher) -> Boards:
    return Boards(watch)


@pytest.fixture
def client(boards: Boards) -> Iterator[TestClient]:
    boards.of("sample").update()
    with TestClient(application(boards), "http://localhost") as found:
        yield found


# -- its data ---------------------------------------------------------------------------------------------------------


def test_the_view_contains_everything_that_was_read(client: TestClient) -> None:
    found = client.get("/api/runs/sample/view").json()
    page, charts = found["page"], found["charts"]
    assert (page["run"], page["known"], page["live"], page["participating"]) == (
        "sample", 2, 2, 1,
    )  # fmt: skip
    assert found["state"]["word"] == "training"
    assert [(i["name"], i["strip"], i["participation"]) for i in page["islands"]] == [("a", [0], 1), ("b", [-1], 0)]
    counters = page["counters"]
    assert (counters["published"], counters["merged"], counters["refused"], page["pending"]) == (3, 1, 1, 1)
    assert (counters["published_tokens"], page["tokens_pending"]) == (300, 50)
    assert page["serving"] == "merger serves with epoch 1"
    assert ("b", "refused", "round 1: the digest is wrong") in {
        (event["who"], event["kind"], event["text"]) for event in page["events"]
    }
    assert page["settings"]["inner.steps"] == str(MANIFEST.config.inner.steps)
    assert page["settings"]["version.jax"] == "1"
    assert charts["held_out"] == {"round": [1], "tokens": [100], "unix_seconds": [1_700_000_000], "loss": [5]}
    assert charts["unit"] == page["unit"] == "bits per byte"
    assert charts["lines"]["round"] == [1]
    assert charts["lines"]["loss"] == [pytest.approx(2.5 / math.log(2), abs=1e-3)]  # The tape has 2.5 nats.
    assert charts["lines"]["rate"] == [pytest.approx(MANIFEST.config.inner.rate_at(charts["lines"]["step"][0]), 1e-4)]
    assert charts["now"] == {name: page[name] for name in ("rounds", "known", "live", "participating")}
    assert charts["staleness"] == [1]


def test_a_foreign_host_name_is_refused(boards: Boards) -> None:
    """Otherwise a page of that site could read the dashboard from its visitor's machine."""
    hosts = {
        "localhost:8765": 200, "127.0.0.1": 200, "[::1]:8765": 200, "192.0.2.7:8765": 200, "Dash.Example:80": 200,
        "evil.example:8765": 400, "localhost.evil.example": 400, "127.0.0.1.evil.example": 400, "": 400, "[": 400,
    }  # fmt: skip
    with TestClient(application(boards, ("localhost", "dash.example"))) as client:
        answers = {host: client.get("/api/runs/sample/view", headers={"host": host}).status_code for host in hosts}
    assert answers == hosts


def test_a_foreign_host_name_is_refused_on_every_address(watch: Watcher) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104 - the test is about this address
        with serving(Boards(watch), host, 0, ["dash.example"]) as address:
            port = int(address.rpartition(":")[2])
            for name, status in (("127.0.0.1", 200), ("dash.example", 200), ("evil.example", 400)):
                with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                    connection.request("GET", "/healthz", headers={"Host": name})
                    assert connection.getresponse().status == status, (host, name)


def test_all_files_of_the_page_are_served_here(client: TestClient) -> None:
    for path in (*FILES, "/", "/runs/sample", "/runs/sample/sync", "/runs/sample/islands/a", "/plotly.min.js"):
        answer = client.get(path)
        assert (answer.status_code, len(answer.content) > 1000) == (200, True), path
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    names = sorted(path.name for path in PAGE.iterdir())
    assert names == sorted([*FILES.values(), "index.html"])
    for name in names:
        text = (PAGE / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|(?<![:/])//[a-z0-9-]+\.[a-z]", text), name


def test_health_and_metrics_are_those_of_the_view(client: TestClient, watch: Watcher, transport: Away) -> None:
    assert client.get("/healthz").json() == {"serving": True, "redis": "answers"}
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    found = {s.name: s.value for family in text_string_to_metric_families(answer.text) for s in family.samples}
    view = samples.view_of(transport)
    assert set(found) <= {*metrics.RUN, *metrics.COUNTERS, *metrics.RUN_ISLAND}
    assert list(found.values()).count(view.held_out_last) >= 1
    transport.away = {"tape"}
    watch.update()
    assert client.get("/healthz").json() == {"serving": True, "redis": "redis://somewhere does not answer"}
    answer = client.get("/metrics")
    assert (answer.status_code, answer.text) == (503, "redis://somewhere does not answer\n")


def test_other_runs_are_listed_and_opened_when_somebody_asks(watch: Watcher, clock: VirtualClock) -> None:
    entries = [
        RunEntry("other", "redis", "training"),
        RunEntry("ill", "redis", "training", problems=2),
        RunEntry("shut", "runs/shut", "ended", is_served=False),
    ]
    asked: list[str] = []
    shown: list[Board] = []

    def opened(run: str) -> Watcher:
        asked.append(run)
        if run == "hung":
            other = threading.Thread(target=lambda: shown.append(several.of("other")), daemon=True)
            other.start()
            other.join(10.0)
            assert shown, "an open run waits for one that hangs"
        if run != "other":
            raise UnknownRunError("its Redis does not run", "Start it.")
        return watch

    with Boards(None, lambda: entries, opened) as several:
        client = TestClient(application(several), "http://localhost")
        found = client.get("/api/runs").json()
        assert [(run["run"], run["mood"], run["is_served"]) for run in found] == [
            ("other", "good", True), ("ill", "warn", True), ("shut", "idle", False),
        ]  # fmt: skip
        assert not asked
        for run, status in (("other", 200), ("shut", 404), ("../etc", 404), ("other", 200)):
            assert client.get(f"/api/runs/{run}/view").status_code == status, run
        assert asked == ["other", "shut"], "each is opened once; a name with a slash is no address"
        assert client.get("/api/runs/hung/view").status_code == 404
        assert client.get("/metrics").status_code == 503, "no run was named"
    boards = Boards(watch)
    assert boards.listed() == [{"run": "sample", "is_served": True}]
    with failing(UnknownRunError, "broker.unknown-run"):
        boards.of("other")


def test_a_run_that_nobody_looks_at_is_read_no_more(transport: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(run: str) -> Watcher:
        if run == "none":
            raise UnknownRunError("there is no such run", "Name another.")
        return Watcher(transport)

    with Boards(None, tuple, opened) as boards:
        a = boards.of("a")
        b = boards.of("b")
        assert (boards.of("a"), boards.of("b")) == (a, b)
        monkeypatch.setattr(page_data, "IDLE_SECONDS", -1.0)
        with failing(UnknownRunError, "broker.unknown-run"):
            boards.of("none")
        assert (boards.of("a"), boards.of("b")) == (a, b), "a run that is not there closes none"
        boards.of("c")
        assert boards.of("a") is not a, "it was closed, and is opened again"


def test_a_run_that_was_made_again_is_found_at_its_new_address(watch: Watcher, transport: Away) -> None:
    newer, now = Watcher(watch.transport, clock=lambda: 100.0), [0.0]
    answers: list[Watcher | None] = [None, newer]

    def again() -> Watcher:
        if (found := answers.pop(0)) is None:
            raise UnknownRunError("its Redis does not run", "Start it.")
        return found

    board = Board(Watcher(transport, clock=lambda: now[0]), again)
    board.update()
    before = board.page
    transport.away = {"tape"}
    for later, left in ((1.0, 2), (10.0, 1), (11.0, 1), (20.0, 0)):
        now[0] = later
        board.update()
        assert len(answers) == left, f"a look at {later} s"
        assert board.page == before, "its page is shown meanwhile"
    assert board.watch is newer


def test_nothing_can_be_changed(client: TestClient) -> None:
    for method in ("post", "put", "delete", "patch"):
        for path in ("/", "/api/runs", "/api/runs/sample/view", "/metrics"):
            assert client.request(method, path, json={"changes": {"merging": "paused"}}).status_code == 405, method


# -- the watcher ------------------------------------------------------------------------------------------------------


def close_round(transport: Transport, number: int, **changes: Any) -> None:
    epoch = transport.merger.acquire("merger", 10.0)
    assert epoch is not None
    commit = samples.commit([], round_number=number)
    transport.merger.commit(epoch, replace(commit, tape=replace(commit.tape, **changes)))


def test_a_reading_that_hangs_is_an_outage(watch: Watcher, transport: Away, clock: VirtualClock) -> None:
    seen: list[str] = []

    def hang(name: str) -> None:
        for seconds in (PATIENCE_SECONDS, 0.1) if name == "tape" else ():
            clock.now += seconds
            seen.append(found.what if (found := watch.outage()) else "")

    transport.before = hang
    watch.update()
    assert watch.update()
    assert seen[-2:] == ["", SILENT]
    assert watch.outage() is None


def test_rounds_are_followed_across_a_gap_and_a_new_run_of_the_same_name_has_a_new_history(clock: VirtualClock) -> None:
    broker = MemoryBroker(clock=clock)
    transport = a_run(broker)
    board = Board(Watcher(transport, clock=clock, wall=clock))
    board.update()
    for number in range(2, 80):  # A reading requests fewer entries than this.
        close_round(transport, number, digest=f"{number:032x}")
    clock.now += 10.0
    board.update()
    assert json.loads(board.charts)["lines"]["round"] == list(range(1, 80))
    assert json.loads(board.page)["rounds"] == 79
    broker.runs.clear()
    a_run(broker)
    board.update()
    assert json.loads(board.charts)["lines"]["round"] == [1], "a new history is drawn at once"


def test_what_takes_long_is_read_rarely(watch: Watcher, transport: Away, clock: VirtualClock) -> None:
    made, others = list[float](), list[str]()

    def slow(name: str) -> None:
        if name in {"refusals", "merger_state"}:
            others.append(name)
        if name == "evaluations":
            clock.now += 2.0  # The reading takes this long.
            made.append(clock.now)

    transport.before = slow
    for seconds, count in ((0.0, 1), (0.0, 1), (SELDOM_SECONDS + 30.0, 1), (10.0, 2)):
        clock.now += seconds  # 2 s of 40 s are the allowed share of a twentieth.
        watch.update()
        assert (len(made), len(others)) == (count, 2 * count), seconds
