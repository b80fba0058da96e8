"""What shows a run goes on while a further shard cannot be reached, and says so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from archipelago.broker.errors import UnreachableError
from archipelago.broker.shards.transport import shards_away, whole
from archipelago.broker.transport import Transport
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.commands import run as command
from archipelago.ops.dashboard import run_list as page_run_list
from archipelago.ops.dashboard.watcher import Watcher as PageWatcher
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.watch import report, run_list
from archipelago.ops.watch.live import Watcher as LiveWatcher
from archipelago.ops.watch.live import print_text
from archipelago.ops.watch.run_view import observe
from archipelago.ops.watch.status import StatusOptions
from tests.failing import failing
from tests.intercept import Intercepted
from tests.sharded import closed, train_sharded


class Cut(Intercepted):
    """A connection to a run, whose connections to `cut` shards fail."""

    def __init__(self, inner: Transport, shard: int = 0, cut: set[int] | None = None) -> None:
        super().__init__(inner)
        self.shard, self.cut = shard, set() if cut is None else cut

    def of_shard(self, shard: int) -> Cut:
        return Cut(self.inner.of_shard(shard), shard, self.cut)  # type: ignore[attr-defined]

    def intercept(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.shard in self.cut:
            raise UnreachableError("the node does not answer")
        return super().intercept(name, method, *args, **kwargs)


@pytest.fixture(scope="module")
def demo(small_task: Workload) -> VirtualRun:
    """A run with two shards, each served by a merger of its own name."""
    made = train_sharded(small_task, f"fakeredis://{uuid.uuid4().hex}")
    for shard, merger in enumerate(made.mergers):
        merger.transport.merger.release(merger.epoch)
        assert merger.transport.merger.acquire(f"m{shard}", 1e6)
    return made


@pytest.fixture
def run(demo: VirtualRun) -> Cut:
    """A connection to the run, which cannot reach shard 1."""
    return Cut(demo.connect_as("admin"), cut={1})


def printed(run: Cut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what `status` prints. Its exit status is 1."""
    monkeypatch.setattr(StatusOptions, "connect", lambda self: run)
    capsys.readouterr()
    assert command(["status", "redis://nowhere", *flags]) == 1
    return capsys.readouterr().out


def test_status_shows_the_shards_that_answer(
    demo: VirtualRun, run: Cut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(run, monkeypatch, capsys, "--json"))
    problem = found["problems"][0]
    assert (problem["code"], problem["mood"]) == ("shard.unreachable", "bad")
    assert problem["text"].startswith("Shard 1 cannot be reached: the node does not answer. ")
    fragments = demo.manifest.shard_layout.fragments[1]
    names = [str(fragment) for fragment in fragments]
    assert f"leave out fragments {', '.join(names[:-1])} and {names[-1]} of 6" in problem["text"]
    assert found["unreachable"] == {"1": "the node does not answer"}
    assert "shard.no-merger" not in {each["code"] for each in found["problems"]}
    assert [shard["is_away"] for shard in found["merger"]["shards"]] == [False, True]
    own = demo.mergers[0].transport.reader.books()
    assert (found["books"]["published"], found["books"]["merged"]) == (own.published, own.merged)
    assert found["balanced"]
    assert (found["known"], found["fragments"]) == (2, 6)
    text = " ".join(printed(run, monkeypatch, capsys).split())
    assert "trouble shard 1 cannot be reached, so its figures are missing" in text
    assert "m0 (shard 0) serves with epoch" in text
    assert "; shard 1 cannot be reached" in text


def test_the_accounts_of_tokens_are_those_of_the_other_fragments(demo: VirtualRun, run: Cut) -> None:
    """What was merged into the shard that is away does not count as lost."""
    whole_view = observe(demo.transport, demo.manifest)
    view = observe(whole(run, demo.manifest, for_display=True), demo.manifest)
    assert view.unreachable
    assert view.tokens_trained == whole_view.tokens_trained
    own = demo.mergers[0].transport.reader.books()
    assert view.tokens_merged == own.merged_tokens // len(demo.manifest.shard_layout.fragments[0])
    assert view.tokens_lost < view.tokens_trained // 4


