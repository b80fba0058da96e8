"""Our models as tasks: they train by the same program as without a task, and read the run's shards."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from archipelago.broker.config import ModelConfig
from archipelago.islands.data.corpus import OpenCorpus, Splits
from archipelago.islands.inner import compile_steps
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import require_trainable
from archipelago.ops.experiments.baselines import AllShards
from tests.small import SMALL

TEXT = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
CORPUS = OpenCorpus(
    "text", TEXT.size, "0" * 32, "noise", Splits(TEXT.size, 0, 0), train=TEXT, valid=TEXT[:2000], test=TEXT[:0]
)


@pytest.mark.parametrize("size", ["tiny", pytest.param("tiny-moe", marks=pytest.mark.full)])
def test_the_program_of_an_island_is_that_of_its_model(size: str) -> None:
    config = replace(SMALL, model=ModelConfig(size=size))
    work, model = our_work(config, CORPUS), build(config.model)
    assert work.model.tensors == model.tensors
    state, batch = jax.eval_shape(lambda: work.begin(work.model.init())), work.supply(TaskRun("a", 1)).sample(2)
    own, wanted = (
        steps.lower(state, batch, np.int32(0), np.int32(1)).as_text()  # type: ignore[attr-defined]
        for steps in (work.steps, compile_steps(model, config.inner))
    )
    assert own == wanted


def test_equal_settings_compile_once() -> None:
    work = our_work(SMALL, CORPUS)
    assert our_work(replace(SMALL, seed=7), replace(CORPUS, name="other")).steps is work.steps
    longer = work.changed(inner=replace(SMALL.inner, steps=99))
    assert longer.steps is not work.steps
    assert longer.changed(inner=SMALL.inner).steps is work.steps


def test_other_settings_change_the_data_too() -> None:
    work = our_work(SMALL, CORPUS)
    other = work.changed(seed=SMALL.seed + 1)
    assert other.steps is work.steps
    first, second = (each.supply(TaskRun("a", 1, link=AllShards())).next(1) for each in (work, other))
    assert not np.array_equal(first, second)
    wider = work.changed(data=replace(SMALL.data, batch_size=6))
    assert wider.supply(TaskRun("a", 1)).sample(2).shape == (2, 6, SMALL.data.sequence_length + 1)


@pytest.mark.full
def test_our_tasks_pass_the_check_of_users_tasks() -> None:
    require_trainable(our_work(SMALL, CORPUS))
