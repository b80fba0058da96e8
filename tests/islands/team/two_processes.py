"""The program of each of two processes with two devices: whole islands of a small model, on a mesh over both.

`test_two_processes.py` runs it as `two_processes.py RANK PORT FOLDER`. The leader writes what it has found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from archipelago.islands.checkpoint import IslandStore, taken
from archipelago.islands.inner import begin
from archipelago.islands.mesh import MeshShape
from archipelago.islands.sync import recovery
from archipelago.islands.sync.recovery import StateForPeer
from archipelago.islands.team.computing import TeamComputation, follow
from archipelago.islands.team.jax_team import JaxTeam, connect
from archipelago.islands.team.protocol import Said
from archipelago.islands.team.ranks import HostRank
from archipelago.islands.worker import Island
from tests.islands.mesh.sharded_runs import CONFIG, MeshRun, manifest, on_mesh

SHAPE = MeshShape(fsdp=4)
STEPS = 10


# -- the leader --------------------------------------------------------------------------------------------------------


def lead(team: JaxTeam, folder: Path) -> None:
    """Play whole islands as the leader."""
    found = play(team, folder / "checkpoints")
    (folder / "moments.bytes").write_bytes(flat(found).tobytes())
    team.exchange(Said(finished=1))


def flat(leaves: Sequence[Any]) -> NDArray[np.float32]:
    """Return all arrays as one vector."""
    return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in leaves])


def play(team: JaxTeam, folder: Path) -> list[Any]:
    """Train, restore, and return the optimiser state after training."""
    run, island = begun(team)
    run.play(island, STEPS)
    store = IslandStore(folder, run.manifest)
    store.save(taken(island))
    copies = island.computation.state.copies()
    assert copies is not None
    _, *moments = copies

    # An island that comes back, with no peer there, takes its own optimiser state.
    _, again = begun(team)
    assert store.restore(again)
    require_same(copies, again.computation.state.copies())
    require_places(again)
    again.advance()

    # A peer has the state of this island, and another one takes it.
    _, third = begun(team)
    about, payload = recovery.encode(StateForPeer("a/y", copies, 10), "a/x")
    third.use_optimizer(third.computation.state.decode(about, payload), "peer")
    require_same(copies, third.computation.state.copies())
    third.advance()
    jax.block_until_ready(third.inner)  # type: ignore[no-untyped-call]
    return moments


def begun(team: JaxTeam) -> tuple[MeshRun, Island]:
    """Return an island that begins in a run of its own."""
    run = MeshRun()
    return run, run.island(SHAPE, computes=partial(TeamComputation, team))


def require_same(one: Any, other: Any) -> None:
    """Fail unless both trees have the same bits."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def require_places(island: Island) -> None:
    """Fail unless parameters and references are where the mesh has them."""
    assert island.computation.placement is not None
    for name, template in island.computation.placement.templates.items():
        if name in island.inner.params:
            assert island.inner.params[name].sharding == template.sharding, name
        assert island.computation.replica.references[0][name].sharding.is_equivalent_to(
            template.sharding, len(template.shape)
        ), name


# -- the other process -------------------------------------------------------------------------------------------------


def follow_all(team: JaxTeam) -> None:
    """Follow the leader. One computation follows all its islands."""
    placement, steps = on_mesh(SHAPE, CONFIG)
    computation = TeamComputation(team, manifest(), steps, partial(begin, CONFIG.inner), placement)
    sample = np.zeros((1, CONFIG.data.batch_size, CONFIG.data.sequence_length + 1), np.uint8)
    assert follow(team, computation, sample, lambda: False).finished


if __name__ == "__main__":
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    team = connect(HostRank("127.0.0.1", port, 2, rank))
    if team.leads:
        lead(team, Path(sys.argv[3]))
    else:
        follow_all(team)
