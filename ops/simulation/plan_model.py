"""What `archipelago simulate plan` reads of a model and a task: parameters, tensors, tokens, and the time of a step."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

import numpy as np

from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import Tensor
from archipelago.ops.simulation.spectra_load import decoder

#: Steps that are timed. The shortest one counts, because other work on the machine only makes steps longer.
TIMED = 4
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _number(text: str, what: str) -> float:
    found = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]{1,3})?)\s*([kmbgt]?)\s*", text.lower())
    value = float(found[1].replace("_", "")) * _UNITS[found[2]] if found else math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(f"{what} cannot be {text!r}", "Write a number such as 5e9, 5B or 120M.", code="config.value")
    return value


def parameters_of(model: str) -> int:
    """Return the parameters of a model by name, or the number in the text. Raise ConfigError for anything else."""
    if _is_number(model):
        return round(_number(model, "--model"))
    return sum(tensor.size for tensor in tensors_of(model))


def tensors_of(model: str) -> Sequence[Tensor]:
    """Return the tensors of a model by name or of a task's, or those of a usual decoder of that many parameters."""
    if _is_number(model):
        return decoder(_number(model, "--model"))
    if ".py" in model:
        from archipelago.islands.tasks.model import TaskModel
        from archipelago.islands.tasks.task import load_task

        return TaskModel(load_task(model), 0).tensors
    from archipelago.islands.models.registry import build

    return build(model).tensors


def _is_number(model: str) -> bool:
    is_number = re.fullmatch(r"[0-9][0-9_.]*(e[+-]?[0-9]+)?[kmbgt]?", model.lower())
    return bool(is_number) and model not in ("124m", "1b")


def tokens_of(tokens: str, parameters: int) -> int:
    """Return a number of tokens, given as a number or as a multiple of the parameters. Raise ConfigError otherwise."""
    if tokens.lower().endswith("x"):
        return round(_number(tokens[:-1], "--tokens") * parameters)
    return round(_number(tokens, "--tokens"))


def measured_step(flag: str) -> tuple[int, float]:
    """Return the tokens of a batch of the task FILE.py:NAME, and the seconds that a step takes on this device.

    Raises:
        ConfigError: The task is wrong; the code names the part.
    """
    import jax

    from archipelago.broker.config import RunConfig
    from archipelago.islands.tasks.batches import TaskRun
    from archipelago.islands.tasks.task import load_task
    from archipelago.islands.tasks.workload import Workload, require_trainable, task_config

    file = load_task(flag)
    work = Workload.of(file, task_config(RunConfig(), file))
    require_trainable(work)
    state, supply = work.begin(work.model.init()), work.supply(TaskRun("plan", 0))
    seconds = []
    for _ in range(TIMED + 1):  # the first one compiles
        batch = jax.device_put(supply.next(1))
        began = time.perf_counter()
        state, losses_n = work.steps(state, batch, np.int32(0))
        losses_n.block_until_ready()
        seconds.append(time.perf_counter() - began)
    return supply.tokens, min(seconds[1:])
