"""A run of PyTorch loops in virtual time. The test makes the steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from archipelago.broker.config import RunConfig
from archipelago.broker.manifest import NO_CORPUS, Manifest, balanced
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.islands.own_loop.loop import OwnLoop
from archipelago.islands.own_loop.new_run import first_snapshots
from archipelago.islands.own_loop.tensors import kinds_by
from archipelago.islands.sync.connection.link import Link
from archipelago.islands.sync.memory_use import MemoryMeter, MemoryUse
from archipelago.islands.sync.participant import Host
from archipelago.merger.service import Merger
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests import pytorch
from tests.islands.own_loop.any_framework import CONFIG, merged_by

torch = pytorch.required()

from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.replica import TorchReplica  # noqa: E402


def module(dtype: Any = None) -> Any:
    """Return a module whose input and output layers share their weight, with buffers that are not merged."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)
    )
    model[3].weight = model[0].weight
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(1.0 + number)
    return model if dtype is None else model.to(dtype)


def trained(model: Any, by: float = 0.125) -> None:
    """Make a step that moves each parameter by the same number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= by


class TorchIsland:
    """One island: its module and its loop."""

    def __init__(self, run: TorchRun, name: str, model: Any, buffers: Sequence[str]) -> None:
        self.run, self.model = run, model
        self.parameters = ModuleParameters(model, buffers)
        self.link = Link(run.broker.connect(run.manifest.run), run.manifest, f"{name}/x", (), run.clock)
        arrivals = self.link.join()
        self.replica = TorchReplica(run.manifest, self.parameters.device)
        self.replica.begin(self.parameters.named(), [arrival.params_N for arrival in arrivals])
        host = Host("test", MemoryMeter(run.clock, MemoryUse))
        self.loop = OwnLoop(
            name, run.manifest, self.link, self.replica, self.parameters, arrivals, host, lambda: None, run.clock, "x"
        )
        self.loop.begin()
        self.link.pump()

    def sync(self, steps: int = 1, tokens: int = 10, loss: Any = 2.5) -> None:
        """Sync, and exchange everything before and after it."""
        self.run.clock.now += steps
        self.link.pump()
        self.loop.turn(steps, tokens, loss)
        self.link.pump()
        self.run.merger.turn(0.0)

    def play(self, turns: int, step: Callable[[Any], None] = trained) -> None:
        """Make some steps."""
        for _ in range(turns):
            step(self.model)
            self.sync()


class TorchRun:
    """A run with its merger."""

    def __init__(self, model: Any = None, config: RunConfig = CONFIG, buffers: Sequence[str] = ()) -> None:
        self._buffers = buffers
        parameters = ModuleParameters(module() if model is None else model, buffers)
        tensors = parameters.manifest_tensors(kinds_by("^0"))
        fragments = balanced(tensors, config.sync.fragments)
        self.manifest = Manifest("own", config, tensors, fragments, NO_CORPUS, {}, uuid.UUID(int=1).hex)
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.transport = self.broker.connect("own")
        self.first = {name: as_float32(tensor) for name, tensor in parameters.tensors.items()}
        self.transport.create(self.manifest, first_snapshots(self.manifest, lambda name: self.first[name].reshape(-1)))
        self.merger = Merger(self.broker.connect("own"), self.clock, holder="merger", live_poll_seconds=0.0)
        assert self.merger.acquire()
        self.merger.load()

    def island(self, name: str = "a", model: Any = None) -> TorchIsland:
        """Return an island that has joined, with a module of its own."""
        return TorchIsland(self, name, module() if model is None else model, self._buffers)

    def merged(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the run's newest parameters by name, as float32."""
        return merged_by(self.merger)


def as_float32(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor in numpy."""
    copy: np.ndarray[Any, Any] = tensor.detach().to(torch.float32).clone().numpy()
    return copy


def of(config: RunConfig, **sections: Any) -> RunConfig:
    """Return the config with other sections."""
    return replace(config, **sections)
