"""The program of each of two processes with two devices: whole islands of a small model, on a mesh over both.

`test_two_processes.py` runs it as `two_processes.py RANK PORT FOLDER`. The leader writes what it has found.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.codecs import body_of
from archipelago.islands.checkpoint import IslandStore, cut
from archipelago.islands.hosts.computing import LeadingComputation, SharedComputation, follow
from archipelago.islands.hosts.coordinator import leave
from archipelago.islands.hosts.follower import joined
from archipelago.islands.hosts.leader import HostLeader
from archipelago.islands.hosts.ranks import HostRank
from archipelago.islands.inner import begin, require_sound
from archipelago.islands.mesh import MeshShape
from archipelago.islands.sync import recovery
from archipelago.islands.sync.arrays import decode_tree
from archipelago.islands.sync.recovery import Received, StateForPeer
from archipelago.islands.worker import Island
from tests.islands.mesh.sharded_runs import CONFIG, MeshRun, manifest, on_mesh

SHAPE = MeshShape(fsdp=4)
KEY = b"test"
STEPS = 10


# -- the leader --------------------------------------------------------------------------------------------------------


def lead(here: HostRank, folder: Path) -> None:
    """Play whole islands as the leader."""
    leader = HostLeader(here, {}, KEY)
    leader.assemble(manifest(), 300.0, lambda: False)
    try:
        found = play(leader, folder / "checkpoints")
        (folder / "params.bytes").write_bytes(flat(found).tobytes())
    except BaseException as error:
        leader.end(error=error)
        raise
    leader.end()


def flat(params: dict[str, Any]) -> NDArray[np.float32]:
    """Return all parameters as one vector."""
    return np.concatenate([np.asarray(params[name], np.float32).reshape(-1) for name in sorted(params)])


def play(leader: HostLeader, folder: Path) -> dict[str, Any]:
    """Train, restore, and return the parameters after training."""
    run, island = begun(leader)
    run.play(island, STEPS)
    store = IslandStore(folder, run.manifest)
    store.save(cut(island, 7))
    before = island.computation.copies()
    found = {name: np.asarray(x) for name, x in before["inner"]["params"].items()}
    encoded = body_of(island.measured(0, "int4"))

    _, whole = begun(leader)  # it has nothing but its checkpoints
    held = store.find(7)
    assert held is not None
    assert store.restore_whole(held, whole)
    require_same(before, whole.computation.copies())
    assert body_of(whole.measured(0, "int4")) == encoded
    require_places(whole)
    whole.advance()

    # An island that comes back, with no peer there, takes its optimiser's state only.
    _, again = begun(leader)
    assert store.restore_moments(again)
    require_same(before["inner"]["optimizer"], again.computation.copies()["inner"]["optimizer"])
    again.advance()

    # A peer has the state of this island, and this island takes it.
    about, payload = recovery.encode(StateForPeer("a/y", jax.tree.leaves(before["inner"]["optimizer"]), 10), "a/x")
    check = partial(require_sound, bounds=whole.moment_bounds)
    taken = decode_tree(about, payload, again.computation.optimizer_like(), check)
    again.use_state_of_peer(Received(about, taken))
    require_same(before["inner"]["optimizer"], again.optimizer_leaves())
    require_places(again)
    again.advance()
    jax.block_until_ready(again.inner)  # type: ignore[no-untyped-call]
    return found


def begun(leader: HostLeader) -> tuple[MeshRun, Island]:
    """Return an island that begins in a run of its own."""
    run = MeshRun()
    return run, run.island(SHAPE, computes=partial(LeadingComputation, leader))


def require_same(one: Any, other: Any) -> None:
    """Fail unless both trees have the same bits."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def require_places(island: Island) -> None:
    """Fail unless parameters and references are where the mesh has them."""
    assert island.computation.placement is not None
    for name, template in island.computation.placement.templates.items():
        if name in island.params:
            assert island.params[name].sharding == template.sharding, name
        assert island.computation.replica.references[0][name].sharding.is_equivalent_to(
            template.sharding, len(template.shape)
        ), name


# -- the other process -------------------------------------------------------------------------------------------------


def follow_all(here: HostRank) -> None:
    """Follow the leader. One computation follows all its islands."""
    leader = joined(here, {}, KEY, 300.0)
    leader.start()
    leader.connect_devices(here)
    placement, steps = on_mesh(SHAPE, CONFIG)
    computation = SharedComputation(manifest(), steps, partial(begin, CONFIG.inner), placement)
    assert follow(leader.next, computation, np.zeros(0)) == 0
    leave()


if __name__ == "__main__":
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    here = HostRank("127.0.0.1", port, 2, rank)
    if here.leads:
        lead(here, Path(sys.argv[3]))
    else:
        follow_all(here)
