"""The parameters of a PyTorch module by name: which of them are merged, and a check that they are still the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from archipelago.broker.errors import ConfigError
from archipelago.broker.frozen import FrozenValues
from archipelago.broker.manifest import Tensor
from archipelago.islands.models.llama import Names, misnamed, place_of
from archipelago.islands.pytorch.host import FrozenTensors
from archipelago.islands.pytorch.pieces import mesh_of, own_piece, put_back, require_gatherable
from archipelago.islands.sync.adoption import Parameters
from archipelago.islands.user_loop.tensors import KindOf, Trained, frozen_changed, nothing_trained, trained_by

MERGED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ModuleParameters(Parameters):
    """The tensors of a module that are merged, which are changed in place.

    Parameters of float32, bfloat16 and float16 that are trained are merged, in float32. The other parameters are
    frozen. Buffers stay the island's own. A parameter that several layers share is one tensor under its first name, and
    is trained if `trained` finds any of its names. Where the run has other names than the module, all names here are
    those of the run.

    Attributes:
        tensors: The merged tensors by name.
        frozen: The parameters that are not trained, by name. They may be on any devices.
        transposed: The names of those whose axes are swapped in the run.
    """

    def __init__(self, model: Any, trained: Trained | None = None, names: Names | None = None) -> None:
        """Find the tensors.

        Args:
            model: A `torch.nn.Module`. One in `DistributedDataParallel`, from `torch.compile` or Lightning Fabric, or
                with checkpointed activations, has the names of the module inside.
            trained, names: As in `archipelago.pytorch.create`.

        Raises:
            ConfigError: A parameter is on another device than the first (`loop.sharded`), has no values yet
                (`loop.meta`), is spread over processes in a way that cannot be gathered (`loop.sharded`), or has a
                dtype that is not merged (`loop.dtype`); there is nothing to train (`loop.nothing`), `trained` cannot be
                read (`loop.argument`), or `names` does not fit the module (`loop.names`).
        """
        self._model, _ = unwrapped(model)
        mesh = mesh_of(self._model)
        self._names = names
        self._is_trained = None if trained is None else trained_by(trained)
        self._shared: dict[int, list[str]] = {}  # all names of each tensor
        for name, tensor in named_parameters(self._model, all_names=True):
            self._shared.setdefault(id(tensor), []).append(place_of(names, name).name)
        found = self._all()
        self._found = frozenset(found)
        self.tensors = {name: tensor for name, tensor in found.items() if self._is_merged(name, tensor)}
        if not self.tensors:
            raise nothing_trained(trained, list(found), "Unfreeze what is trained: it requires gradients.")
        self.frozen = {name: one for name, one in found.items() if name not in self.tensors and one.numel()}
        for name, tensor in self.frozen.items():
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise ConfigError(
                    f"the frozen parameter {name!r} is of {tensor.dtype}, {tensor.layout}, which has no digest",
                    "Convert it to a dense tensor, or keep it in a buffer.",
                    code="loop.dtype",
                )
        places = [place_of(names, name) for name, _ in named_parameters(self._model)]
        self.transposed = frozenset(place.name for place in places if place.transposed)
        for name in self.transposed:
            if found[name].dim() != 2:
                raise misnamed(f"swaps the axes of {name!r}, which has {found[name].dim()} axes instead of 2")
        self._watched = FrozenTensors(self.frozen)
        first, one = next(iter(self.tensors.items()))
        self.device = one.device
        for name, tensor in self.tensors.items():
            if tensor.device != self.device:
                raise ConfigError(
                    f"the parameter {name!r} is on {tensor.device}, and {first!r} on {self.device}",
                    "Move the whole model to one device: `model.to(device)`.",
                    code="loop.sharded",
                )
        self._kinds = {name: _kind(tensor) for name, tensor in self.tensors.items()}
        for name, view in self.views().items():
            require_gatherable(name, view, mesh)

    def _is_merged(self, name: str, tensor: Any) -> bool:
        if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(
                f"the parameter {name!r} has no values yet: it is on the meta device, or its layer is lazy",
                "Make the values first: `model.to_empty(device=…)` and its initialisation, or one forward pass.",
                code="loop.meta",
            )
        if not (self._chooses(tensor) and tensor.numel()):
            return False
        if tensor.dtype not in MERGED_DTYPES or tensor.layout != torch.strided:
            raise ConfigError(
                f"the parameter {name!r} is trained, and it is of {tensor.dtype}, {tensor.layout}, which is not merged",
                "Convert it to a dense tensor of float32, bfloat16 or float16, or freeze it.",
                code="loop.dtype",
            )
        return True

    def _chooses(self, tensor: Any) -> bool:
        if self._is_trained is None:
            return bool(tensor.requires_grad)
        return any(map(self._is_trained, self._shared[id(tensor)]))

    def frozen_values(self) -> list[FrozenValues]:
        return [
            FrozenValues(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), partial(chunks, tensor))
            for name, tensor in self._views(self.frozen).items()
        ]

    def manifest_tensors(self, kind_of: KindOf) -> tuple[Tensor, ...]:
        """Return the tensors of a manifest, in the order of the module."""
        views = self._views(self.tensors)
        return tuple(Tensor(name, tuple(view.shape), kind_of(name)) for name, view in views.items())

    def _all(self) -> dict[str, Any]:
        """Return every parameter of the module by its name in the run."""
        found: dict[str, Any] = {}
        for name, tensor in named_parameters(self._model):
            renamed = place_of(self._names, name).name
            if renamed in found:
                raise misnamed(f"gives two parameters the name {renamed!r}, one of which is {name!r} in the model")
            found[renamed] = tensor
        return found

    def _views(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return tensors with the axes of the run. A view shares the memory of its parameter."""
        if not self.transposed:
            return tensors
        return {name: t.detach().t() if name in self.transposed else t for name, t in tensors.items()}

    def views(self) -> dict[str, Any]:
        """Return all tensors that are merged or frozen, with the axes of the run."""
        return self._views({**self.tensors, **self.frozen})

    # -- what a loop needs --------------------------------------------------------------------------------------------

    def named(self) -> dict[str, Any]:
        """Return the tensors by name, with the axes of the run.

        Raises ConfigError if a parameter is another object than it was in `join`, or has another shape, dtype or
        device, or if another one is trained (`loop.other-tree`), or a frozen one was changed (`loop.frozen-changed`).
        """
        put_back(self._model)
        present = self._all()
        for name, tensor in self.tensors.items():
            if present.get(name) is not tensor:
                was = "has been replaced" if name in present else "is no longer there"
                raise ConfigError(
                    f"the parameter {name!r} of the model {was} since `join`",
                    "Change parameters in place (`parameter.copy_(…)`), or join again with the new module.",
                    code="loop.other-tree",
                )
            _require_kind(name, self._kinds[name], _kind(tensor))
        for name, tensor in self.frozen.items():
            if present.get(name) is not tensor:
                raise frozen_changed(name)
        if added := [name for name, tensor in present.items() if name not in self._found and tensor.requires_grad]:
            raise ConfigError(
                f"the parameter {added[0]!r} of the model was added since `join`",
                "Make all layers before `join`, because no peer would get this one.",
                code="loop.other-tree",
            )
        self._watched.look()
        return self._views(self.tensors)

    def note_frozen(self) -> None:
        """Note the frozen tensors, which are those of the run now."""
        self._watched.note()

    def require_frozen(self) -> None:
        """Raise ConfigError (`loop.frozen-changed`) if a frozen tensor has changed. This waits for the device."""
        put_back(self._model)
        self._watched.require_same()

    @contextmanager
    def lent(self) -> Iterator[dict[str, Any]]:
        """Give the tensors by name to be overwritten, and bring their own bits back afterwards. Raises as `named`.

        Meanwhile the module is in evaluation mode, and nothing computes gradients. This takes the memory of another
        copy of the tensors that are merged.
        """
        named, modes = self.named(), {module: module.training for module in self._model.modules()}
        with torch.no_grad():
            own = {name: own_piece(tensor).clone() for name, tensor in named.items()}
            try:
                self._model.eval()
                yield named
            finally:
                put_back(self._model)
                for name, tensor in named.items():
                    own_piece(tensor).copy_(own[name])
                for module, mode in modes.items():
                    module.training = mode

    def not_finite(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if not bool(torch.isfinite(own_piece(tensor)).all())]


