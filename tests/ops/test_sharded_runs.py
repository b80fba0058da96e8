"""The verbs and pages that read or steer a run, over a run of several shards. Shard 0 alone would not do."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipelago.broker.control import EXPEL
from archipelago.broker.errors import BrokerError
from archipelago.broker.invitation import Member
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.evaluation import published
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.merger.scores import Score
from archipelago.ops.commands import run as command
from archipelago.ops.dashboard.run_list import RunList
from archipelago.ops.dashboard.watcher import Watcher as PageWatcher
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.launch.administration import Administrator, Guest
from archipelago.ops.launch.embedded_redis import Server
from archipelago.ops.watch.live import Watcher as LiveWatcher
from archipelago.ops.weights.parameters import find
from tests import samples
from tests.failing import failing
from tests.servers import empty_database
from tests.sharded import closed, create_sharded, newest_round, train_sharded
from tests.small import SMALL

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


@pytest.fixture
def home(url: str, demo: VirtualRun) -> Iterator[RedisTransport]:
    """A connection to the run as a verb makes it: to shard 0."""
    made = connect(url, "demo")
    yield made
    made.close()


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the JSON object that a verb prints, whatever its exit status."""
    capsys.readouterr()
    command([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- reading --------------------------------------------------------------------------------------------------------


def test_status_shows_all_shards_and_which_fragments_stand_still(
    url: str, demo: VirtualRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "status", url)
    books = demo.transport.reader.books()
    assert found["rounds"] == newest_round(demo)
    assert (found["fragments"], found["shards"]) == (6, [list(mine) for mine in demo.manifest.shard_layout.fragments])
    assert (found["books"]["published"], found["books"]["merged"]) == (books.published, books.merged)
    assert books.merged > demo.mergers[0].transport.reader.books().merged
    assert found["balanced"]
    assert [shard["holder"] for shard in found["merger"]["shards"]] == ["one", ""]
    (problem,) = [each for each in found["problems"] if each["code"] == "shard.no-merger"]
    names = [str(fragment) for fragment in demo.manifest.shard_layout.fragments[1]]
    assert problem["text"].startswith("No merger serves shard 1. ")
    assert f"fragments {', '.join(names[:-1])} and {names[-1]} of 6" in problem["text"]
    assert "archipelago merger URL --run demo" in problem["remedy"]
    command(["status", url])
    shown = " ".join(capsys.readouterr().out.split())
    assert "no merger serves shard 1; the others have one (shard 0)" in shown


def test_status_live_counts_the_rounds_of_all_shards(demo: VirtualRun, home: RedisTransport) -> None:
    watcher = LiveWatcher(home)
    for _ in range(2):  # the same rounds are not counted again
        assert watcher.read(), watcher.error
        assert watcher.latest is not None
        assert len(watcher.latest.closes) == sum(closed(demo))
        assert watcher.latest.view.rounds == newest_round(demo)


def test_the_page_shows_all_shards(demo: VirtualRun, home: RedisTransport) -> None:
    watcher = PageWatcher(home, home.reader.manifest())
    watcher.update()
    watcher.update()
    assert watcher.board.fault(watcher.clock()) is None
    page, charts = json.loads(watcher.board.page), json.loads(watcher.board.charts)
    assert len(charts["details"]["round"]) == sum(closed(demo))
    assert page["run"]["rounds"] == newest_round(demo)
    assert page["serving"]["shards"] == "Mergers: one (shard 0), no merger serves shard 1."
    assert charts["lines"]["round"] == sorted(charts["lines"]["round"])
    assert charts["marks"]["text"] == [], "two mergers are no takeover"
    assert {problem["code"] for problem in page["problems"]} >= {"shard.no-merger"}


def test_the_page_follows_all_shards(small_task: Workload) -> None:
    made = train_sharded(small_task, rounds=2)
    watcher = PageWatcher(made.transport, made.manifest, made.clock, made.clock)
    watcher.update()
    first = watcher._history
    made.advance_until(lambda: min(closed(made)) >= 8)
    watcher.update()
    assert watcher._history is first, "the history began anew"
    assert len(first.details()["round"]) == sum(closed(made))


def test_the_runs_of_the_page_and_of_the_verb_are_whole(
    url: str, demo: VirtualRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = printed(capsys, "runs", url)["runs"]
    newest = demo.transport.reader.tape(1)[0]
    assert (entry["run"], entry["round"], entry["step"]) == ("demo", newest.round, newest.step)
    runs = RunList(partial(connect, url), "demo", tmp_path, lambda: 0.0)
    (row,) = runs.newest()["runs"]
    assert row["tokens"] == printed(capsys, "status", url)["tokens_trained"]


def test_a_report_shows_all_shards(
    url: str, demo: VirtualRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "report", url, "--out", str(tmp_path / "report.html"))
    assert found["page"]["run"]["rounds"] == newest_round(demo)
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    assert len(json.loads(data[1])["charts"]["details"]["round"]) == sum(closed(demo))


def test_parameters_come_from_all_shards(url: str, demo: VirtualRun) -> None:
    found = find(url, "demo")
    wanted, number, _ = published(demo.transport, demo.manifest)
    assert (found.round, set(found.params)) == (number, set(wanted))
    assert all(np.array_equal(found.params[name], wanted[name]) for name in wanted)


@pytest.mark.full
def test_evaluate_export_and_generate(corpus: OpenCorpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SMALL, data=replace(SMALL.data, corpus="small-text"), inner=replace(SMALL.inner, steps=480))
    url = f"fakeredis://{uuid.uuid4().hex}"
    trained = train_sharded(our_work(config, corpus), url, rounds=1)
    number = newest_round(trained)
    assert printed(capsys, "evaluate", url)["round"] == number
    assert trained.transport.reader.evaluations()[-1].round == number
    assert printed(capsys, "export", url, "--out", str(tmp_path / "out"))["round"] == number
    assert printed(capsys, "generate", url, "--tokens", "3")["tokens"] == 3


# -- steering -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server_url(server: Server) -> Iterator[str]:
    """The URL of a database of a real server without runs."""
    with empty_database(server, 7) as url:
        yield url


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
    controls.tell_of_scores(before, {"island-1": replace(BAD, lowered=1)})
    assert [merger.transport.reader.control() for merger in run.mergers] == [{"island.island-1": EXPEL}] * 2
    run.turn()
    assert all(merger.controls.refuses("island-1") for merger in run.mergers)
    run.advance_until(lambda: "island-1" not in run.islands)
    assert "island-0" in run.islands, "the run has ended"


def test_requests_are_noted_once_and_notes_name_the_rounds_of_the_run(small_task: Workload) -> None:
    run = train_sharded(small_task, rounds=3)
    behind = run.manifest.shard_layout.run_round(1, closed(run)[1])
    assert behind != closed(run)[1]
    run.transport.reader.steer({"merging": "paused"})
    run.turn()
    assert [note.kind for note in run.transport.reader.notes(50)].count("paused") == 1
    run.new_merger(1)
    assert run.transport.reader.notes(1)[0].text == f"epoch 2 begins after round {behind} of shard 1"


def test_rm_deletes_all_shards_of_one_run(server_url: str) -> None:
    transport, other = connect(server_url, "demo"), connect(server_url, "demo2")
    whole = create_sharded(transport)
    create_sharded(other)
    for shard in whole.shards:
        shard.island.publish(samples.contribution(), b"payload")
    transport.membership.set_user("demo~oslo", "secret", ["reset", "on"])
    transport.membership.put("oslo", Member(role="viewer", user="demo~oslo"))
    raw = transport.connection.redis
    kept = {key: raw.dump(key) for key in raw.scan_iter("{demo2:*")}
    assert command(["rm", "demo", server_url, "--yes"]) == 0
    assert {key: raw.dump(key) for key in raw.scan_iter() if key != b"archipelago:runs"} == kept
    assert "demo~oslo" not in raw.acl_users()
    assert transport.reader.runs() == ["demo2"]
    transport.close()
    other.close()


def test_rm_refuses_while_a_merger_serves_a_shard_and_ends_an_interrupted_creation(server_url: str) -> None:
    transport = connect(server_url, "demo")
    create_sharded(transport).shards[1].merger.acquire("two", 600.0)
    with failing(BrokerError, "run.alive"):
        command(["rm", "demo", server_url, "--yes"])
    transport.connection.redis.flushdb()
    manifest = replace(samples.manifest("demo"), shards=2)
    transport.of_shard(1).create(manifest.of_shard(1), samples.first_snapshots(manifest.of_shard(1)))
    assert command(["rm", "demo", server_url, "--yes"]) == 0
    assert transport.connection.redis.keys() == []
    transport.close()


# -- members --------------------------------------------------------------------------------------------------------


def test_members_have_their_rights_in_all_shards(server: Server, tmp_path: Path) -> None:
    run = f"demo-{uuid.uuid4().hex[:8]}"
    transport = connect(server.url, run)
    whole = create_sharded(transport)
    administrator = Administrator(transport, server.url, tmp_path)
    invited = {role: administrator.invite(Guest(role, role)) for role in ("island", "merger", "operator", "viewer")}
    joined = {role: connect(each.url, run, each) for role, each in invited.items()}
    manifest = transport.reader.manifest()
    for number in range(2):
        island, merger, operator, viewer = (each.of_shard(number) if number else each for each in joined.values())
        epoch = merger.merger.acquire("m", 5.0)
        assert epoch is not None
        island.island.heartbeat(samples.heartbeat("island"))
        island.island.publish(samples.contribution(b"x", island="island"), b"x")
        (delivery,) = merger.merger.updates(0.0)
        assert delivery.contribution is not None, delivery.fault
        operator.reader.steer({"merging": "paused"})
        assert viewer.reader.control() == {"merging": "paused"}
        snapshot, _ = viewer.reader.fragment(0)  # signed, as the rest of the run
        assert snapshot.version == 0
    assert joined["viewer"].reader.manifest() == manifest
    administrator.revoke("island")
    assert [shard.reader.control()["island.island"] for shard in whole.shards] == [EXPEL] * 2
    administrator.invite(Guest("island", "island"))
    assert not any("island.island" in shard.reader.control() for shard in whole.shards)
    for each in (*joined.values(), transport):
        each.close()
