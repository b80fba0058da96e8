"""`archipelago runs` and `archipelago rm`: runs are listed, and exactly one of them is deleted."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import archipelago
from archipelago.broker import invitation as invitations
from archipelago.broker.errors import BrokerError, ConfigError, UnknownRunError, UnreachableError
from archipelago.broker.invitation import Invitation, Member
from archipelago.broker.redis.transport import RedisTransport, connect
from archipelago.ops.commands import run
from archipelago.ops.dashboard import main as dashboard
from archipelago.ops.launch.embedded_redis import start_server
from archipelago.ops.run_source import open_run
from archipelago.ops.watch import run_list
from archipelago.ops.watch.reading import Watcher
from tests import samples
from tests.failing import failing
from tests.sharded import create_sharded


def create(url: str, name: str, *islands: str, state: str = "left") -> RedisTransport:
    """Create a run with the keys that islands and mergers write."""
    transport = samples.begin(connect(url, name))
    for island in islands:
        transport.island.heartbeat(samples.heartbeat(island, state=state))
        transport.island.publish(samples.contribution(island=island), b"payload")
    return transport


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["runs", *args, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return found


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"archipelago {archipelago.__version__}\n"


# -- runs -----------------------------------------------------------------------------------------------------------


def test_runs_of_a_redis_with_their_state(url: str, raw: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, url) == []
    create(url, "fresh").close()
    create(url, "left", "a", state="left").close()
    create(url, "alone", "a", "b", state="training").close()
    served = create(url, "served", "a", state="training")
    served.merger.acquire("me", 5.0)
    paused = create(url, "paused")
    paused.reader.steer({"merging": "paused"})
    create(url, "broken").close()
    raw.hset("{broken:s0}:manifest", mapping=dict.fromkeys(raw.hkeys("{broken:s0}:manifest"), b"\xff"))
    found = {entry["run"]: entry for entry in listed(capsys, url)}
    assert {name: entry["state"] for name, entry in found.items()} == {
        "alone": "no merger", "broken": "unreadable", "fresh": "new", "left": "no islands", "paused": "paused",
        "served": "starting",
    }  # fmt: skip
    assert (found["alone"]["live"], found["alone"]["known"]) == (2, 2)
    assert {name for name, entry in found.items() if entry["problems"]} == {"alone", "left", "fresh", "paused"}
    assert found["fresh"]["idle_seconds"] is None
    assert found["left"]["idle_seconds"] < 60
    assert run(["runs", url]) == 0
    assert "no merger" in capsys.readouterr().out
    served.close()
    paused.close()


def test_runs_with_a_join_file(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    create(url, "mine").close()
    invitations.write(Path("eyes.join"), Invitation(url, "mine", "eyes", "viewer"))
    assert [entry["run"] for entry in listed(capsys, "eyes.join")] == ["mine"]
    monkeypatch.setenv("ARCHIPELAGO_URL", "eyes.join")
    assert [(entry["run"], entry["state"]) for entry in listed(capsys)] == [("mine", "new")]


def folder_of(name: str, **report: object) -> Path:
    """Make the folder of a run of `up` that has ended."""
    folder = Path("runs") / name
    (folder / "merger" / "checkpoints" / "12").mkdir(parents=True)
    (folder / "config.toml").write_text("[inner]\nsteps = 77\n[model]\nsize = 'small'\n")
    if report:
        (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_runs_of_a_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert listed(capsys) == []
    assert run(["runs"]) == 0
    folder_of("cut")
    folder_of("whole", finished=True, steps=94, rounds=25, islands=3, parameters=1234)
    (Path("runs") / "other" / "logs").mkdir(parents=True)
    cut, whole = listed(capsys)
    assert (cut["run"], cut["state"], cut["round"], cut["steps"], cut["model"]) == ("cut", "ended", 12, 77, "small")
    assert (whole["state"], whole["round"], whole["step"], whole["known"]) == ("finished", 25, 94, 3)
    assert whole["parameters"] == 1234
    assert run(["runs"]) == 0
    assert "94/94" in capsys.readouterr().out, "it was steered to 77 after step 77"
    assert whole["where"] == str(Path("runs") / "whole")

    def address_of(path: Path) -> str:
        if path.name == "cut":
            raise PermissionError
        return ""

    monkeypatch.setattr(run_list, "address_of", address_of)
    assert [entry["state"] for entry in listed(capsys)] == ["unreadable", "finished"], "one hides no other"


def test_a_run_whose_own_redis_runs_is_read_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    folder_of("mine")
    with start_server(Path("runs/mine/redis")) as own:
        create(own.url, "mine", "a", state="training").close()
        for address in ([], [own.url], ["eyes.join"]):
            invitations.write(Path("eyes.join"), Invitation(own.url, "mine", "eyes", "viewer"))
            (entry,) = listed(capsys, *address)
            assert (entry["state"], entry["live"], entry["where"]) == ("no merger", 1, "runs/mine"), address
    assert listed(capsys)[0]["state"] == "ended"


def test_status_and_steer_open_the_folder_of_a_run_whose_redis_has_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server(Path("runs/mine/redis")) as own:
        create(own.url, "mine", "a").close()
    for source in (["mine"], ["runs/mine"], ["--run", "mine"]):
        capsys.readouterr()
        assert run(["status", *source, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["run"], found["state"]["word"]) == ("mine", "no islands")
    assert run(["steer", "mine", "merging=paused", "--json"]) == 0
    assert run(["status", "mine", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"]["word"] == "paused"


def test_the_join_file_in_a_folder_leads_to_the_folder() -> None:
    with start_server(Path("runs/mine/redis")) as own:
        create(own.url, "mine").close()
        for file, folder in (("runs/mine/admin.join", Path("runs/mine")), ("admin.join", None)):
            invitations.write(Path(file), Invitation(own.url, "mine", "admin", "admin"))
            with open_run(file, None) as found:
                reading = Watcher(found.transport, address=found.address, folder=found.folder).read()
            assert (found.folder, reading.view.folder) == (folder, str(folder or ""))
    with open_run("runs/mine/admin.join", None) as found:
        assert found.transport.reader.manifest().run == "mine", "`up` has ended"
    with failing(UnreachableError, "broker.unreachable"), open_run("admin.join", None) as found:
        found.transport.reader.manifest()


def test_a_name_without_a_folder_is_that_of_a_run_at_the_usual_redis(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(url, "mine").close()
    create(url, "other").close()
    monkeypatch.setenv("ARCHIPELAGO_URL", url)
    with open_run("mine", None) as found:
        assert found.transport.reader.manifest().run == "mine"
    with failing(UnknownRunError, "broker.unknown-run"), open_run("none", None) as found:
        found.transport.reader.manifest()
    with failing(ConfigError, "checkpoint.missing"), open_run("mine", "other"):
        pass
    Path("runs/mine").mkdir(parents=True)
    with open_run("mine", None) as found:
        assert found.origin == "its Redis", "a merger that was started here has made the folder"


def test_a_run_at_a_redis_of_others_has_its_folder_here(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of("mine")
    create(url, "mine", "a", state="training").close()
    create(url, "other").close()
    assert [(entry["run"], entry["where"], entry["live"]) for entry in listed(capsys, url)] == [
        ("other", "redis", 0), ("mine", "runs/mine", 1),
    ]  # fmt: skip
    assert dashboard._opened("mine", url).manifest.run == "mine"


# -- rm -------------------------------------------------------------------------------------------------------------


def test_rm_deletes_exactly_one_run_in_all_shards(url: str, raw: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old2", "ol", "old.old", "OLD"):
        create(url, name, "a", "b").close()
    raw.set("older:island:a", "of another program")
    others = {key: raw.dump(key) for key in raw.scan_iter() if key != b"archipelago:runs"}
    transport = connect(url, "old")
    for shard in create_sharded(transport).shards:
        shard.island.publish(samples.contribution(), b"payload")
    transport.membership.set_user("old~oslo", "secret", ["reset", "on"])
    transport.membership.put({"oslo": Member(role="viewer", user="old~oslo")})
    transport.close()
    raw.set("{old:s0}:damaged:tape", "x")
    raw.set("{old:s0}:m:f0.0:0", "x")
    assert run(["rm", "old", url, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] >= 8
    assert {key: raw.dump(key) for key in raw.scan_iter() if key != b"archipelago:runs"} == others
    assert raw.smembers("archipelago:runs") == {b"old2", b"ol", b"old.old", b"OLD"}
    assert "old~oslo" not in raw.acl_users()
    with failing(UnknownRunError):
        run(["rm", "old", url, "--yes"])
    raw.delete("{ol:s0}:manifest")  # as an interrupted deletion
    assert run(["rm", "ol", url, "--yes"]) == 0
    assert list(raw.scan_iter("{ol:*")) == []


def test_rm_refuses_while_processes_live_unless_it_is_forced(url: str, raw: Any) -> None:
    for who in ("island", "merger", "standby"):
        transport = create(url, "old", "a", state="training" if who == "island" else "left")
        if who == "merger":
            transport.merger.acquire("me", 60.0)
        if who == "standby":
            transport.merger.stand_by("me")
        before = sorted(raw.keys())
        with failing(BrokerError, "run.alive"):
            run(["rm", "old", url, "--yes"])
        assert sorted(raw.keys()) == before, who
        assert run(["rm", "old", url, "--yes", "--force"]) == 0
        with failing(UnknownRunError):  # A merger that still serves ends, and repairs nothing.
            transport.merger.acquire("me", 60.0)
        assert raw.keys() == [], who
        transport.close()


class Terminal(io.StringIO):
    """Standard input on a terminal."""

    def isatty(self) -> bool:
        return True


def test_rm_asks_for_the_name(
    url: str, raw: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create(url, "old").close()
    for answer in (io.StringIO("old\n"), Terminal("ol\n"), Terminal("")):
        monkeypatch.setattr(sys, "stdin", answer)
        with failing(ConfigError, "config.unconfirmed"):
            run(["rm", "old", url])
    assert raw.keys() != []
    monkeypatch.setattr(sys, "stdin", Terminal("old\n"))
    capsys.readouterr()
    (Path("runs") / "old" / "merger").mkdir(parents=True)
    assert run(["rm", "old", url]) == 0
    said = capsys.readouterr().err
    assert "runs/old/merger keeps its checkpoints" in said
    assert raw.keys() == []


def test_rm_without_a_url_says_how_a_run_of_up_is_deleted() -> None:
    folder = folder_of("mine")
    with failing(ConfigError, "config.which-run") as error:
        run(["rm", "mine"])
    assert "rm -r" not in error.value.remedy, "a merger's folder may hold all that is left of the run"
    (folder / "redis").mkdir()
    with failing(ConfigError, "config.which-run") as error:
        run(["rm", "mine"])
    assert error.value.remedy.endswith("rm -r runs/mine/redis. Or delete all: rm -r runs/mine")


def test_rm_refuses_while_a_merger_serves_a_shard_and_ends_an_interrupted_creation(url: str) -> None:
    transport = connect(url, "demo")
    create_sharded(transport).shards[1].merger.acquire("two", 600.0)
    with failing(BrokerError, "run.alive"):
        run(["rm", "demo", url, "--yes"])
    transport.connection.redis.flushdb()
    manifest = replace(samples.manifest("demo"), shards=2)
    transport.of_shard(1).create(manifest.of_shard(1), samples.first_snapshots(manifest.of_shard(1)))
    assert run(["rm", "demo", url, "--yes"]) == 0
    assert transport.connection.redis.keys() == []
    transport.close()
