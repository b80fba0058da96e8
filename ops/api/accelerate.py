"""Loops with accelerate as islands.

with LocalSGD(accelerator, model, url=url, name="mine", steps=20_000) as local: … local.step()
"""

from __future__ import annotations

try:
    from archipelago.islands.trainers.accelerate import LocalSGD
except ModuleNotFoundError as _error:
    from archipelago.broker.machine import install_hint

    raise ImportError(f"{_error.msg}. {install_hint('accelerate')}") from _error

__all__ = ["LocalSGD"]
