"""Lightning trainers as islands.

Trainer(callbacks=[ArchipelagoCallback(url, "mine", steps=20_000)]).fit(model, loader)
"""

from __future__ import annotations

try:
    from archipelago.islands.trainers.lightning import ArchipelagoCallback
except ModuleNotFoundError as _error:
    from archipelago.broker.machine import install_hint

    raise ImportError(f"{_error.msg}. {install_hint('lightning')}") from _error

__all__ = ["ArchipelagoCallback"]
