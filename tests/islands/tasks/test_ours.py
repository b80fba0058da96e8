"""Our models as tasks: they read the run's shards, and equal settings share a program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from archipelago.islands.data.corpus import OpenCorpus, Splits
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import require_trainable
from archipelago.ops.experiments.baselines import AllShards
from tests.small import SMALL

TEXT = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
CORPUS = OpenCorpus(
    "text", TEXT.size, "0" * 32, "noise", Splits(TEXT.size, 0, 0), train=TEXT, valid=TEXT[:2000], test=TEXT[:0]
)


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
