"""`archipelago.pytorch.create` and `archipelago.pytorch.join`: a PyTorch training script becomes an island of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from archipelago.broker.codecs import Vector
from archipelago.broker.config import AdoptConfig, MergeConfig, OuterConfig, SyncConfig, WireConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import MODEL_CONFIG_MAX, Manifest, Tensor
from archipelago.islands.models import llama
from archipelago.islands.models.llama import Names
from archipelago.islands.pytorch.host import HostCopy, device_name
from archipelago.islands.pytorch.module import ModuleParameters, unwrapped
from archipelago.islands.pytorch.pieces import mesh_of
from archipelago.islands.pytorch.replica import TorchReplica
from archipelago.islands.pytorch.schedule import ScheduleWatch
from archipelago.islands.pytorch.state import OptimizerState
from archipelago.islands.user_loop.held_out import Evaluate
from archipelago.islands.user_loop.new_run import create_run, settings
from archipelago.islands.user_loop.session import Session
from archipelago.islands.user_loop.tensors import EMBEDDINGS, KindOf, Trained, kinds_by

if TYPE_CHECKING:
    from archipelago.islands.pytorch.parallel import Follower

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Loss: TypeAlias = float | torch.Tensor


def create(
    url: str | None,
    name: str,
    model: torch.nn.Module,
    *,
    steps: int,
    sync: SyncConfig | None = None,
    merge: MergeConfig | None = None,
    outer: OuterConfig | None = None,
    adopt: AdoptConfig | None = None,
    wire: WireConfig | None = None,
    kinds: str | KindOf = EMBEDDINGS,
    trained: Trained | None = None,
    names: Names | None = None,
    record: bool = False,
    shards: int = 1,
    wait_seconds: float = 30.0,
) -> bool:
    """Create a run for training scripts in PyTorch, which then `join` it. Its first parameters are the model's.

    Args:
        model: A `torch.nn.Module` on one device. Its parameters that are trained, of float32, bfloat16 and float16, are
            merged, in float32. With `fully_shard` (FSDP2), all its processes call this.
        trained: Which parameters are trained: a regular expression that is found in their names, or a function from a
            name to a boolean. One that several layers share is trained if any of its names is chosen. The others are
            frozen: `join` compares them by digest, and they are never sent. None for those that require gradients now.
        names: The names and layouts of the run where they are not those of the module, as in `join`.
        url, name, steps, sync, merge, outer, adopt, wire, kinds, record, shards, wait_seconds: As in
            `archipelago.create`.

    Returns:
        Whether this call created it: False if the run exists with these tensors and settings.

    Raises:
        ConfigError: The model cannot be merged (the codes of `ModuleParameters`), or as `archipelago.create`.
        MismatchError, DivergedError, BrokerError: As `archipelago.create`.
    """
    config = settings(steps, record=record, sync=sync, merge=merge, outer=outer, adopt=adopt, wire=wire)
    parameters = ModuleParameters(model, trained, names)
    named, tensors = parameters.named(), parameters.manifest_tensors(kinds_by(kinds))
    own = "" if names else _config_text(model)
    made = partial(create_run, url, name, config, shards, tensors, model_config=own, wait_seconds=wait_seconds)
    if (mesh := mesh_of(unwrapped(model)[0])) is not None:
        from archipelago.islands.pytorch.parallel import create_split

        return create_split(mesh, parameters, made, f"create {name}")

    def first(tensor: str) -> Any:
        return named[tensor].detach().to("cpu", torch.float32).reshape(-1).numpy()

    return made(first, parameters.frozen_values)


@dataclass(frozen=True)
class Joining:
    """What a script gives to `join`, whose docstring describes it. All processes of one island give the same."""

    url: str | None
    run: str
    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    trained: Trained | None = None
    names: Names | None = None
    island: str | None = None
    wait_seconds: float = 30.0
    evaluate: Evaluate | None = None
    #: What the process that talks to Redis does before it joins, such as to create the run.
    before: Callable[[], object] | None = None

    def parts(self) -> tuple[ModuleParameters, OptimizerState | None]:
        """Return the parameters, and the state of the optimisers if there are any."""
        parameters = ModuleParameters(self.model, self.trained, self.names)
        return parameters, OptimizerState(self.optimizers, parameters.tensors) if self.optimizers else None


class TorchRun(Session):
    """A run that a PyTorch script has joined, as `join` returns it. Use it as a context manager."""

    _parameters: ModuleParameters
    _state: OptimizerState | None
    _replica: TorchReplica

    def __init__(self, given: Joining) -> None:
        super().__init__(given.url, given.run, given.island, given.wait_seconds, given.evaluate)
        self._model, self._before = given.model, given.before
        self._parameters, self._state = given.parts()
        self._llama_config = _own_config(given.model) if given.names is llama.from_llama else None
        self._gives_state = self._state is not None
        self._schedule = ScheduleWatch(given.optimizers[0]) if given.optimizers else None

    def __enter__(self) -> Self:
        """Join the run."""
        if self._before is not None:
            self._before()
        return super().__enter__()

    def sync(self, *, tokens: int | None = None, loss: Loss | None = None, steps: int = 1) -> None:
        """Sync after `optimizer.step()`. It changes the model's parameters in place, and never waits for the run.

        Most calls do nothing. Now and then a fragment is sent, or arrives.

        Args:
            tokens: The tokens of these steps, as in JAX.
            loss: Their loss, for display: a number or a tensor, which the device may still compute.
            steps: How many inner steps this call stands for.

        Raises:
            ConfigError: The parameters are not those of the run, or this is the wrong place for the call.
            DivergedError: A parameter or the loss is not finite.
        """
        self._turn(steps, tokens, _kept(loss))
        if self._schedule is not None:
            self._schedule.look(self.step, steps)

    # -- what PyTorch adds to a session -------------------------------------------------------------------------------

    def _tensors(self, manifest: Manifest) -> Sequence[Tensor]:
        return self._parameters.manifest_tensors(lambda name: "rest")

    def _frozen(self) -> Sequence[FrozenValues]:
        return self._parameters.frozen_values()

    def _place(self, manifest: Manifest, vectors: Sequence[Vector]) -> TorchReplica:
        if self._llama_config is not None:
            llama.require_size(self._llama_config, manifest.config.model.size)
        self._parameters.note_frozen()
        self._replica = replica = self._new_replica(manifest)
        self._rehearse()
        replica.begin(self._parameters.named(), vectors)
        return replica

    def _rehearse(self) -> None:
        if self._state is not None:
            self._state.rehearse()

    def _begin_again(self, vectors: Sequence[Vector]) -> None:
        self._replica.references.clear()  # nothing is measured any more
        self._replica.write(self._parameters.named(), vectors)

    def _device_name(self) -> str:
        return device_name(self._parameters.device)

    def _new_replica(self, manifest: Manifest) -> TorchReplica:
        return TorchReplica(manifest, self._parameters.device)

    def _loss_of(self, vectors: Sequence[Vector]) -> Any:
        assert self._evaluate is not None  # noqa: S101 - only islands with one are asked
        with self._parameters.lent() as named:
            self._lend(named, vectors)
            return self._evaluate(self._model)

    def _lend(self, named: Mapping[str, Any], vectors: Sequence[Vector]) -> None:
        """Write merged parameters into the module for a while. There is a copy of its own ones."""
        self._replica.write(named, vectors)

    def _use_state(self, state: Sequence[Any]) -> None:
        if self._state is not None:
            self._state.use(state)


def _own_config(model: Any) -> Mapping[str, Any] | None:
    """Return the settings of a model of transformers; None for another module."""
    config = getattr(unwrapped(model)[0], "config", None)
    return None if config is None or not hasattr(config, "to_dict") else config.to_dict()


def _config_text(model: Any) -> str:
    """Return the settings of a model of transformers as JSON, for exports; empty for another module."""
    config = _own_config(model)
    if config is None or "model_type" not in config:
        return ""
    architectures = config.get("architectures") or [type(unwrapped(model)[0]).__name__.removeprefix("FSDP")]
    text = json.dumps({**config, "architectures": architectures}, default=str, sort_keys=True)
    return text if len(text) <= MODEL_CONFIG_MAX else ""


def _kept(loss: Any) -> Any:
    """Return a loss for later. A tensor is copied, because a script may go on adding to it."""
    if not torch.is_tensor(loss) or loss.is_complex() or not loss.numel():
        return loss  # an error says so, if it is no number
    return HostCopy(loss.detach().to(torch.float32, copy=True))


def join(
    url: str | None,
    name: str,
    model: torch.nn.Module,
    optimizer: Optimizers | None = None,
    *,
    trained: Trained | None = None,
    names: Names | None = None,
    island: str | None = None,
    wait_seconds: float = 30.0,
    evaluate: Evaluate | None = None,
) -> TorchRun | Follower:
    """Make a training script in PyTorch an island of a run.

        with archipelago.pytorch.join(url, "mine", model, optimizer) as run:
            for batch in loader:
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.sync(tokens=batch.numel(), loss=loss)
                if run.finished:
                    break

    Args:
        model: A `torch.nn.Module` on one device, in `DistributedDataParallel`, or with `fully_shard` (FSDP2). The
            processes of the latter two all call this, and are one island. The `with` sets its parameters to those of
            the run.
        optimizer: Its optimiser, or a list of them. Newcomers take its state from this island, and this island takes
            that of a peer. None keeps states apart.
        trained: Which parameters are trained, as in `create`. The others must have the values of the run's.
        names: The names and layouts of the run where they are not those of the module: a table, or a function, from a
            parameter's name to the one in the run, or to a `Place`, which says whether the axes are swapped. `LLAMA` is
            the one from a Llama of transformers to our dense models. Other arguments and messages use the run's names.
        evaluate: A function that gets the module, which holds the merged parameters meanwhile, is in evaluation mode
            and computes no gradients, and returns their mean loss on held-out data. It is called as in JAX; all
            processes of an island call it, and the loss of the first one counts. It takes the memory of another copy
            of the parameters that are merged.
        url, name, island, wait_seconds: As in `archipelago.join`.

    Raises:
        ConfigError: The model cannot be merged (the codes of `ModuleParameters`), or the optimiser is not the model's
            (`loop.argument`). The `with` also refuses a Llama that computes something else than the run's model
            (`llama.different`).
    """
    one: Any = optimizer
    several: list[Any] = [] if one is None else list(one) if isinstance(one, list | tuple) else [one]
    for each in several:
        if not hasattr(each, "param_groups"):
            raise ConfigError(
                f"the optimiser is a {type(each).__name__}, which has no `param_groups`",
                "Give an optimiser of PyTorch, or a list of them.",
                code="loop.argument",
            )
    return membership(Joining(url, name, model, several, trained, names, island, wait_seconds, evaluate))


def membership(given: Joining, group: Any = None) -> TorchRun | Follower:
    """Return the membership of this process.

    Args:
        given: What the script gives to `join`.
        group: The process group of data-parallel processes whose model is not wrapped here.
    """
    inner, wrapped_for = unwrapped(given.model)
    mesh, group = mesh_of(inner), wrapped_for or group
    if mesh is None and (group is None or group.size() == 1):
        if group is None:
            _require_alone()
        return TorchRun(given)
    from archipelago.islands.pytorch.parallel import joined

    return joined(mesh, group, given)


def _require_alone() -> None:
    """Raise ConfigError (`loop.sharded`) in one of several processes, whose model is in no wrapper.

    Each would be an island and adopt at its own time, while all step by the mean of their gradients.
    """
    processes = torch.distributed
    if processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1:
        raise ConfigError(
            f"this is one of {processes.get_world_size()} processes, and the model is not wrapped in "
            "DistributedDataParallel",
            "Give `join` the wrapped model, and not its `module`, in every process. To make each process an island of "
            "its own, wrap the model for a process group of that process alone.",
            code="loop.sharded",
        )
