"""The size and the step time of a user's task, for `archipelago simulate plan --task FILE.py`."""

from __future__ import annotations

import time

import jax
import numpy as np

from archipelago.broker.config import RunConfig
from archipelago.islands.inner import begin
from archipelago.islands.tasks.batches import TaskBatches
from archipelago.islands.tasks.file import load_task
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.tasks.workload import require_trainable, task_config, task_steps

#: Steps that are timed. The shortest one counts, because other work on the machine only makes steps longer.
TIMED = 4


def measured_step(flag: str) -> tuple[int, float]:
    """Return the tokens of a batch of the task FILE.py:NAME, and the seconds that a step takes on this device.

    Raises:
        ConfigError: The task is wrong; the code names the part.
    """
    file = load_task(flag)
    config = task_config(RunConfig(), file)
    model = require_trainable(file, config)
    steps, params = task_steps(model, config.inner), model.init()
    state = begin(config.inner, params) if file.task.optimizer is None else model.first_state(params)
    supply = TaskBatches(file, TaskRun("plan", 0))
    seconds = []
    for _ in range(TIMED + 1):  # the first one compiles
        batch = jax.device_put(supply.next(1))
        began = time.perf_counter()
        state, losses_n = steps(state, batch, np.int32(0))
        losses_n.block_until_ready()
        seconds.append(time.perf_counter() - began)
    return supply.tokens, min(seconds[1:])
