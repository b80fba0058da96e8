"""PyTorch scripts as islands: `create` makes a run from a module, and `join` makes a training loop an island of it.

from archipelago import pytorch
pytorch.create("redis://localhost:6379", "mine", model, steps=20_000)
with pytorch.join("redis://localhost:6379", "mine", model, optimizer) as run:
    ...
    run.sync(tokens=batch.numel(), loss=loss)  # after optimizer.step()
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipelago.islands.models.llama import Place
    from archipelago.islands.models.llama import from_llama as LLAMA  # noqa: N812 - it is used as a table
    from archipelago.islands.pytorch.joining import TorchRun as JoinedRun
    from archipelago.islands.pytorch.joining import create, join

#: Where each public name is found. PyTorch is imported on first use.
_HOMES = {
    "LLAMA": "archipelago.islands.models.llama:from_llama",
    "JoinedRun": "archipelago.islands.pytorch.joining:TorchRun",
    "Place": "archipelago.islands.models.llama:Place",
    "create": "archipelago.islands.pytorch.joining:create",
    "join": "archipelago.islands.pytorch.joining:join",
}

__all__ = ["LLAMA", "JoinedRun", "Place", "create", "join"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Raises ImportError without PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(_HOMES[name])
    except ModuleNotFoundError as error:
        raise ImportError("archipelago.pytorch needs PyTorch: pip install '.[torch]' in a checkout") from error


def __dir__() -> list[str]:
    return __all__
