"""PyTorch scripts as islands: `create` makes a run from a module, and `join` makes a training loop an island of it.

from archipelago import pytorch
pytorch.create("redis://localhost:6379", "mine", model, steps=20_000)
with pytorch.join("redis://localhost:6379", "mine", model, optimizer) as run:
    ...
    run.sync(tokens=batch.numel(), loss=loss)  # after optimizer.step()
"""

from __future__ import annotations

from archipelago.islands.models.llama import Place
from archipelago.islands.models.llama import from_llama as LLAMA  # noqa: N812 - it is used as a table

try:
    from archipelago.islands.pytorch.joining import TorchRun as JoinedRun
    from archipelago.islands.pytorch.joining import create, join
except ModuleNotFoundError as _error:
    raise ImportError("archipelago.pytorch needs PyTorch: pip install '.[torch]' in a checkout") from _error

__all__ = ["LLAMA", "JoinedRun", "Place", "create", "join"]
