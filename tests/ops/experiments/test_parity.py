"""`bench parity`, and the baselines that they compare islands with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from archipelago.broker.config import InnerConfig, MergeConfig, RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.manifest import NO_CORPUS
from archipelago.broker.observe.losses import loss_unit
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.inner import begin
from archipelago.islands.models.registry import build
from archipelago.islands.tasks.batches import TaskRun
from archipelago.islands.tasks.ours import our_work
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.bench.output import table
from archipelago.ops.experiments import baselines, parity, study
from archipelago.ops.experiments import trial as trials
from archipelago.ops.experiments.baselines import AllShards, Reader
from archipelago.ops.experiments.parity import ARMS, ArmName, ParityOptions
from archipelago.ops.experiments.trial import CurvePoint, Progress, Record, Trial
from archipelago.ops.experiments.virtual_time import VirtualRun, paces
from tests import pytorch
from tests.failing import failing
from tests.islands.tasks.task_runs import BATCHES, EXAMPLES, SHARDS
from tests.ops.experiments.trials import record_of, task_work
from tests.small import SMALL, compiled


def options_of(folder: Path, *trials: ArmName, **named: Any) -> ParityOptions:
    return ParityOptions(output=folder, trials=trials, **{"islands": (2,), **named})


def curves_in(folder: Path) -> list[list[tuple[int, float]]]:
    """Return the curve of each trial that has ended, in their order."""
    return [record["curve"] for path in folder.glob("parity/*.jsonl") for record in study.records(path)]


@pytest.mark.full
def test_islands_of_a_task_are_compared_at_equal_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baselines, "EVALUATIONS", 3)
    found = parity.parity(task_work(), options_of(tmp_path, intervals=(4, 12)))
    parallel, *rows = found["rows"]
    assert [(row["trial"], row["interval"]) for row in rows] == [("islands", 4), ("islands", 12)]
    for row in rows:
        assert row["tokens"] == pytest.approx(row["islands"] * 48 * 10, rel=0.1)
        assert 0.5 < row["loss"] < 1.0, "the untrained kernel is 1"
        assert row["to_parallel"] == pytest.approx(row["loss"] / parallel["loss"])
    assert parallel["to_parallel"] == 1.0
    often, rarely = (row["rounds"] for row in rows)
    assert often > 2 * rarely > 2
    assert found["unit"] == "loss units"
    assert [len(curve) for curve in curves_in(tmp_path)] == [4, 4, 4]
    said = capsys.readouterr().err
    assert [said.count(share) for share in (" 0%", "33%", "67%", "100%")] == [3] * 4, "of each trial"


def test_trials_are_run_in_parts_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"islands": -1.0, "parallel": -2.0}
    measured: list[Trial] = []

    def fake(trial: Trial, work: Any, progress: Callable[[Record], None]) -> dict[str, Any]:
        measured.append(trial)
        progress({"share": 1.0, "curve": [[1000, losses[trial.kind]]]})
        curve = [[0, 0.0], [1000, losses[trial.kind]]]
        return {**record_of(trial, losses[trial.kind]), "curve": curve, "rounds": 7, "per_round": 2.0}

    monkeypatch.setattr(study, "measure", fake)
    work = task_work()
    (first,) = parity.parity(work, options_of(tmp_path, "islands"))["rows"]
    assert (first["interval"], first["rounds"], "to_parallel" in first) == (4, 7, False)
    said = capsys.readouterr().err
    assert "earlier calls" not in said
    assert "loss units after 1,000 tokens" in said, "a trial takes long, and says its loss so far"
    both = parity.parity(work, options_of(tmp_path))
    assert "1 of 2 results are of earlier calls" in capsys.readouterr().err
    assert [trial.kind for trial in measured] == ["islands", "parallel"]
    parallel, islands = both["rows"]
    assert (both["left"], islands["loss"]) == (0, first["loss"])
    assert islands["to_parallel"] != islands["to_parallel"], "negative losses have no ratio"
    assert islands["loss"] > parallel["loss"]
    later = parity.parity(work, options_of(tmp_path, "rda", "parallel", minutes=0.0))
    assert ([row["trial"] for row in later["rows"]], later["left"]) == (["parallel"], 1)
    assert parity.parity(work.changed(seed=7), options_of(tmp_path, minutes=0.0))["left"] == 2, "another run"


def test_a_trial_that_is_cut_is_compared_at_its_tokens_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, now, more = {"parallel": [8.0, 4.0, 3.0, 2.0], "islands": [8.0, 5.0, 4.0, 2.5]}, [0.0], [20]

    def played(trial: Trial, work: Any, note: Progress) -> dict[str, Any]:
        for number, loss in enumerate(losses[trial.kind]):
            now[0] += 25.0
            tokens = 1000 * number + more[0] * (trial.kind == "islands")
            if tokens == 2100:
                raise KeyboardInterrupt
            note(CurvePoint(tokens, loss, share=number / 3))
        return {}

    def cut(minutes: float) -> dict[str, Any]:
        found = parity.parity(work, options_of(tmp_path, minutes=minutes))
        first, last = found["rows"]
        assert (first["done"], first["to_parallel"], found["left"]) == (1.0, 1.0, 1)
        return {**last}

    work = task_work()
    monkeypatch.setattr(trials, "_played", played)
    monkeypatch.setattr(parity, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert "done" not in parity.parity(work, options_of(tmp_path, "parallel"))["rows"][0]
    by_time = cut(minutes=1.0)
    assert (by_time["done"], by_time["tokens"]) == (pytest.approx(2 / 3), 2020)
    assert by_time["to_parallel"] == pytest.approx(4 / 3)
    more[0] = 100
    with pytest.raises(KeyboardInterrupt):
        parity.parity(work, options_of(tmp_path))
    by_signal = cut(minutes=0.0)
    assert (by_signal["done"], by_signal["tokens"]) == (pytest.approx(1 / 3), 1100)
    assert by_signal["to_parallel"] != by_signal["to_parallel"], "the other one has no evaluation at 1,100 tokens"
    more[0] = 0
    found = parity.parity(work, options_of(tmp_path, minutes=1.5))
    assert (found["left"], found["rows"][1]["tokens"], "done" in found["rows"][1]) == (0, 3000, False)
    assert not list(tmp_path.rglob("*.unfinished/*"))


def test_what_was_begun_with_several_seeds_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        study, "measure", lambda trial, work, progress: {**record_of(trial, 2.0 + trial.seed), "curve": []}
    )
    work = task_work()
    parity.parity(work, options_of(tmp_path, seeds=(0, 1), islands=(2,)))
    monkeypatch.setattr(parity, "trainable", lambda config, task: work)
    stopped = options_of(tmp_path, "parallel", "islands", seeds=(0, 1, 2), islands=(2, 3), minutes=0.0)
    assert parity.main(stopped) == 0
    parity.parity(work, options_of(tmp_path, "parallel", seeds=(0,), islands=(3,)))
    rows = parity.parity(work, stopped)["rows"]
    assert [(row["trial"], row["islands"]) for row in rows] == [("parallel", 2), ("parallel", 3), ("islands", 2)]
    assert [row["spread"] > 0 for row in rows] == [True, False, True]
    assert len(table(rows, 100).columns) == len(rows[0])
    assert parity.main(options_of(tmp_path, "rda", minutes=0.0)) == 0, "there is no result yet"


def test_a_length_that_is_given_counts_although_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_steps, without = tmp_path / "with.toml", tmp_path / "without.toml"
    with_steps.write_text(f"[inner]\nsteps = {InnerConfig().steps}\n")
    without.write_text("seed = 1\n[inner]\nwarmup_steps = 4\n")
    work, lengths = task_work().changed(inner=InnerConfig()), list[int]()

    def fake(work: Workload, options: ParityOptions) -> dict[str, Any]:
        lengths.append(work.config.inner.steps)
        return {"rows": []}

    monkeypatch.setattr(parity, "trainable", lambda config, task: work)
    monkeypatch.setattr(parity, "parity", fake)
    for words, path in (([], None), ([], without), ([], with_steps), (["--inner.steps", "0"], None)):
        monkeypatch.setattr("sys.argv", ["archipelago", "bench", "parity", *words])
        parity.main(options_of(tmp_path, config=path))
    short, default = parity.SYNCS * RunConfig().sync.interval, InnerConfig().steps
    assert lengths == [short, short, default, default]


def test_each_trial_changes_what_its_name_says(corpus: OpenCorpus, tmp_path: Path) -> None:
    plan = parity._planned(our_work(SMALL, corpus), options_of(tmp_path, *ARMS))
    changed = {place.arm: trial.config for place, trial in plan}
    assert changed["islands"] == SMALL
    assert (changed["parallel"].inner, changed["parallel"].model) == (SMALL.inner, SMALL.model)
    outer = changed["muon-0.6"].outer
    assert (changed["muon-0.6"].inner.optimizer, outer.rule, outer.momentum) == ("muon", "nesterov", 0.6)
    assert (changed["isoloco"].outer.momentum, changed["isoloco"].outer.learning_rate) == (0.8, 1.8)
    assert {config.model.compute_dtype for name, config in changed.items() if "frameworks" in ARMS[name]} == {"float32"}


def test_islands_are_compared_with_islands_of_their_own_interval() -> None:
    def record(loss: float) -> dict[str, Any]:
        return {"seed": 0, "bits_per_byte": loss, "tokens": 1000, "diverged": False, "curve": [[1000, loss]]}

    intervals, losses = (12, 48, 12, 48, 24), (2.0, 3.0, 2.0, 3.0, 4.0)
    names: tuple[ArmName, ...] = ("jax", "jax", "jax-pytorch", "jax-pytorch", "parallel")
    seen = {
        parity.Place(name, 2, interval): [record(loss)]
        for name, interval, loss in zip(names, intervals, losses, strict=True)
    }
    rows = [parity._row(place, records, seen, loss_unit(NO_CORPUS), []) for place, records in seen.items()]
    assert [row["to_jax"] for row in rows[:4]] == [1.0] * 4
    assert [row["to_parallel"] for row in rows] == [0.5, 0.75, 0.5, 0.75, 1.0], "which has no interval"


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with failing(ConfigError, "task.evaluate"):
        parity.parity(task_work(evaluate=None), options_of(tmp_path))
    with failing(ConfigError, "config.value"):
        parity.parity(task_work(), options_of(tmp_path, "pytorch"))
    with failing(ConfigError, "config.value") as refused:
        parity.parity(task_work(), options_of(tmp_path, intervals=(4, 0)))
    assert "the settings of a trial cannot be used: sync.interval" in str(refused.value)
    assert not list(tmp_path.rglob("*.jsonl")), "nothing was trained"


# -- both frameworks --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_short_runs_in_both_frameworks_end_alike(corpus: OpenCorpus, tmp_path: Path) -> None:
    pytorch.required("transformers")
    trials: tuple[ArmName, ...] = ("jax", "pytorch", "jax-pytorch")
    no_llama = dataclasses.replace(SMALL.model, size="tiny-moe")
    with failing(ConfigError, "config.value"):
        parity.parity(our_work(dataclasses.replace(SMALL, model=no_llama), corpus), options_of(tmp_path, *trials))
    short = dataclasses.replace(SMALL.inner, steps=24)
    average = MergeConfig("average", "average")  # little to compile
    averaged = dataclasses.replace(SMALL, inner=short, merge=average, seed=3)
    found = parity.parity(our_work(averaged, corpus), options_of(tmp_path, *trials))
    json.dumps(found)
    one, other, both = found["rows"]
    assert one["tokens"] == other["tokens"] == both["tokens"] > 0
    # Only rounding differs, which the merges amplify. Without clipping, the loss would be 1 % higher.
    assert both["to_jax"] == pytest.approx(1.0, abs=0.005)
    assert both["to_pytorch"] == pytest.approx(1.0, abs=0.005)
    first, *_, last = (loss for _, loss in curves_in(tmp_path)[2])
    assert last < 0.8 * first


def test_islands_in_any_framework_may_be_slow(corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    pytorch.required("transformers")
    from archipelago.ops.experiments import both_frameworks

    made = list[list[float]]()
    monkeypatch.setattr(VirtualRun, "__init__", lambda run, work, seconds: made.append(seconds))
    monkeypatch.setattr(both_frameworks, "play", lambda run, point, note: run)
    monkeypatch.setattr(both_frameworks, "figures", lambda run: {"rounds": 7})
    trial = Trial.of({}, islands=3, slow=4.0, frameworks="jax")
    assert both_frameworks.played(trial, our_work(SMALL, corpus), list[CurvePoint]().append) == {"rounds": 7}
    assert made == [paces(3, 4.0, 1)]


@pytest.mark.full
def test_a_llama_makes_the_steps_of_our_worker(corpus: OpenCorpus) -> None:
    torch = pytorch.required()
    pytorch.required("transformers")
    from archipelago.ops.experiments.both_frameworks import LlamaTraining

    def batches() -> Batches:
        return Batches(corpus.train, SMALL, lambda: None, 1)

    training, first = LlamaTraining(SMALL, batches()), build(SMALL.model).init(0)
    named = training.parameters.named()
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(torch.tensor(np.asarray(first[name])))
    made = [training.step(step) for step in range(8)]
    state = begin(SMALL.inner, first)
    tokens = batches().next(8)
    state, losses = compiled(SMALL)(state, jnp.asarray(tokens), jnp.int32(0), jnp.int32(SMALL.inner.steps))
    assert [loss for _, loss in made] == pytest.approx(np.asarray(losses).tolist(), rel=1e-5)
    assert sum(count for count, _ in made) == tokens[..., 1:].size
    for name, tensor in named.items():
        np.testing.assert_allclose(tensor.detach().numpy(), np.asarray(state.params[name]), atol=1e-5, err_msg=name)


# -- baselines --------------------------------------------------------------------------------------------------------


def trained(work: Workload, workers: int) -> list[CurvePoint]:
    points: list[CurvePoint] = []
    baselines.train(work, workers, 8, points.append)
    return points


def test_data_parallel_takes_the_mean_of_the_gradients() -> None:
    """Two workers with the halves of a batch make the steps of one with the whole batch."""

    def wholes(run: TaskRun) -> Iterator[dict[str, Any]]:
        for shard in run.shards(SHARDS):
            for number in range(0, BATCHES, 2):
                yield {"x": EXAMPLES[shard.number, number : number + 2].reshape(4, 3)}

    two = trained(task_work(), 2)
    one = trained(task_work(batches=wholes, tokens=20), 1)
    assert two[-1].tokens == one[-1].tokens
    assert (two[0].share, two[-1].share) == (0.0, 1.0)
    assert two[-1].bits_per_byte < two[0].bits_per_byte
    assert two[-1].bits_per_byte == pytest.approx(one[-1].bits_per_byte, rel=1e-5)


def test_data_parallel_reads_as_many_tokens_as_the_islands_whatever_their_steps() -> None:
    work = task_work()
    reader = Reader(work)
    reader.next(1)
    for steps in (1, 7, 15, 24):
        points: list[CurvePoint] = []
        baselines.train(work, 2, steps, points.append)
        assert points[-1].tokens == 2 * steps * reader.tokens, steps
        assert points[-1].share == 1.0


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
