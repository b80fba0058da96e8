"""The baselines of islands: their arithmetic, the data that they read, and the process that `up` starts to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.config import RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.tasks.batches import TaskRun
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments.baselines import AllShards, Reader
from archipelago.ops.experiments.single_process import SingleProcessOptions, run
from archipelago.ops.experiments.trial import CurvePoint
from tests.islands.tasks.task_runs import BATCHES, EXAMPLES, SHARDS
from tests.ops.experiments.trials import task_work
from tests.small import SMALL


@pytest.fixture
def config() -> RunConfig:
    return replace(
        SMALL, data=replace(SMALL.data, corpus="small-text"), inner=replace(SMALL.inner, steps=24, warmup_steps=4)
    )


def quiet(_: CurvePoint) -> None:
    pass


def test_data_parallel_takes_the_mean_of_the_gradients() -> None:
    """Two workers with the halves of a batch make the steps of one with the whole batch."""

    def wholes(run: TaskRun) -> Iterator[dict[str, Any]]:
        for shard in run.shards(SHARDS):
            for number in range(0, BATCHES, 2):
                yield {"x": EXAMPLES[shard.number, number : number + 2].reshape(4, 3)}

    two = baselines.data_parallel(task_work(), 2, quiet, 8)
    one = baselines.data_parallel(task_work(batches=wholes, tokens=20), 1, quiet, 8)
    assert two[-1].tokens == one[-1].tokens
    assert two[-1].bits_per_byte < two[0].bits_per_byte
    assert two[-1].bits_per_byte == pytest.approx(one[-1].bits_per_byte, rel=1e-5)


def test_a_reader_without_a_run_reads_all_shards_pass_after_pass() -> None:
    leases = AllShards()
    leases.offer(["b", "a"])
    places = [place for _ in range(4) if (place := leases.lease())]
    assert [(place.range, place.pass_number) for place in places] == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]
    reader = Reader(task_work())
    reader.next(3 * SHARDS * BATCHES)
    assert reader.tokens == 3 * SHARDS * BATCHES * 10


def test_the_curve_is_written(config: RunConfig, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(work: Any, tokens: int, progress: Any, params: Any) -> list[CurvePoint]:
        points = [CurvePoint(0, 8.0), CurvePoint(tokens, 2.0)]
        for point in points:
            progress(point)
        return points

    monkeypatch.setattr(baselines, "one_process", trained)
    assert run(SingleProcessOptions(tokens=640, output=Path("curve.json"), settings=config)) == 0
    assert json.loads(Path("curve.json").read_text(encoding="utf-8")) == {
        "tokens": 640,
        "curve": [[0, 8.0], [640, 2.0]],
    }
