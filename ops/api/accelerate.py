"""Loops with accelerate as islands: this `LocalSGD` takes the place of accelerate's.

from archipelago.accelerate import LocalSGD
with LocalSGD(accelerator, model, url=url, name="mine", steps=20_000) as local: … local.step()
"""

from __future__ import annotations

try:
    import accelerate as _accelerate
    import torch as _torch
except ModuleNotFoundError as _error:
    raise ImportError("archipelago.accelerate needs: pip install '.[accelerate]' in a checkout") from _error

from archipelago.islands.trainers.accelerate import LocalSGD

del _accelerate, _torch

__all__ = ["LocalSGD"]