#: The bytes of a tensor that are copied to the host at a time.
CHUNK_BYTES = 1 << 26


def chunks(tensor: Any) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, chunk by chunk."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].cpu().numpy().data


#: Shape, dtype and device of a tensor.
Kind = tuple[tuple[int, ...], Any, Any]


def _kind(tensor: Any) -> Kind:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _require_kind(name: str, was: Kind, now: Kind) -> None:
    if was == now:
        return
    before, after = next((a, b) for a, b in zip(was, now, strict=True) if a != b)
    raise ConfigError(
        f"the parameter {name!r} has changed since `join`, from {before} to {after}",
        "Convert or move the model before `join`.",
        code="loop.other-tree",
    )


#: `torch.compile`, and activation checkpointing as accelerate asks for it, put these names before those inside.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrapped(model: Any) -> tuple[Any, Any]:
    """Return the module inside of its wrappers, and the process group of DistributedDataParallel, if it is one."""
    group = None
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            group = model.process_group
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif hasattr(model, "_forward_module"):  # of Lightning Fabric, which shows the attributes of the module inside
            model = model._forward_module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model, group


def named_parameters(model: Any, *, all_names: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield every parameter once, under the first of its names; or once for each name of it."""
    for name, parameter in model.named_parameters(remove_duplicate=not all_names):
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter
