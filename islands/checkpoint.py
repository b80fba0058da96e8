"""What an island keeps for its own return: inner optimiser state, its place in the data, its clock. Through Orbax."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

from islands.inner import InnerState
from islands.worker import Island, Totals

log = logging.getLogger(__name__)


def _manager(folder: Path) -> Any:
    import orbax.checkpoint as ocp  # takes most of a second, and only the ends of a run need it

    return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True))


def _whose(island: Island) -> dict[str, str]:
    return {"run": island.manifest.run, "tree": island.manifest.tree_digest}


def save(folder: Path, island: Island) -> None:
    """Writes the island's state, whole or not at all; the two newest are kept."""
    import orbax.checkpoint as ocp

    totals = [island.totals.steps, island.totals.tokens]
    rest = {"batches": island.batches.state(), "totals": totals, **_whose(island)}
    with _manager(folder) as manager:
        newest = manager.latest_step()
        manager.save(
            # Not the global step: who returns begins at the merger's, which may be behind where it left.
            0 if newest is None else newest + 1,
            args=ocp.args.Composite(
                optimizer=ocp.args.StandardSave(island.inner.optimizer), rest=ocp.args.JsonSave(rest)
            ),
            force=True,
        )
        manager.wait_until_finished()


def restore(folder: Path, island: Island) -> bool:
    """Puts back what was saved of this run, if anything. Parameters come from the merger, never from here."""
    import orbax.checkpoint as ocp

    if not folder.is_dir():
        return False
    with _manager(folder) as manager:
        newest = manager.latest_step()
        if newest is None:
            return False
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, island.inner.optimizer)
        kept = manager.restore(newest, args=ocp.args.Composite(rest=ocp.args.JsonRestore()))["rest"]
        if any(kept.get(key) != value for key, value in _whose(island).items()):
            log.warning("%s holds another run's state: beginning with fresh moments", folder)
            return False
        found = manager.restore(newest, args=ocp.args.Composite(optimizer=ocp.args.StandardRestore(abstract)))
    island.inner = InnerState(island.inner.params, found["optimizer"])
    island.batches.restore(kept["batches"])
    island.totals = Totals(*kept["totals"])
    return True
