"""The state of PyTorch optimisers, which newcomers take from peers: plain tensors, never pickled objects.

Giver and taker must expect the same arrays. A new optimiser has no state yet. One step without gradients, at a learning
rate of zero, shows which state it keeps.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archipelago.broker.errors import ConfigError, WireError
from archipelago.broker.messages import Handover
from archipelago.islands.pytorch.host import HostCopy
from archipelago.islands.pytorch.pieces import joined_like, own_piece
from archipelago.islands.sync import recovery

#: Narrower floating-point numbers travel as float32, which holds each of them.
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateEntry:
    """One value of the state.

    Attributes:
        group: The options of the parameter's group, such as `betas`.
        optimizer: The parameter's optimiser, which has another `state` after `load_state_dict`.
        name: The parameter's name; its position if the module does not have it.
        key: The name of the value, such as `exp_avg`.
        example: A value of this shape, dtype and layout without memory, or a plain number.
        device: Where the optimiser keeps it.
    """

    group: Mapping[str, Any]
    optimizer: Any
    parameter: Any
    name: str
    key: str
    example: Any
    device: Any = None

    @property
    def tensor(self) -> Any:
        return self.example if torch.is_tensor(self.example) else torch.as_tensor(self.example, device="cpu")

    @property
    def placeholder(self) -> np.ndarray[Any, Any]:
        """An array of the value's shape and dtype on its way, which takes no memory."""
        dtype = _WIDE.get(self.tensor.dtype, self.tensor.dtype)
        return np.broadcast_to(torch.zeros((), dtype=dtype, device="cpu").numpy(), tuple(self.tensor.shape))

    def present(self) -> Any:
        """Return a copy of what this process holds of it, as it travels; zeros if the optimiser has not made it yet."""
        value = self.optimizer.state.get(self.parameter, {}).get(self.key)
        if value is None:
            value = torch.zeros(own_piece(self.tensor).shape, dtype=self.tensor.dtype, device="cpu")
        own = own_piece(value) if torch.is_tensor(value) else torch.as_tensor(value, device="cpu")
        return own.detach().to(_WIDE.get(own.dtype, own.dtype), copy=True)

    def put(self, own: Any) -> None:
        """Replace what this process holds of it by a tensor of the host."""
        if not torch.is_tensor(self.example):
            value = type(self.example)(own.item())
        else:
            like = own_piece(self.example)  # fused kernels need the strides of the parameter
            value = joined_like(torch.empty_like(like, device=self.device).copy_(own), self.example)
        self.optimizer.state[self.parameter][self.key] = value


