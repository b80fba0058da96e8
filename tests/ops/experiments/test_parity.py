"""`bench parity` and `bench mixed`, and the baselines that they compare islands with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import MergeConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import begin
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.batches import TaskRun
from archipelago.ops.experiments import baselines, mixed, parity
from archipelago.ops.experiments.baselines import AllShards, Reader
from archipelago.ops.experiments.mixed import BOTH, JAX, TORCH, rows
from archipelago.ops.experiments.trial import CurvePoint, Trial, TrialRow
from tests import pytorch
from tests.failing import failing
from tests.islands.tasks.task_runs import BATCHES, EXAMPLES, SHARDS
from tests.ops.experiments.trials import record_of, task_work, trial_of
from tests.small import SMALL, compiled


def test_islands_of_a_task_are_compared_at_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "EVALUATIONS", 3)
    found = parity.parity(task_work(), (2,), (4, 12), 1.0)
    assert [(row["islands"], row["interval"]) for row in found["rows"]] == [(2, 4), (2, 12)]
    for row in found["rows"]:
        assert row["tokens"] == pytest.approx(row["islands"] * 48 * 10, rel=0.1)
        assert 0.5 < row["loss"] < 1.0, "the untrained kernel is 1"
        assert 0.5 < row["data_parallel"] < 1.0
        assert row["to_parallel"] == pytest.approx(row["loss"] / row["data_parallel"])
    often, rarely = (row["rounds"] for row in found["rows"])
    assert often > 2 * rarely > 2
    assert found["unit"] == "loss units"
    (ours,), (parallel,) = (found["curves"][name] for name in ("2 islands, H = 4", "data-parallel, 2× batch"))
    assert len(ours) == len(parallel) == 4


def test_a_negative_loss_has_no_ratios_and_the_interval_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = {"islands": -1.0, "parallel": -2.0}

    def measured(trial: Trial, work: Any) -> dict[str, Any]:
        curve = [[0, 0.0], [1000, losses[trial.kind]]]
        return {**record_of(trial, losses[trial.kind]), "curve": curve, "rounds": 7, "per_round": 2.0}

    monkeypatch.setattr(parity, "measure", measured)
    (row,) = parity.parity(task_work(), (2,), (), 1.0)["rows"]
    assert (row["interval"], row["rounds"]) == (4, 7)
    assert row["to_parallel"] != row["to_parallel"], "it is not a number"
    assert row["loss"] > row["data_parallel"]


def test_what_cannot_be_compared_is_refused() -> None:
    with failing(ConfigError, "task.evaluate"):
        parity.parity(task_work(evaluate=None), (2,), (), 1.0)


# -- bench mixed ------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    losses = {JAX: (2.0, 4.0), TORCH: (1.0, 4.0), BOTH: (3.0, 2.0)}
    arms = {
        name: TrialRow({}, tuple(record_of(trial_of(seed=seed), loss) for seed, loss in enumerate(each)))
        for name, each in losses.items()
    }
    one, other, both = rows(arms)
    assert (one["to_jax"], other["to_jax"], both["to_jax"]) == (1.0, 0.75, 1.0)
    assert (one["to_pytorch"], other["to_pytorch"], both["to_pytorch"]) == (1.5, 1.0, 1.75)
    assert (both["bits_per_byte"], both["spread"]) == (2.5, pytest.approx(0.5**0.5))


@pytest.mark.full
def test_short_runs_end_alike(corpus: OpenCorpus) -> None:
    pytorch.required("transformers")
    with failing(ConfigError, "config.value"):
        no_llama = dataclasses.replace(SMALL.model, size="tiny-moe")
        mixed.compared(RunConfig(model=no_llama), corpus, 2, (0,))
    averaged = dataclasses.replace(SMALL, merge=MergeConfig("average", "average"))  # little to compile
    found = mixed.compared(averaged, corpus, 2, (3,))
    json.dumps(found)
    one, other, both = found["rows"]
    assert one["tokens"] == other["tokens"] == both["tokens"] > 0
    # Only rounding differs, which the merges amplify. Without clipping, the loss would be 1 % higher.
    assert both["to_jax"] == pytest.approx(1.0, abs=0.005)
    assert both["to_pytorch"] == pytest.approx(1.0, abs=0.005)
    first, *_, last = (loss for _, loss in found["curves"][BOTH][0])
    assert last < 0.8 * first


@pytest.mark.full
def test_a_llama_makes_the_steps_of_our_worker(corpus: OpenCorpus) -> None:
    torch = pytorch.required()
    pytorch.required("transformers")
    from archipelago.ops.experiments.both_frameworks import LlamaTraining, SeededBatches

    def batches() -> SeededBatches:
        return SeededBatches(corpus.train, SMALL, lambda: None, 1)

    training, first = LlamaTraining(SMALL, batches()), build(SMALL.model).init(0)
    named = training.parameters.named()
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(torch.tensor(np.asarray(first[name])))
    made = [training.step(step) for step in range(8)]
    state = begin(SMALL.inner, first)
    tokens = batches().next(8)
    state, losses = compiled(SMALL)(state, jnp.asarray(tokens), jnp.int32(0))
    assert [loss for _, loss in made] == pytest.approx(np.asarray(losses).tolist(), rel=1e-5)
    assert sum(count for count, _ in made) == tokens[..., 1:].size
    for name, tensor in named.items():
        np.testing.assert_allclose(tensor.detach().numpy(), np.asarray(state.params[name]), atol=1e-5, err_msg=name)


# -- baselines --------------------------------------------------------------------------------------------------------


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


def test_the_curve_is_written(tmp_path: Path) -> None:
    path, tokens = tmp_path / "curve.json", 320
    assert baselines.write_curve(task_work(), tokens, path) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["tokens"], found["curve"][-1][0]) == (tokens, tokens)
    assert found["curve"][-1][1] < found["curve"][0][1]