def test_what_decides_needs_all_shards_and_what_is_shown_needs_shard_0(
    demo: VirtualRun, run: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = whole(run, demo.manifest).reader
    for read in (strict.cursors, strict.books, strict.merger_state, strict.heads, lambda: strict.tape(5)):
        with failing(UnreachableError):
            read()
    with failing(UnreachableError):
        whole(run, demo.manifest, for_display=True).reader.steer({"merging": "paused"})
    gone = Cut(demo.connect_as("admin"), cut={0})
    monkeypatch.setattr(StatusOptions, "connect", lambda self: gone)
    with failing(UnreachableError):
        command(["status", "redis://nowhere"])


def test_the_live_status_goes_on(demo: VirtualRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = Cut(demo.connect_as("admin"))
    watcher = LiveWatcher(run)
    assert watcher.read(), watcher.error
    run.cut.add(1)
    assert watcher.read(), watcher.error
    assert watcher.latest is not None
    assert watcher.latest.advice.startswith("redis: Shard 1 cannot be reached")
    assert watcher.latest.events[-1].kind == "unreachable"
    assert len(watcher.latest.closes) == sum(closed(demo)), "the rounds that were read are forgotten"
    print_text(watcher.latest, "")
    assert "TROUBLE: shard 1 cannot be reached, so its figures are missing" in capsys.readouterr().out


def test_the_page_goes_on_and_reads_the_history_of_a_shard_that_returns(demo: VirtualRun, run: Cut) -> None:
    watcher = PageWatcher(run, demo.manifest)
    watcher.update()
    assert watcher.board.fault(watcher.clock()) is None
    page, charts = json.loads(watcher.board.page), json.loads(watcher.board.charts)
    assert page["problems"][0]["code"] == "shard.unreachable"
    assert (page["state"]["word"], page["state"]["mood"]) == ("shard away", "warn")
    assert page["serving"]["shards"] == "Mergers: m0 (shard 0), shard 1 cannot be reached."
    assert len(charts["details"]["round"]) == closed(demo)[0]
    run.cut.clear()
    reader: Any = watcher.transport.reader
    reader._clock, reader._aside = lambda: float("inf"), lambda attempt: attempt()
    watcher.update()  # it asks the shard aside
    watcher._charts_due = 0.0
    watcher.update()
    page, charts = json.loads(watcher.board.page), json.loads(watcher.board.charts)
    assert "shard.unreachable" not in {each["code"] for each in page["problems"]}
    assert len(charts["details"]["round"]) == sum(closed(demo))


def test_an_outage_keeps_the_history_of_the_page(demo: VirtualRun) -> None:
    run = Cut(demo.connect_as("admin"))
    watcher = PageWatcher(run, demo.manifest)
    watcher.update()
    before, transport = watcher._history, watcher.transport
    run.cut.add(1)
    watcher.update()
    assert (watcher._history, watcher.transport) == (before, transport)
    assert shards_away(watcher.transport)
    assert len(before.details()["round"]) == sum(closed(demo))


def test_a_report_and_the_lists_of_runs_say_what_they_lack(demo: VirtualRun, run: Cut) -> None:
    found = report.of_watch(PageWatcher(run, demo.manifest))
    assert found.data["page"]["problems"][0]["code"] == "shard.unreachable"
    assert "Shard 1 cannot be reached" in report.html(found, "")
    assert run_list.entry_of(run, "redis").state == "shard away"
    assert page_run_list.of_redis(run, None)[0].state == "shard away"


def test_metrics_need_all_shards(demo: VirtualRun, run: Cut) -> None:
    """Counters that leave out a shard would seem to go backwards."""
    testclient = pytest.importorskip("starlette.testclient")
    from archipelago.ops.dashboard.app import application

    for status in (503, 200):
        watcher = PageWatcher(run, demo.manifest)
        watcher.update()
        client = testclient.TestClient(application(watcher, "token"), base_url="http://localhost")
        answer = client.get("/metrics")
        assert (answer.status_code, answer.text == "the node does not answer\n") == (status, status == 503)
        run.cut.clear()
