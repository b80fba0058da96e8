"""The results of a study: rows, ratios and the table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments.results import TrialRow, baseline, grouped, show
from archipelago.ops.experiments.trial import Trial
from tests.ops.experiments.trials import STUDY, record_of, trial_of


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
    assert ours.ratios(parallel) == [1.0, 1.1]


def test_the_baseline_is_the_best_with_as_many_islands_and_tokens() -> None:
    rows = results(
        (trial_of("parallel", inner__learning_rate=1e-3), 2.0, 1000),
        (trial_of("parallel", inner__learning_rate=2e-3), 1.9, 1000),
        (trial_of("parallel", inner__learning_rate=9.0), None, 1000),
        (trial_of("parallel", islands=4), 1.0, 1000),
        (trial_of("parallel", inner__steps=99), 1.0, 3000),
        (trial_of(), 2.1, 1010),
    )
    found = baseline(rows[-1], rows)
    assert found is not None
    assert found.settings["inner.learning_rate"] == 2e-3


def test_a_row_with_scores_is_compared_with_data_parallel_where_no_row_is_without() -> None:
    parallel, scored = results((trial_of("parallel"), 2.0, 1000), (trial_of(merge__scores=True), 2.1, 1000))
    assert baseline(scored, [parallel, scored]) is parallel


def test_a_row_with_a_diverged_seed_has_no_mean() -> None:
    (row,) = results((trial_of(seed=0), 2.0, 1000), (trial_of(seed=1), None, 500))
    assert (row.diverged, row.losses, row.mean) == (1, {}, math.inf)


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
    assert "1 diverged" in capsys.readouterr().out