class OptimizerState:
    """Gives and takes the state of one script's optimisers.

    Attributes:
        can_travel: Whether a peer can use this state.
        was_there: Whether the script had loaded or made some of it before it joined.
        entries: All values of the state, once they are known.
    """

    def __init__(self, optimizers: Sequence[Any], tensors: Mapping[str, Any]) -> None:
        """Note the optimisers. Raises ConfigError (`loop.argument`) for one with none of the module's parameters."""
        self._optimizers = optimizers
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self.entries: tuple[StateEntry, ...] = ()
        self.can_travel = self.was_there = False
        for optimizer in optimizers:
            if not any(id(p) in self._names for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    "the optimiser has none of the model's parameters",
                    "Make it with `model.parameters()` of the model that joins, after the model was moved or wrapped.",
                    code="loop.argument",
                )

    def rehearse(self) -> None:
        """Find out which state the optimisers keep. Call this before the run's parameters are placed.

        Gradients, options and attributes of the optimisers are afterwards as they were, but for what attributes hold.
        Their hooks do not see the steps: they may drive a schedule.

        Raises:
            ConfigError: An optimiser that has no state yet writes over what a merge has changed (`loop.argument`).
        """
        self.was_there = any(optimizer.state for optimizer in self._optimizers)
        fresh = [(optimizer, dict(vars(optimizer))) for optimizer in self._optimizers if not optimizer.state]
        undoing = None
        try:
            for optimizer, _ in fresh:
                vars(optimizer).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
                _step_without_gradients(optimizer)
            self.entries = tuple(self._found())
            undoing = next((optimizer for optimizer, _ in fresh if _undoes_changes(optimizer)), None)
            self.can_travel = bool(self.entries) and bool(self.digest.size)
        except Exception as error:  # noqa: BLE001 - the optimiser is the user's, and its state is not necessary
            log.warning("this optimiser's state is not shared with peers: %s: %s", type(error).__name__, error)
        finally:
            for optimizer, attributes in fresh:
                vars(optimizer).clear()
                vars(optimizer).update(attributes)
                optimizer.state.clear()
        if undoing is not None:
            raise ConfigError(
                f"{type(undoing).__name__} keeps copies of the parameters (master weights) and writes them over the "
                "parameters at each step, which undoes merges",
                "Turn its master weights off: keep the parameters in float32, and compute with `torch.autocast`.",
                code="loop.argument",
            )

    def _values(self) -> Iterator[tuple[Any, Any, Any, str, str, Any]]:
        """Yield each value that belongs to a parameter: its optimiser, group, parameter and name, and the value's key.

        An optimiser may keep other values in its state, such as a count of steps. These stay the island's own.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    name = self._names.get(id(parameter), str(number))
                    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                        if value is not None:
                            yield optimizer, group, parameter, name, key, value

    def _found(self) -> Iterator[StateEntry]:
        for optimizer, group, parameter, name, key, value in self._values():
            if not (torch.is_tensor(value) or isinstance(value, int | float)):
                raise TypeError(f"{key!r} is a {type(value).__name__}, not a tensor or a number")
            device = value.device if torch.is_tensor(value) else None
            example = torch.empty_like(value, device="meta") if torch.is_tensor(value) else value
            yield StateEntry(group, optimizer, parameter, name, key, example, device)

    def still_travels(self) -> bool:
        """Return whether the state has the layout that it had at first. Otherwise no peer could use it from now on."""
        known = {(id(e.optimizer.state), id(e.parameter), e.key): _layout(e.example) for e in self.entries}
        for optimizer, _, parameter, _, key, value in self._values() if self.can_travel else ():
            was = known.get((id(optimizer.state), id(parameter), key), "missing")
            if _layout(value) != was and self.can_travel:
                now = f"{key!r} was {was}, and is {_layout(value)}"
                log.warning("this optimiser's state is no longer given to newcomers: %s", now)
                self.can_travel = False
        return self.can_travel

    @property
    def digest(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The digest of the layout, 16 bytes."""
        return recovery.layout_digest(
            (f"{e.name}/{e.key}", e.placeholder.shape, str(e.placeholder.dtype)) for e in self.entries
        )

    def copies(self) -> list[Any] | None:
        """Return the digest and copies of all values that no later step changes; None if they cannot travel."""
        if not self.still_travels():
            return None
        return [self.digest, *(HostCopy(entry.present()) for entry in self.entries)]

    def decode(self, handover: Handover, payload: bytes) -> list[Any]:
        """Return the values that a peer sent, as tensors of the host. Raises WireError if they do not fit."""
        if not self.can_travel:
            raise WireError("this optimiser takes no state from peers", code="handover.shape")
        values = recovery.decode(handover, payload, [entry.placeholder for entry in self.entries], self.digest)
        self._require_sound(values)
        return [torch.from_numpy(np.array(each)) for each in values]

    def _require_sound(self, values: Sequence[Any]) -> None:
        """Raise WireError for values that no steps of the optimiser can produce."""
        by_place = {(id(e.parameter), e.key): value for e, value in zip(self.entries, values, strict=True)}
        for entry, value in zip(self.entries, values, strict=True):
            bounds, second = recovery.MomentBounds(), by_place.get((id(entry.parameter), "exp_avg_sq"))
            if second is not None and second.shape == value.shape and entry.tensor.dtype == torch.float32:
                ratio = recovery.adam_ratio(*entry.group.get("betas", (1.0, 1.0)))
                bounds = recovery.MomentBounds(ratio=recovery.MOMENTS_SLACK * ratio)
            recovery.require_sound(entry.key, value, bounds, second)

    def use(self, values: Sequence[Any]) -> None:
        """Replace the state of the optimisers by values of a peer."""
        for entry, value in zip(self.entries, values, strict=True):
            entry.put(value)


def _layout(value: Any) -> str:
    """Return the shape and dtype of a value of the state, in words."""
    if not torch.is_tensor(value):
        return f"a number ({type(value).__name__})" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _step_without_gradients(optimizer: Any) -> None:
    """Make one step of zero gradients at a learning rate of zero, so that the optimiser makes its state."""
    options = [(dict(group), _copied(group)) for group in optimizer.param_groups]
    kept = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        for parameter, _ in kept:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        for group, (before, copies) in zip(optimizer.param_groups, options, strict=True):
            for key in group.keys() - before.keys():
                del group[key]
            for key, value in copies.items():
                group[key] = before[key].copy_(value) if torch.is_tensor(value) else value


def _undoes_changes(optimizer: Any) -> bool:
    """Return whether a step takes a parameter back to its value at the step before.

    The parameter is the one of which this process holds most, among those with the narrowest dtype, of which master
    weights are copies.
    """
    trained = (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
    every = [own_piece(each.detach()) for each in trained]
    if not every:
        return False
    own = max(every, key=lambda own: (-own.dtype.itemsize, own.numel()))
    before = own.clone()
    try:
        changed = own.add_(1.0).clone()
        _step_without_gradients(optimizer)
        return torch.equal(own, before) and not torch.equal(own, changed)
    finally:
        own.copy_(before)


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group. Some optimisers keep state there, such as an estimate of the learning rate."""
    return {
        key: value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }
