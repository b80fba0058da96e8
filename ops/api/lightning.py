"""Lightning trainers as islands: give them an `ArchipelagoCallback`.

from archipelago.lightning import ArchipelagoCallback
Trainer(callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)]).fit(model, loader)
"""

from __future__ import annotations

try:
    import lightning as _lightning
    import torch as _torch
except ModuleNotFoundError as _error:
    raise ImportError("archipelago.lightning needs: pip install '.[lightning]' in a checkout") from _error

from archipelago.islands.trainers.lightning import ArchipelagoCallback

del _lightning, _torch

__all__ = ["ArchipelagoCallback"]
