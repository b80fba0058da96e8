"""What the interval and the number of islands cost a task, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.shards import TaskRun
from archipelago.islands.tasks.workload import Workload, task_config
from archipelago.ops.experiments import baselines, parity, sync_cost
from archipelago.ops.experiments.baselines import AllShards, Point, Reader
from tests.failing import failing
from tests.islands.tasks.task_runs import BATCHES, CONFIG, SHARDS, TASK, file_of
from tests.small import SMALL

SHORT = replace(CONFIG, inner=replace(CONFIG.inner, steps=48))


def kernel(params: dict[str, Any]) -> float:
    """Return how large the kernel is. It is 1 before any training, and best at 0."""
    return float(abs(params["layers"][0]["kernel"]).mean())


def work_of(**changes: Any) -> Workload:
    file = file_of(replace(TASK, **{"evaluate": kernel} | changes))
    return Workload.of(file, task_config(SHORT, file))


def test_islands_of_a_task_are_compared_at_equal_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "EVALUATIONS", 3)
    said: list[str] = []
    found = sync_cost.sync_cost(work_of(), (1, 2), (4, 12), 1.0, tmp_path, said.append)
    assert [(row["islands"], row["interval"]) for row in found["rows"]] == [(1, 4), (1, 12), (2, 4), (2, 12)]
    for row in found["rows"]:
        assert row["tokens"] == pytest.approx(row["islands"] * 48 * 10, rel=0.1)
        assert 0.5 < row["loss"] < 1.0, "the untrained kernel is 1"
        assert 0.5 < row["data_parallel"] < 1.0
        assert row["to_parallel"] == pytest.approx(row["loss"] / row["data_parallel"])
    often, rarely = (row["rounds"] for row in found["rows"][2:])
    assert often > 2 * rarely > 2
    assert found["unit"] == "loss units"
    assert len(found["curves"]["2 islands, H = 4"]) == len(found["curves"]["data-parallel, 2× batch"]) == 4
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert len(said) == 6


def test_a_negative_loss_has_no_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_at(loss: float) -> list[Point]:
        return [Point(0, 0.0), Point(100, loss / 2), Point(200, loss)]

    monkeypatch.setattr(sync_cost, "islands", lambda *_: (ends_at(-1.0), None))
    monkeypatch.setattr(sync_cost, "participation", lambda run: (7, 2.0))
    monkeypatch.setattr(sync_cost, "data_parallel", lambda *_: ends_at(-2.0))
    found = sync_cost.sync_cost(work_of(), (2,), (), 1.0, tmp_path, lambda _: None)
    (row,) = found["rows"]
    assert (row["interval"], row["rounds"]) == (4, 7)
    assert row["to_parallel"] != row["to_parallel"], "it is not a number"
    assert row["loss"] > row["data_parallel"]


def test_a_task_without_an_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    with failing(ConfigError, "task.evaluate"):
        sync_cost.sync_cost(work_of(evaluate=None), (2,), (), 1.0, tmp_path, lambda _: None)


def test_intervals_of_our_models_are_compared_without_tuning(
    corpus: OpenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: RunConfig = replace(SMALL, data=replace(SMALL.data, corpus="small-text"))
    with failing(ConfigError, "parity.tune"):
        parity.main(parity.ParityOptions(intervals=(12, 24), tune=True, settings=settings))
    asked: list[Any] = []

    def compared(*args: Any) -> dict[str, Any]:
        asked.append(args)
        return {"rows": [{"islands": 3}]}

    monkeypatch.setattr(sync_cost, "sync_cost", compared)
    options = parity.ParityOptions(output=tmp_path, intervals=(12, 24), quick=True, settings=settings)
    assert parity.main(options) == 0
    ((work, counts, intervals, *_),) = asked
    assert (counts, intervals, work.config.inner.steps) == ((3,), (12, 24), 400)


def test_readers_without_a_run_share_all_shards() -> None:
    """They go on with the next pass, and never read one without a lease."""
    readers = [TaskRun(f"r{number}", number, 0, AllShards(number, 3)).shards(SHARDS) for number in range(3)]
    once = [next(readers[number % 3]) for number in range(SHARDS)]
    assert sorted(shard.number for shard in once) == list(range(SHARDS))
    assert {shard.pass_number for shard in once} == {0}
    reader = Reader(work_of())
    reader.next(3 * SHARDS * BATCHES)
    assert reader.tokens == 3 * SHARDS * BATCHES * 10


def test_data_parallel_takes_the_mean_of_the_gradients(corpus: OpenCorpus) -> None:
    """Two workers with the halves of a batch make the step of one with the whole batch."""
    config = replace(SMALL, inner=replace(SMALL.inner, steps=8))
    whole = replace(config, data=replace(config.data, batch_size=2 * config.data.batch_size))
    two = baselines.data_parallel(our_work(config, corpus), 2, lambda _: None)
    one = baselines.data_parallel(our_work(whole, corpus), 1, lambda _: None)
    assert two[-1].tokens == one[-1].tokens
    assert two[-1].bits_per_byte == pytest.approx(one[-1].bits_per_byte, rel=1e-4)
