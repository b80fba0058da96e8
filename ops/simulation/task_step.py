"""The size and the step time of a user's task, for `archipelago simulate plan --task FILE.py`."""

from __future__ import annotations

import time

import jax
import numpy as np

from archipelago.broker.config import RunConfig
from archipelago.islands.tasks.file import load_task
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.tasks.workload import Workload, require_trainable, task_config

#: Steps that are timed. The shortest one counts, because other work on the machine only makes steps longer.
TIMED = 4


def measured_step(flag: str) -> tuple[int, float]:
    """Return the tokens of a batch of the task FILE.py:NAME, and the seconds that a step takes on this device.

    Raises:
        ConfigError: The task is wrong; the code names the part.
    """
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
