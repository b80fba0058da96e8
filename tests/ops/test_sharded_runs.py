"""The verbs and pages that read or steer a run of several shards, also while a shard cannot be reached."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from archipelago.broker.control import EXPEL
from archipelago.broker.errors import UnreachableError
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import whole
from archipelago.broker.transport import Transport
from archipelago.islands.evaluation import published
from archipelago.islands.tasks.workload import Workload
from archipelago.merger.scores import Score
from archipelago.ops import run_source
from archipelago.ops.commands import run as command
from archipelago.ops.dashboard.app import application
from archipelago.ops.dashboard.page_data import Board, Boards
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.watch import report, run_list
from archipelago.ops.watch.reading import Watcher
from archipelago.ops.watch.state_line import state_line
from archipelago.ops.watch.status import line
from archipelago.ops.weights.export import find
from tests import samples
from tests.failing import failing
from tests.intercept import Intercepted
from tests.sharded import closed, create_sharded, newest_round, train_sharded

GOOD, BAD = Score(10.0, 10.0, 0.01), Score(-5.0, 10.0, 0.01)


@pytest.fixture(scope="module")
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def demo(url: str, small_task: Workload) -> VirtualRun:
    """A run with two shards. A merger serves shard 0 for longer than the tests take, and none serves shard 1."""
    made = train_sharded(small_task, url)
    for merger in made.mergers:
        merger.transport.merger.release(merger.epoch)
    assert made.mergers[0].transport.merger.acquire("one", 3600.0)
    return made


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the JSON object that a verb prints, whatever its exit status."""
    capsys.readouterr()
    command([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def shown(board: Board) -> tuple[Any, Any]:
    """Return the page and the charts after one more reading."""
    board.update()
    assert board.watch.outage() is None
    return json.loads(board.page), json.loads(board.charts)


# -- reading --------------------------------------------------------------------------------------------------------


def test_status_shows_all_shards_and_which_has_no_merger(
    url: str, demo: VirtualRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "status", url)
    counters = demo.transport.reader.counters()
    assert found["rounds"] == newest_round(demo)
    assert (found["fragments"], found["shards"]) == (6, [list(mine) for mine in demo.manifest.shard_layout.fragments])
    assert (found["counters"]["published"], found["counters"]["merged"]) == (counters.published, counters.merged)
    assert counters.merged > demo.mergers[0].transport.reader.counters().merged
    assert [shard["holder"] for shard in found["merger"]["shards"]] == ["one", ""]
    (problem,) = [each for each in found["problems"] if each["code"] == "merger.missing"]
    assert problem["text"] == "No merger serves shard 1, and the others go on."
    assert f"archipelago merger {url} --run demo" in problem["remedy"], "the whole command"
    command(["status", url])
    shown = " ".join(capsys.readouterr().out.split())
    assert "no merger serves shard 1; the others have one (shard 0)" in shown


def test_parameters_come_from_all_shards(url: str, demo: VirtualRun) -> None:
    found = find(url, "demo")
    wanted, number, _ = published(demo.transport, demo.manifest)
    assert (found.round, set(found.params)) == (number, set(wanted))
    assert all(np.array_equal(found.params[name], wanted[name]) for name in wanted)


# -- steering -------------------------------------------------------------------------------------------------------


def test_requests_reach_every_merger(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"fakeredis://{uuid.uuid4().hex}"
    transport = connect(address, "demo")
    whole = create_sharded(transport)
    wanted = {"merging": "paused", "inner.steps": "3000", "island.a": "expel"}
    printed(capsys, "steer", address, *(f"{name}={value}" for name, value in wanted.items()), "checkpoint")
    for shard in whole.shards:
        found = shard.reader.control()
        assert found.pop("checkpoint")
        assert found == wanted
    printed(capsys, "steer", address, "merging=", "island.a=")
    assert [set(shard.reader.control()) for shard in whole.shards] == [{"checkpoint", "inner.steps"}] * 2
    transport.close()


def test_an_expulsion_by_one_merger_holds_in_all_shards(small_task: Workload) -> None:
    run = train_sharded(small_task, rounds=1)
    before = {"island-1": GOOD}
    controls, config = run.mergers[1].controls, small_task.config
    controls.config = replace(config, merge=replace(config.merge, expel_after=1))
    controls.tell_of_scores(before, {"island-1": BAD._replace(lowered=1)})
    assert [merger.transport.reader.control() for merger in run.mergers] == [{"island.island-1": EXPEL}] * 2
    run.turn()
    assert all("island-1" in merger.inbox.barred for merger in run.mergers)
    run.advance_until(lambda: "island-1" not in run.islands)
    assert "island-0" in run.islands, "the run has ended"


def test_requests_are_noted_once_and_notes_name_the_rounds_of_the_run(small_task: Workload) -> None:
    run = train_sharded(small_task, rounds=3)
    behind = run.mergers[1].rounds.closed
    run.transport.reader.steer({"merging": "paused"})
    run.turn()
    assert [note.kind for note in run.transport.reader.notes(50)].count("paused") == 1
    run.mergers[1] = run.merger_of(1)
    assert run.transport.reader.notes(1)[0].text == f"epoch 2 begins after round {behind} of shard 1"


# -- a shard that cannot be reached ---------------------------------------------------------------------------------


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


@pytest.fixture
def run(demo: VirtualRun) -> Cut:
    """A connection to the run, which cannot reach shard 1."""
    for island in demo.islands.values():
        island.link.pump_heartbeat()  # The last ones may be old on a loaded machine.
    return Cut(demo.connect_as("admin"), cut={1})


def shown_by_status(run: Cut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what `status` prints. Its exit status is 1."""
    monkeypatch.setattr(run_source, "connect_to", lambda url, run_name: run)
    capsys.readouterr()
    assert command(["status", "redis://nowhere", *flags]) == 1
    return capsys.readouterr().out


def test_status_shows_the_shards_that_answer(
    demo: VirtualRun, run: Cut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(shown_by_status(run, monkeypatch, capsys, "--json"))
    problem = found["problems"][0]
    assert (problem["code"], problem["mood"]) == ("shard.unreachable", "bad")
    assert problem["text"].startswith("Shard 1 cannot be reached: the node does not answer. ")
    fragments = demo.manifest.shard_layout.fragments[1]
    names = [str(fragment) for fragment in fragments]
    assert f"leave out fragments {', '.join(names[:-1])} and {names[-1]} of 6" in problem["text"]
    assert found["unreachable"] == {"1": "the node does not answer"}
    assert "merger.missing" not in {each["code"] for each in found["problems"]}
    assert [shard["is_away"] for shard in found["merger"]["shards"]] == [False, True]
    own = demo.mergers[0].transport.reader.counters()
    assert (found["counters"]["published"], found["counters"]["merged"]) == (own.published, own.merged)
    assert (found["known"], found["fragments"]) == (2, 6)
    text = " ".join(shown_by_status(run, monkeypatch, capsys).split())
    assert "one (shard 0) serves with epoch" in text
    assert "; shard 1 cannot be reached" in text


def test_the_accounts_of_tokens_are_those_of_the_other_fragments(demo: VirtualRun, run: Cut) -> None:
    """What was merged into the shard that is away does not count as lost."""
    whole_view = samples.view_of(demo.transport)
    view = samples.view_of(run)
    assert view.unreachable
    assert view.tokens_trained == whole_view.tokens_trained
    own = demo.mergers[0].transport.reader.counters()
    assert view.tokens_merged == own.merged_tokens // len(demo.manifest.shard_layout.fragments[0])
    assert view.tokens_lost < view.tokens_trained // 4


def test_what_decides_needs_all_shards_and_what_is_shown_needs_shard_0(
    demo: VirtualRun, run: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = whole(run, demo.manifest).reader
    for read in (strict.counters, strict.merger_state, strict.heads, lambda: strict.tape(5)):
        with failing(UnreachableError):
            read()
    with failing(UnreachableError):
        whole(run, demo.manifest, for_display=True).reader.steer({"merging": "paused"})
    gone = Cut(demo.connect_as("admin"), cut={0})
    monkeypatch.setattr(run_source, "connect_to", lambda url, run_name: gone)
    with failing(UnreachableError):
        command(["status", "redis://nowhere"])


def test_the_live_status_counts_the_rounds_of_all_shards_and_goes_on(demo: VirtualRun) -> None:
    run = Cut(demo.connect_as("admin"))
    watcher = Watcher(run)
    for _ in range(2):  # the same rounds are not counted again
        assert watcher.update(), watcher.outage()
        assert watcher.latest is not None
        assert len(watcher.history.details()["round"]) == sum(closed(demo))
        assert watcher.latest.view.rounds == newest_round(demo)
    run.cut.add(1)
    assert watcher.update(), watcher.outage()
    assert watcher.latest is not None
    assert watcher.latest.problems[0].code == "shard.unreachable"
    assert len(watcher.history.details()["round"]) == sum(closed(demo)), "the rounds that were read are forgotten"
    assert "Shard 1 cannot be reached" in line(watcher.latest)


def test_the_page_goes_on_and_reads_the_history_of_a_shard_that_returns(demo: VirtualRun, run: Cut) -> None:
    watcher = Watcher(run)
    board = Board(watcher)
    page, charts = shown(board)
    assert page["problems"][0]["code"] == "shard.unreachable"
    assert watcher.latest is not None
    assert state_line(watcher.latest).word == "shard away"
    assert page["serving"].startswith("one (shard 0) serves with epoch ")
    assert page["serving"].endswith("; shard 1 cannot be reached")
    assert len(charts["details"]["round"]) == closed(demo)[0]
    merged = watcher.latest.view.tokens_merged
    assert charts["lines"]["tokens"][-1] == pytest.approx(merged, abs=1), "both are means over the fragments of shard 0"
    run.cut.clear()
    page, charts = shown(board)
    assert "shard.unreachable" not in {each["code"] for each in page["problems"]}
    assert len(charts["details"]["round"]) == sum(closed(demo))


def test_a_report_and_the_lists_of_runs_say_what_they_lack(demo: VirtualRun, run: Cut) -> None:
    found = report.of_watch(Watcher(run))
    assert found["page"]["problems"][0].code == "shard.unreachable"
    assert "Shard 1 cannot be reached" in report.html(found, "")
    assert run_list.entry_of(run, "redis").state == "shard away"


def test_metrics_need_all_shards(demo: VirtualRun, run: Cut) -> None:
    """Counters that leave out a shard would seem to go backwards."""
    for status in (503, 200):
        boards = Boards(Watcher(run))
        boards.of("demo").update()
        client = TestClient(application(boards), base_url="http://localhost")
        answer = client.get("/metrics")
        assert (answer.status_code, answer.text == "the node does not answer\n") == (status, status == 503)
        run.cut.clear()
