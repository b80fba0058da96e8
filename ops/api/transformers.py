"""Hugging Face `Trainer`, and so TRL's trainers, as islands.

Trainer(model, args, train_dataset=data, callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)])
"""

from __future__ import annotations

try:
    from archipelago.islands.trainers.transformers import ArchipelagoCallback
except ModuleNotFoundError as _error:
    from archipelago.broker.machine import install_hint

    raise ImportError(f"{_error.msg}. {install_hint('transformers')}") from _error

__all__ = ["ArchipelagoCallback"]
