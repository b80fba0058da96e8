"""The tensors of a PyTorch module by name, without what wraps the module."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from archipelago.islands.models.llama import Names, misnamed

#: `torch.compile` puts this name before those of the module that it wraps.
COMPILED = "_orig_mod."


def unwrapped(model: Any) -> tuple[Any, Any]:
    """Return the module inside of its wrappers, and the process group of DistributedDataParallel, if it is one."""
    group = None
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            group = model.process_group
        elif not isinstance(model, torch.nn.DataParallel):
            if not hasattr(model, "_orig_mod"):
                return model, group
            model = model._orig_mod
            continue
        model = model.module


def named_tensors(model: Any, *, all_names: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield every parameter and buffer once, under the first of its names; or once for each name of it."""
    once = not all_names
    for name, tensor in (*model.named_parameters(remove_duplicate=once), *model.named_buffers(remove_duplicate=once)):
        yield name.replace(COMPILED, ""), tensor


def require_known(names: Names | None, model: Any) -> None:
    """Raise ConfigError (`loop.names`) if a table names a parameter that the module does not have."""
    known = {name for name, _ in named_tensors(model, all_names=True)}
    unknown = sorted(set(names) - known, key=str) if isinstance(names, Mapping) else []
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), known, 1)
        said = f", but {near[0]!r}" if near else ""
        raise misnamed(f"names {unknown[0]!r}, and the model has no such parameter or buffer{said}")
