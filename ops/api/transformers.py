"""Hugging Face `Trainer`, and so TRL's trainers, as islands: give them an `ArchipelagoCallback`.

from archipelago.transformers import ArchipelagoCallback
trainer = Trainer(model, args, train_dataset=data, callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)])
"""

from __future__ import annotations

try:
    import torch as _torch
    import transformers as _transformers
except ModuleNotFoundError as _error:
    raise ImportError("archipelago.transformers needs: pip install '.[transformers]' in a checkout") from _error

from archipelago.islands.trainers.transformers import ArchipelagoCallback

del _torch, _transformers

__all__ = ["ArchipelagoCallback"]
