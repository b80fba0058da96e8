"""What the leader and its followers do when the others of their team end. `test_torch_processes.py` has real ones."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import numpy as np
import pytest

import archipelago
from archipelago.broker.errors import ConfigError
from archipelago.broker.redis.transport import connect
from tests import pytorch
from tests.conftest import Until
from tests.failing import failing

torch = pytorch.required()

from archipelago.islands.pytorch.joining import Joining  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.parallel import Follower, Leader  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.replica import TeamReplica  # noqa: E402 - it imports torch
from archipelago.islands.team.protocol import Said, Team  # noqa: E402 - it imports torch
from tests.islands.pytorch.torch_runs import TorchRun, module  # noqa: E402

pytestmark = pytest.mark.full


class Alone(Team):
    """A team whose other processes end when they wait for the optimiser's state."""

    rank, size, leaves_together = 0, 1, False

    def _sum(self, numbers: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    def share_bytes(self, data: Any) -> Any:
        return data

    def share(self, tensors: Any) -> None:
        """Share nothing: there is no other process."""

    def share_manifest(self, manifest: Any, size: int = 0) -> Any:
        """Share nothing."""

    def gather_tensor(self, parameters: Any, place: int) -> Any:
        """Gather nothing."""

    def agree_on_state(self, state: Any) -> None:
        """Compare with nothing."""


def test_a_leader_without_its_team_leaves_the_run(until: Until) -> None:
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), steps=10)
    before = threading.active_count()
    leader = Leader(Joining(url, "own", module(), island="both"), lambda *_: Alone())
    with pytest.raises(RuntimeError, match="closed by peer"), leader:
        pass
    until(lambda: threading.active_count() <= before, "the threads of the link to end")
    assert any("closed by peer" in note.text for note in connect(url, "own").reader.notes(10))
    with archipelago.pytorch.join(url, "own", module(), island="both"):
        pass


class Obedient(Alone):
    """A team whose other processes do what they hear."""

    def _sum(self, numbers: Any) -> Any:
        return numbers


def test_all_processes_read_the_same_length_of_the_run(until: Until) -> None:
    url = f"fakeredis://{uuid.uuid4().hex}"
    assert archipelago.pytorch.create(url, "own", module(), steps=10)
    with Leader(Joining(url, "own", module(), island="both"), lambda *_: Obedient()) as run:
        assert run._loop is not None
        link = run._loop.link
        connect(url, "own").reader.steer({"inner.steps": "7"})
        until(lambda: link.heartbeats.run_steps == 7, "the leader to hear of the change")
        assert run.steps == 10, "the others were not told yet"
        run.sync()
        assert run.steps == 7


def test_the_others_measure_by_the_codec_of_the_leader() -> None:
    """On a thin link that is not the run's own. Each process moves its references by what the merger will read."""
    manifest, team = TorchRun().manifest, Obedient()
    assert manifest.config.wire.up == "float32"
    leader = module()
    follower = Follower(Joining(None, "own", module()), lambda *_: team)
    replicas = []
    for parameters in (ModuleParameters(leader), follower._parameters):
        replicas.append(TeamReplica(manifest, parameters, team))
        replicas[-1].begin(parameters.named(), [np.linspace(0, 1, size, dtype=np.float32) for size in manifest.sizes])
        replicas[-1].write(parameters.named(), [np.zeros(size, np.float32) for size in manifest.sizes])
    follower._replica = replicas[1]
    replicas[0].measure(0, ModuleParameters(leader).named(), "int4")
    follower._do(team, team._told)
    assert torch.equal(*(replica.references[0] for replica in replicas))


class Lost(Obedient):
    """A team whose leader has left."""

    def _sum(self, numbers: Any) -> Any:
        return Said(has_left=1)


def test_a_process_whose_leader_has_left_says_so() -> None:
    follower = Follower(Joining(None, "own", module()), lambda *_: Lost())
    with failing(ConfigError, "loop.left"):
        follower.sync()
    with failing(ConfigError, "loop.leader-left"), follower:
        pass
