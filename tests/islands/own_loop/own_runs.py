"""A run of users' own loops in virtual time. The test makes the steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import NO_CORPUS, Manifest, balanced
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.transport import Transport
from archipelago.islands.own_loop.loop import OwnLoop
from archipelago.islands.own_loop.new_run import first_snapshots
from archipelago.islands.own_loop.parameters import TreeParameters
from archipelago.islands.own_loop.tensors import kinds_by
from archipelago.islands.own_loop.tree import TreeLayout, host_vector
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.memory_use import MemoryMeter, MemoryUse
from archipelago.islands.sync.participant import Host
from archipelago.islands.sync.tree_replica import TreeReplica
from archipelago.merger.beside import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.islands.own_loop.any_framework import CONFIG, merged_by


def tree(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return parameters in containers of two kinds, with a leaf that is not merged."""
    layers = [{"kernel": jnp.full((4, 4), 1.0 + number, dtype), "bias": jnp.zeros(4, dtype)} for number in range(2)]
    return {"embedding": jnp.ones((8, 4), dtype), "layers": layers, "count": jnp.int32(7)}


def trained(params: Any, by: float = 0.125) -> Any:
    """Return the parameters after a step that moves each floating-point leaf by the same number."""
    return jax.tree.map(lambda x: (x - by).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x + 1, params)


def only_kernels_trained(params: Any) -> Any:
    """Return the parameters after a step that moves the kernels only."""
    layers = [{**layer, "kernel": layer["kernel"] - 0.125} for layer in params["layers"]]
    return {**params, "layers": layers}


class OwnIsland:
    """One island: its loop and its parameters."""

    def __init__(self, run: OwnRun, name: str, template: Any, chosen: Any) -> None:
        layout = TreeLayout.of(template, chosen)
        self.run = run
        self.parameters = TreeParameters(layout)
        self.link = Link(run.connect(), run.manifest, f"{name}/x", (), run.clock)
        arrivals = self.link.join()
        self.replica = TreeReplica(run.manifest, layout.templates)
        self.parameters.start(self.replica.begin([arrival.params_N for arrival in arrivals]))
        host = Host("test", MemoryMeter(run.clock, MemoryUse))
        self.loop = OwnLoop(
            name, run.manifest, self.link, self.replica, self.parameters, arrivals, host, None, run.clock, "x"
        )
        self.loop.begin()
        self.link.pump()

    @property
    def params(self) -> Any:
        """The newest parameters."""
        return self.parameters.tree

    def sync(self, params: Any, steps: int = 1, tokens: int = 10, loss: Any = 2.5) -> Any:
        """Sync, and exchange everything before and after it."""
        self.run.clock.now += steps
        self.link.pump()
        self.parameters.offer(params)
        self.loop.turn(steps, tokens, loss)
        self.link.pump()
        self.run.merger.turn(0.0)
        return self.params

    def play(self, turns: int, step: Callable[[Any], Any] = trained) -> None:
        """Make some steps."""
        for _ in range(turns):
            self.sync(step(self.params))


class OwnRun:
    """A run with its merger."""

    def __init__(
        self,
        params: Any = None,
        config: RunConfig = CONFIG,
        connect: Callable[[], Transport] | None = None,
        folder: MergerFolder | None = None,
        trained: Any = None,
    ) -> None:
        """Create the run.

        Args:
            params: Its first parameters.
            config: Its settings.
            connect: Connects to the server; a broker in memory by default.
            folder: Where its merger keeps checkpoints and, in a recorded run, the record.
            trained: Which leaves are trained; all by default.
        """
        params = tree() if params is None else params
        layout = TreeLayout.of(params, trained)
        tensors = layout.tensors(kinds_by("embed"))
        fragments = balanced(tensors, config.sync.fragments)
        frozen = tuple(values.named() for values in layout.frozen_values())
        self.manifest = Manifest("own", config, tensors, fragments, NO_CORPUS, {}, uuid.UUID(int=1).hex, frozen)
        self.clock = VirtualClock()
        broker = MemoryBroker(self.clock)
        self.connect: Callable[[], Transport] = connect or (lambda: broker.connect("own"))
        self.transport = self.connect()
        leaves = layout.leaves_of(params)
        first = first_snapshots(self.manifest, lambda name: host_vector([leaves[name]]))
        self.transport.create(self.manifest, first)
        checkpointer = None
        if folder is not None:
            folder.recorder.begin(self.manifest, first)
            checkpointer = folder.checkpointer(self.transport, self.manifest, 1e9, at_once)
        self.merger = Merger(
            self.connect(), self.clock, holder="merger", live_poll_seconds=0.0, checkpointer=checkpointer
        )
        assert self.merger.acquire()
        self.merger.load()
        self._template, self._trained = params, trained

    def island(self, name: str = "a", template: Any = None) -> OwnIsland:
        """Return an island that has joined, with its own tree."""
        return OwnIsland(self, name, self._template if template is None else template, self._trained)

    def merged(self) -> dict[str, Any]:
        """Return the run's newest parameters by name, as float32."""
        return merged_by(self.merger)


def of(config: RunConfig, **sections: Any) -> RunConfig:
    """Return the config with other sections."""
    return replace(config, **sections)
