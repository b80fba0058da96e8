"""Trials: their identity, what is refused, records of real runs, results, and hostile islands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import MergeConfig
from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.wire import digest, pack, unpack
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments import trial as trials
from archipelago.ops.experiments.island_runs import CLAIMED, FORGERIES, LITTLE, HostileClient, Public, figures, islands
from archipelago.ops.experiments.study import baseline, show
from archipelago.ops.experiments.trial import ATTACKS, CurvePoint, Trial, TrialRow, grouped, key_of, measure
from tests import samples
from tests.failing import failing
from tests.ops.experiments.trials import STUDY, record_of, task_work, trial_of


def test_baselines_ignore_settings_that_they_do_not_read() -> None:
    settings = {"outer.rule": "nesterov", "sync.interval": 6, "inner.steps": 9}
    keys = {kind: dict(Trial.of(settings, kind=kind, slow=3.0).settings) for kind in trials.KINDS}
    assert keys["islands"] == settings
    assert keys["parallel"] == keys["one"] == {"inner.steps": 9}
    assert Trial.of(settings, kind="parallel", slow=3.0).slow == 3.0, "it has as many tokens as the islands"


@given(st.sampled_from(trials.KINDS), st.integers(1, 64), st.floats(1, 100), st.integers(0, 99))
def test_a_record_has_the_key_of_its_trial_also_after_json(kind: str, islands: int, slow: float, seed: int) -> None:
    found = trial_of(kind, islands, seed, slow, inner__learning_rate=3e-3, outer__rule="sgd")
    assert key_of(json.loads(json.dumps(record_of(found)))) == found.key


def test_several_islands_can_be_slow() -> None:
    settings = {"inner.steps": 24}
    assert trials.work_of(trial_of(islands=4)) == 4.0
    assert trials.work_of(trial_of(islands=4, slow=4.0)) == 3.25
    half = Trial.of(settings, slow=3.0, slowed=2)
    assert trials.work_of(half) == pytest.approx(2 + 2 / 3)
    assert half.key != Trial.of(settings, slow=3.0).key
    assert Trial.of(settings, slowed=2) == Trial.of(settings)


def test_combinations_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"islands": "4"},
        {"slow": 3.0, "slowed": 0},
        {"slow": 3.0, "slowed": 4},
        {"hostile": 1, "attack": "none"},
        {"hostile": 4, "attack": "flip"},
        {"hostile": -1, "attack": "flip"},
        {"frameworks": "jax", "hostile": 1, "attack": "flip"},
        {"frameworks": "pytorch", "apart": True},
        {"frameworks": "jax", "sending": 2.0},
    ]
    for values in wrong:
        with failing(ConfigError, "study.trial"):
            Trial.of({}, **values)


def test_a_run_that_diverges_is_a_result(corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for last in (None, math.nan, 9.0):  # It raises an error, ends without a number, or is worse than untrained.

        def diverges(trial: Trial, work: Any, note: Any, last: float | None = last) -> dict[str, Any]:
            note(CurvePoint(0, 8.0))
            if last is None:
                raise DivergedError("the loss is no number")
            note(CurvePoint(10, last))
            return {}

        monkeypatch.setattr("archipelago.ops.experiments.trial._played", diverges)
        found = measure(trial_of(data__corpus="small-text"))
        assert (found["diverged"], found["bits_per_byte"]) == (True, None), last
        assert found["provenance"]["versions"].keys() >= {"jax"}
        json.dumps(found, allow_nan=False)


@pytest.mark.full
def test_late_contributions_are_merged_stale() -> None:
    work = task_work().changed(merge=MergeConfig("average", "average"))
    points: list[CurvePoint] = []
    late = figures(islands(work, Trial.of({}, islands=3, sending=9.0), points.append))
    assert late["staleness_max"] >= 2, "more than an interval passes"


# -- results ----------------------------------------------------------------------------------------------------------


def results(*losses: tuple[Trial, float | None, int]) -> list[TrialRow]:
    return grouped(record_of(one, loss, tokens) for one, loss, tokens in losses)


def test_rows_are_means_over_seeds_and_ratios_are_taken_seed_by_seed() -> None:
    rows = results(
        (trial_of("parallel", seed=0), 2.0, 1000),
        (trial_of("parallel", seed=1), 4.0, 1000),
        (trial_of(seed=1), 4.4, 990),
        (trial_of(seed=0), 2.0, 990),
    )
    parallel, ours = rows
    assert (ours.mean, list(ours.losses)) == (3.2, [0, 1])
    assert baseline(ours, rows) is parallel
    assert ours.ratio(parallel) == pytest.approx((1.0 + 1.1) / 2)


def test_the_baseline_is_the_best_with_as_many_islands_and_tokens() -> None:
    rows = results(
        (trial_of("parallel", inner__learning_rate=1e-3), 2.0, 1000),
        (trial_of("parallel", inner__learning_rate=2e-3), 1.9, 1000),
        (trial_of("parallel", inner__learning_rate=9.0), None, 1000),
        (trial_of("parallel", islands=4), 1.0, 1000),
        (trial_of("parallel", inner__steps=99), 1.0, 3000),
        (trial_of("parallel", model__size="small"), 1.0, 1000),
        (trial_of(), 2.1, 1010),
    )
    found = baseline(rows[-1], rows)
    assert found is not None
    assert found.settings["inner.learning_rate"] == 2e-3


def test_a_row_with_scores_is_compared_with_data_parallel_where_no_row_is_without() -> None:
    parallel, scored = results((trial_of("parallel"), 2.0, 1000), (trial_of(merge__scores=True), 2.1, 1000))
    assert baseline(scored, [parallel, scored]) is parallel


def test_the_test_text_has_its_own_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = studies.load(folder, "rates")
    losses = {"parallel": (2.0, 3.0), "islands": (2.2, 3.6)}
    known = {
        t.key: {**record_of(t, losses[t.kind][0]), "test": losses[t.kind][1]} for t in study.trials if t.kind in losses
    }
    rows = show(study, known)["rows"]
    found = {r["kind"]: (r["to_parallel"], r["to_parallel_on_test"]) for r in rows if r["islands"] == 2}
    assert found == {"parallel": (1.0, 1.0), "islands": (pytest.approx(1.1), pytest.approx(1.2))}
    assert "1.2000" in capsys.readouterr().out


def test_an_unfinished_study_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rates.toml").write_text(STUDY.replace("islands = 2\n", "islands = [2, 4]\n"), encoding="utf-8")
    study = studies.load(folder, "rates")
    assert show(study, {})["rows"] == []
    known = {t.key: record_of(t, None if t.islands == 4 and t.kind == "islands" else 2.0) for t in study.trials}
    assert [row["diverged"] for row in show(study, known)["rows"]].count(1) == 2
    assert "inf" in capsys.readouterr().out


# -- hostile islands --------------------------------------------------------------------------------------------------


def test_a_forgery_has_a_header_that_fits_it() -> None:
    assert set(ATTACKS) == FORGERIES.keys() | LITTLE.keys(), "studies and forgeries name the same attacks"
    manifest = samples.manifest()
    delta_N = np.random.default_rng(0).standard_normal(manifest.sizes[0], np.float32)
    payload = pack(delta_N, "float32", 1)
    for attack in ATTACKS:
        transport = MemoryBroker().connect("sample")
        transport.create(manifest, samples.first_snapshots(manifest))
        client = HostileClient(transport.island, manifest, attack, 7, {0: {"b": delta_N, "c": 3 * delta_N}})
        client.publish(samples.contribution(payload), payload)
        (delivery,) = transport.merger.updates(0.0)
        found = delivery.with_payload()
        assert found.contribution is not None
        assert (found.contribution.digest, found.contribution.bytes) == (digest(found.payload), len(found.payload))
        assert found.contribution.tokens == 100 * (CLAIMED if attack in LITTLE else 1), attack
        sent_N = unpack(found.payload, manifest.sizes[0])
        factor = {"flip": -1, "scale": 3, "labels": 1, "stale": -1}.get(attack)
        if factor is not None:
            np.testing.assert_array_equal(sent_N, factor * delta_N, attack)
        elif attack in LITTLE:  # the mean is twice, and the deviation once what b sends
            np.testing.assert_allclose(sent_N, 2 * delta_N - LITTLE[attack] * np.abs(delta_N), rtol=1e-5, atol=1e-6)
        else:
            assert not np.allclose(sent_N, delta_N), attack
            assert np.linalg.norm(sent_N) == pytest.approx(np.linalg.norm(delta_N), rel=1e-5), attack


def test_what_honest_islands_send_is_noted_for_the_hostile_ones() -> None:
    manifest, public = samples.manifest(), Public()
    transport = MemoryBroker().connect("sample")
    transport.create(manifest, samples.first_snapshots(manifest))
    delta_N = np.random.default_rng(0).standard_normal(manifest.sizes[0], np.float32)
    payload = pack(delta_N, "float32", 1)
    HostileClient(transport.island, manifest, "", 7, public).publish(samples.contribution(payload), payload)
    np.testing.assert_array_equal(public[0]["a"], delta_N)
    assert transport.merger.updates(0.0)[0].contribution == samples.contribution(payload)


def test_a_row_is_compared_with_the_run_without_its_hostile_islands() -> None:
    def record(loss: float, islands: int = 4, attack: str = "", scores: bool = True) -> dict[str, Any]:
        trial = Trial.of({"merge.scores": scores}, islands=islands, hostile=int(bool(attack)), attack=attack)
        return record_of(trial, loss) | {"hostile": trial.hostile, "attack": attack}

    rows = grouped([
        record(2.02, attack="flip"), record(2.4, attack="flip", scores=False), record(2.2), record(2.2, scores=False),
        record(2.0, islands=3, scores=False),
    ])  # fmt: skip
    assert [row.ratio(baseline(row, rows)) for row in rows[:3]] == pytest.approx([1.01, 1.2, 1.0])
    assert all(math.isnan(row.ratio(baseline(row, rows))) for row in rows[3:])
