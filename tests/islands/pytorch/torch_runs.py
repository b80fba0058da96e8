"""Runs and scripts of users' own loops in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

import archipelago
from archipelago.broker.config import RunConfig
from archipelago.islands.user_loop.tensors import kinds_by
from tests import pytorch
from tests.islands.user_loop.any_framework import CONFIG, STEP, Framework, LoopIsland, LoopRun, Script, Values

torch = pytorch.required()

from archipelago.islands.pytorch.module import ModuleParameters  # noqa: E402 - it imports torch
from archipelago.islands.pytorch.replica import TorchReplica  # noqa: E402


def module(dtype: str = "float32", more: float = 0.0) -> Any:
    """Return a module whose input and output layers share their weight, with buffers that are not merged."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)
    )
    model[3].weight = model[0].weight
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(1.0 + number + more)
    return model.to(getattr(torch, dtype))


def trained(model: Any, by: float = STEP) -> None:
    """Make a step that moves each parameter by the same number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= by


class TorchIsland(LoopIsland):
    """One island, which trains a module in place."""

    parameters: ModuleParameters

    def __init__(self, run: TorchRun, name: str, model: Any) -> None:
        self.model, parameters = model, ModuleParameters(model)
        replica = TorchReplica(run.manifest, parameters.device)
        super().__init__(run, name, parameters, replica, lambda vectors: replica.begin(parameters.named(), vectors))

    def step(self, by: float = STEP) -> None:
        trained(self.model, by)

    def spoil(self, value: float) -> str:
        with torch.no_grad():
            self.model[2].bias[2] = value
        return "2.bias"

    def values(self) -> Values:
        return values_of(self.parameters)

    def dtypes(self) -> set[str]:
        return {str(tensor.dtype).removeprefix("torch.") for tensor in self.parameters.named().values()}


class TorchRun(LoopRun):
    """A run of islands that train modules."""

    def __init__(self, model: Any = None, config: RunConfig = CONFIG) -> None:
        parameters = ModuleParameters(module() if model is None else model)
        super().__init__(parameters.manifest_tensors(kinds_by("^0")), values_of(parameters), config)

    def island(self, name: str = "a", model: Any = None) -> TorchIsland:
        return TorchIsland(self, name, module() if model is None else model)


class ModuleScript(Script):
    """A script in PyTorch. Its optimiser is AdamW, if it has one."""

    session: Any

    def __init__(
        self, url: str, run: str = "own", model: Any = None, *, optimizes: bool = False, **options: Any
    ) -> None:
        self.model = module() if model is None else model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1) if optimizes else None
        session: Any = archipelago.pytorch.join(url, run, self.model, self._optimizer, **options)
        super().__init__(session)

    def step(self, by: float = STEP) -> None:
        if self._optimizer is not None:
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self._optimizer.step()
        trained(self.model, by)

    def sync(self, **about: Any) -> None:
        self.session.sync(**about)

    def values(self) -> Values:
        return {name: as_float32(tensor) for name, tensor in self.model.named_parameters()}

    def state(self) -> list[np.ndarray[Any, Any]]:
        assert self._optimizer is not None
        states = [self._optimizer.state[parameter] for parameter in self.model.parameters()]
        return [state[key].clone().numpy() for state in states for key in sorted(state)]


def values_of(parameters: ModuleParameters) -> Values:
    return {name: as_float32(tensor) for name, tensor in parameters.named().items()}


def as_float32(tensor: Any) -> np.ndarray[Any, Any]:
    copy: np.ndarray[Any, Any] = tensor.detach().to(torch.float32).clone().numpy()
    return copy


def _with_shape() -> tuple[Any, str]:
    return torch.nn.Sequential(*module()[:3], torch.nn.Linear(4, 9)), "3.bias"


def _with_value(value: float) -> tuple[Any, str]:
    model = module()
    with torch.no_grad():
        model[2].bias[1] = value
    return model, "2.bias"


PYTORCH = Framework(
    "pytorch", module, TorchRun, archipelago.pytorch.create, ModuleScript, _with_shape, _with_value, torch.tensor
)
