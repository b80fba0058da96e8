"""Listeners of real runs: what they survive, what they may do, and that all read the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import archipelago
from archipelago.broker.redis.roles import rules
from archipelago.broker.redis.transport import connect
from archipelago.broker.shards.transport import opened
from archipelago.islands.sync.evaluator import newest_merged
from archipelago.islands.sync.listener import Listener
from archipelago.ops.launch.embedded_redis import RedisServer, start_server
from tests.conftest import Until
from tests.harness.processes import SETTINGS, Processes, UpRun, children
from tests.islands.user_loop.any_framework import served
from tests.islands.user_loop.conftest import SYNC
from tests.islands.user_loop.own_runs import TreeScript, tree
from tests.servers import empty_database


def client_of(url: str) -> Any:
    return redis.Redis.from_url(url)


@pytest.mark.full
def test_a_viewer_follows_and_is_refused_nothing(server: RedisServer, until: Until) -> None:
    with empty_database(server, 3) as url, client_of(url) as admin:
        version = tuple(map(int, admin.info("server")["redis_version"].split(".")))
        admin.acl_setuser("viewer", reset=True)
        admin.execute_command(
            "ACL", "SETUSER", "viewer", *rules("viewer", "own", "viewer", version), "+select", ">secret"
        )
        admin.acl_log_reset()
        archipelago.create(url, "own", tree(), sync=SYNC, steps=40)
        watched = f"redis://viewer:secret@{url.rpartition('@')[2]}"
        with served(url) as merger, archipelago.follow(watched, "own") as following, TreeScript(url) as script:
            before = -1
            while not script.session.finished:
                script.train()
                until(lambda: merger.rounds.closed * 2 >= min(40, script.session.step) - 4, "rounds close")
                if (found := following.newest()) is not None:
                    assert found.round > before
                    before = found.round
            script.session.leave()
            *_, last = following
            assert last.round == merger.rounds.closed > before
        assert [entry for entry in admin.acl_log() if entry["username"] == "viewer"] == []
        admin.acl_deluser("viewer")


@pytest.mark.full
def test_a_replica_can_be_followed(tmp_path: Path, until: Until) -> None:
    with start_server(tmp_path / "one") as primary, start_server(tmp_path / "two") as replica:
        with client_of(primary.url) as first, client_of(replica.url) as second:
            second.config_set("masterauth", first.connection_pool.connection_kwargs["password"])
            second.replicaof("127.0.0.1", str(primary.port))
            archipelago.create(primary.url, "own", tree(), sync=SYNC, steps=40)
            until(lambda: second.info("replication")["master_link_status"] == "up" and first.wait(1, 100), "a copy")
        with served(primary.url) as merger, archipelago.follow(replica.url, "own") as following:
            with TreeScript(primary.url) as script:
                while not script.session.finished:
                    script.train()
                    until(lambda: merger.rounds.closed * 2 >= min(40, script.session.step) - 4, "rounds close")
            *_, last = following
            assert last.round == merger.rounds.closed


@pytest.mark.full
@pytest.mark.processes
def test_listeners_survive_kills_of_redis_and_mergers(processes: Processes, tmp_path: Path, until: Until) -> None:
    run = UpRun(tmp_path / "runs/followed")
    up = processes.start(
        "up",
        "--run=followed",
        "--islands=1",
        "--shards=2",
        "--no-one-process",
        "--inner.steps=1000000",
        *SETTINGS,
    )
    until(lambda: run.rounds >= 1, "the first round")
    following = [archipelago.follow(run.url, "followed", consistent=consistent) for consistent in (True, False)]

    def goes_on(listener: Listener, versions: int = 2) -> None:
        rounds = [next(listener).round]
        while len(set(rounds)) < versions:  # after an outage, the last version may come once more
            rounds.append(next(listener).round)
        assert rounds == sorted(rounds)

    for each in following:
        goes_on(each)
    for word in ("/logs/merger", "/redis/"):
        killed = children(up, word)
        assert killed
        for process in killed:
            process.kill()
        for listener in following:
            goes_on(listener)
    processes.run("steer", run.url, "--run=followed", "inner.steps=1")
    *_, last = following[0]
    processes.ended(up)
    with start_server(run.folder / "redis") as again:
        transport = connect(again.url, "followed")
        manifest, whole = opened(transport)
        merged = newest_merged(whole, manifest)
        expected = manifest.named(merged.vectors)
        transport.close()
    assert all(np.array_equal(last.params[name], expected[name]) for name in expected)
    following[1].close()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("link-")], "their threads ended")
