"""A script joins with the join file of an island, on a real server, and signs what it sends."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

from archipelago import connect, create, join
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import connect_to
from archipelago.merger.service import Merger
from archipelago.ops.launch import invite
from archipelago.ops.launch.embedded_redis import RedisServer
from archipelago.ops.launch.invite import InviteOptions
from tests.conftest import Until
from tests.failing import failing
from tests.islands.user_loop.any_framework import merged_by
from tests.islands.user_loop.own_runs import trained, tree


@pytest.mark.full
def test_an_invited_script_trains_and_a_merger_of_the_run_takes_its_work(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.chdir(tmp_path)
    run = f"own-{uuid.uuid4().hex[:8]}"
    assert create(server.url, run, tree(), steps=1000)
    files = {role: Path(f"{role}.join") for role in ("island", "merger")}
    for role, file in files.items():
        assert invite.main(InviteOptions(name=role, url=server.url, run=run, role=role, out=file)) == 0  # type: ignore[arg-type]
    admin = connect(server.url, run)
    serving, evaluations = connect_to(str(files["merger"]), run), admin.reader.evaluations
    try:
        for file, name, code in (
            (files["island"], "lima", "invitation.other"),
            (files["merger"], None, "invitation.other"),
        ):
            with failing(ConfigError, code), join(str(file), run, tree(), island=name):
                pass
        assert not create(str(files["island"]), run, tree(), steps=1000)
        with join(str(files["island"]), run, tree(), state=dict, evaluate=lambda params: 2.0) as joined:
            assert joined.island == "island"
            joined.report(held_out=3.0)
            until(lambda: joined.sync(trained(joined.params), tokens=64) and len(evaluations()) > 1, "the evaluation")
        assert {each.by for each in evaluations()} == {"island"}, "it may write its own evaluations, and the lease"
        merger = Merger(serving, holder="merger")
        assert merger.acquire()
        merger.load()

        def merged() -> bool:
            merger.turn(0.01)
            return admin.reader.counters().merged >= 5

        until(merged, "the work of the invited island to be merged")
        assert admin.reader.counters().refused == 0
        final = joined.final()
        np.testing.assert_array_equal(final["embedding"], merged_by(merger)["embedding"])
    finally:
        serving.close()
        for user in admin.connection.redis.acl_users():
            if user.startswith(f"{run}~"):
                admin.connection.redis.acl_deluser(user)
        admin.close()
