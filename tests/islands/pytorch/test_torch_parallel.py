"""What the leader and its followers do when the others of their team end. `test_torch_processes.py` has real ones."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

import archipelago
from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from tests import pytorch
from tests.conftest import Until
from tests.failing import failing

torch = pytorch.required()

from archipelago.islands.pytorch.joining import Joining  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.parallel import Follower, Leader, Said  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import module  # noqa: E402

pytestmark = pytest.mark.full


class Alone:
    """A team whose other processes end while they take the first parameters."""

    def exchange(self, said: Said) -> Said:
        return said

    def share(self, tensors: Any) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_leader_without_its_team_leaves_the_run(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.ProcessTeam", lambda group: Alone())
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), steps=10)
    before = threading.active_count()
    leader = Leader(None, Joining(url, "own", module(), island="both"))
    with pytest.raises(RuntimeError, match="closed by peer"), leader:
        pass
    until(lambda: threading.active_count() <= before, "the threads of the link to end")
    assert any("closed by peer" in note.text for note in connect(url, "own").reader.notes(10))
    with archipelago.pytorch.join(url, "own", module(), island="both"):
        pass


class Lost:
    """A team whose leader has left."""

    def exchange(self, said: Said) -> Said:
        return Said(has_left=True)


def test_a_process_whose_leader_has_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.islands.pytorch.parallel.ProcessTeam", lambda *_: Lost())
    follower = Follower(None, Joining(None, "own", module()))
    with failing(ConfigError, "loop.left"):
        follower.sync()
    with failing(ConfigError, "loop.leader-left"), follower:
        pass
