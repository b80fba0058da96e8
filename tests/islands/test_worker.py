"""An island that goes wrong says so, and does no harm."""

from __future__ import annotations

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from broker.errors import DivergedError
from broker.memory import MemoryBroker
from islands.batches import Batches
from islands.inner import InnerState, InnerSteps
from islands.link import Link
from islands.worker import DIVERGED_MAX, Island, train
from merger.service import Merger
from ops.virtual import VirtualClock
from tests import samples
from tests.simulation.world import CONFIG


class Zeros:
    """Batches of nothing."""

    def next(self, steps: int) -> Any:
        return np.zeros((steps, 1, 3), np.uint8)


def diverging(state: InnerState, tokens_nxBxT1: jax.Array, global_step: jax.Array) -> tuple[InnerState, jax.Array]:
    spoilt = {name: value * jnp.nan for name, value in state.params.items()}
    return state._replace(params=spoilt), jnp.full(1, jnp.inf)


def test_an_island_whose_loss_is_no_number_stops_and_the_run_is_none_the_worse() -> None:
    broker = MemoryBroker(VirtualClock())
    manifest = samples.manifest("run", CONFIG)
    broker.connect("run").create(manifest, samples.first_snapshots(manifest, value=1.0))
    merger = Merger(broker.connect("run"), VirtualClock())
    merger.acquire()
    merger.load()
    link = Link(broker.connect("run"), manifest)
    island = Island("sick", manifest, cast(InnerSteps, diverging), cast(Batches, Zeros()), link, link.join())

    turns = itertools.count()

    def turn() -> bool:
        """Whether it was given every chance, and trains on all the same."""
        link.pump()
        merger.turn(0.0)
        return next(turns) > 100

    with pytest.raises(DivergedError, match="the loss of sick was no number in its last 3 contributions"):
        train(island, turn)
    turn()
    books = broker.connect("run").books()
    assert books.published == books.refused >= DIVERGED_MAX
    assert all(np.isfinite(np.asarray(fragment.params_N)).all() for fragment in merger.fragments)
    assert island.ledger.last_refusal == "NaN or infinity among the values"
