"""`archipelago steer`: its changes, its output, its errors, and steered runs in virtual time."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from archipelago.broker.commits import START
from archipelago.broker.config import RunConfig
from archipelago.broker.control import GRACE, OUTER_RATE, QUORUM
from archipelago.broker.errors import ConfigError
from archipelago.broker.messages import Refusal
from archipelago.broker.process import guarded
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.islands.tasks.workload import Workload
from archipelago.merger.state import RunState
from archipelago.ops.commands import run
from archipelago.ops.experiments.virtual_time import VirtualRun
from archipelago.ops.watch.steer import changes_of
from tests import samples

Call = Callable[..., tuple[int, str, str]]
CONFIG = RunConfig()


@pytest.fixture
def url() -> str:
    return f"fakeredis://{uuid.uuid4().hex}"


@pytest.fixture
def transport(url: str) -> Iterator[RedisTransport]:
    """Return a run `demo` with an island `oslo`."""
    made = connect(url, "demo")
    manifest = samples.manifest("demo")
    made.create(manifest, samples.first_snapshots(manifest))
    made.island.heartbeat(samples.heartbeat("oslo"))
    yield made
    made.close()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `archipelago steer` and returns its status, standard output and standard error."""

    def call(*args: str) -> tuple[int, str, str]:
        status = guarded(lambda: run(["steer", *args]))
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_all_changes_at_once(call: Call, url: str, transport: RedisTransport) -> None:
    changes = [f"{OUTER_RATE}=0.5", f"{QUORUM}=3", "merging=paused", "island.oslo=drain", "checkpoint"]
    status, out, err = call(url, "--run", "demo", *changes, "--json")
    assert (status, err) == (0, "")
    found = transport.reader.control()
    assert found.pop("checkpoint").startswith("asked at 1")
    assert found == {OUTER_RATE: "0.5", QUORUM: "3", "merging": "paused", "island.oslo": "drain"}
    shown = json.loads(out)
    assert shown["settings"][OUTER_RATE] == {"set": 0.5, "in_force": 0.7, "own": 0.7}
    assert shown["settings"][GRACE]["set"] is None
    assert (shown["paused"], shown["islands"], shown["ignored"]) == (True, {"oslo": "drain"}, {})


def test_without_changes_it_shows_the_present_changes(call: Call, url: str, transport: RedisTransport) -> None:
    wishes = {OUTER_RATE: "0.5", "island.oslo": "expel", "sync.quorum": "many", "merging": "paused"}
    transport.reader.steer(wishes)
    transport.connection.redis.set("{demo:s0}:state", RunState(steered={OUTER_RATE: 0.25}).to_json())
    status, out, err = call(url)
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert lines[OUTER_RATE] == ["0.5", "0.25", "0.7"]
    assert lines["merging"] == ["paused"]
    assert lines["island.oslo"] == ["expel"]
    assert "ignored" in out
    assert "'many'" in out
    assert transport.reader.control() == wishes


def test_a_name_without_a_value_removes_a_change(
    call: Call, url: str, transport: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.reader.steer({OUTER_RATE: "0.5", "merging": "paused", "rubbish": "1"})
    assert call(url, "outer.learning-rate=", "merging=", "rubbish=")[0] == 0
    assert transport.reader.control() == {}
    monkeypatch.setenv("ARCHIPELAGO_URL", url)
    assert call("merging=paused")[0] == 0
    assert call("checkpoint", "sync.quorum=2")[0] == 0
    assert transport.reader.control().keys() == {"merging", "checkpoint", QUORUM}


def test_each_mistake_is_an_error_and_changes_nothing(call: Call, url: str, transport: RedisTransport) -> None:
    for changes, named in (
        (["merging"], "merging"),
        (["=3"], "=3"),
        (["inner.learning_rate=1"], "inner.learning_rate"),
        (["outer.learning_rate=-1"], "outer.learning_rate"),
        (["island.oslo=kill"], "island.oslo"),
        (["merging=paused", "sync.quorum=0"], "sync.quorum"),
        (["sync.quorum=2", "sync.quorum=3"], "sync.quorum"),
        (["rubbish="], "rubbish"),
        (["--run", "other", "merging=paused"], "other"),
    ):
        status, out, err = call(url, *changes)
        assert (status, out, err.count("\n"), named in err) == (2, "", 1, True), changes
        assert transport.reader.control() == {}
    assert not transport.connection.redis.exists("{other:s0}:control")


def test_an_unknown_island_is_a_warning(call: Call, url: str, transport: RedisTransport) -> None:
    status, _, err = call(url, "island.olso=drain")
    assert status == 0
    assert {"olso", "oslo"} <= set(re.findall(r"\w+", err))
    assert transport.reader.control() == {"island.olso": "drain"}
    assert call(url, "island.oslo=drain")[2] == ""


def test_every_request_for_a_checkpoint_is_a_new_one() -> None:
    seconds = iter((1.0, 1.5))
    first, second = (changes_of(CONFIG, ["checkpoint"], {}, lambda: next(seconds)) for _ in range(2))
    assert first["checkpoint"] != second["checkpoint"]
    assert changes_of(CONFIG, ["checkpoint=mine"], {}, lambda: 0.0) == {"checkpoint": "mine"}
    with pytest.raises(ConfigError):
        changes_of(CONFIG, ["checkpoint=" + "x" * 99], {}, lambda: 0.0)


# -- runs -------------------------------------------------------------------------------------


def closed(run: VirtualRun, number: int) -> Callable[[], bool]:
    return lambda: run.merger.rounds.closed >= number


@pytest.mark.parametrize("wish", ["drain", pytest.param("expel", marks=pytest.mark.full)])
def test_an_island_is_removed_and_the_others_continue(small_task: Workload, wish: str) -> None:
    config = replace(small_task.config, inner=replace(small_task.config.inner, steps=72))
    run = VirtualRun(replace(small_task, named=small_task.named.under(config), config=config), [1.0, 1.0, 1.1])
    run.advance_until(closed(run, 4))
    run.transport.reader.steer({"island.island-2": wish})
    run.advance_until(lambda: "island-2" not in run.islands)
    last = run.merger.rounds.closed
    with pytest.raises(ConfigError):
        run.add_island("island-2", 1.0)
    run.advance_until(closed(run, last + 10))
    # Its last contributions are in the next round of each fragment.
    later = [m.island for entry in run.transport.reader.tape(1000) if entry.round > last + 6 for m in entry.members]
    assert set(later) == {"island-0", "island-1"}
    refused = [event for _, event in run.transport.reader.events(START, 0.0, 10_000) if isinstance(event, Refusal)]
    assert {refusal.island for refusal in refused} == ({"island-2"} if wish == "expel" else set())
    run.transport.reader.steer({"island.island-2": ""})
    run.add_island("island-2", 1.0)
    run.advance_until(closed(run, run.merger.rounds.closed + 8))
    assert "island-2" in {member.island for entry in run.transport.reader.tape(6) for member in entry.members}
    run.finish()
    books = run.transport.reader.books()
    assert books.published == books.merged + books.refused
