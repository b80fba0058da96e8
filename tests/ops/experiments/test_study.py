"""Studies: the trials that a file names, and the files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments.study_run import SHIPPED
from tests.failing import failing


def test_a_grid_is_the_product_of_its_lists_with_the_first_seed_first(folder: Path) -> None:
    study = studies.load(folder, "rates")
    said = [(t.kind, t.islands, t.seed, dict(t.settings).get("outer.learning_rate")) for t in study.trials]
    assert said == [
        ("parallel", 2, 0, None),
        ("islands", 2, 0, 0.5),
        ("islands", 2, 0, 1.0),
        ("islands", 4, 0, 0.5),
        ("islands", 4, 0, 1.0),
        ("parallel", 2, 1, None),
    ]
    config = study.trials[1].config
    assert (config.outer.rule, config.outer.learning_rate, config.sync.interval, config.seed) == ("sgd", 0.5, 12, 0)
    assert studies.names(folder) == ["rates"], "a base is not a study"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("grids = 1", "study.unknown-key"),
        ('[[grid]]\nkind = "serial"', "study.kind"),
        ("[[grid]]\nislands = 0", "study.islands"),
        ("[[grid]]\nislands = 4.5", "study.islands"),
        ("[[grid]]\nslow = inf", "study.islands"),
        ("[[grid]]\nslow = 2.0\nslowed = 1.5", "study.slow"),
        ("base = 5\n[[grid]]", "study.unreadable"),
        ("[[grid]]\nseeds = 3", "study.grid"),
        ('base = "nowhere.toml"', "study.unreadable"),
        ("[[grid", "study.not-toml"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(folder: Path, text: str, code: str) -> None:
    (folder / "wrong.toml").write_text(text, encoding="utf-8")
    with failing(ConfigError, code):
        studies.load(folder, "wrong")


@pytest.mark.parametrize("setting", ['"outer.rate" = 1.0', '"outer.learning_rate" = -1.0'])
def test_a_wrong_setting_is_refused_before_anything_runs(folder: Path, setting: str) -> None:
    (folder / "wrong.toml").write_text(f"[[grid]]\n{setting}", encoding="utf-8")
    with pytest.raises(ConfigError):
        studies.load(folder, "wrong")


def test_the_shipped_studies_can_be_loaded() -> None:
    for name in studies.names(SHIPPED):
        study = studies.load(SHIPPED, name)
        assert study.about
        assert len(study.trials) >= 2


def test_only_settings_that_differ_within_a_kind_are_shown() -> None:
    said = [
        {"kind": "parallel", "inner.steps": 5},
        {"kind": "islands", "inner.steps": 5, "outer.rule": "sgd"},
        {"kind": "islands", "inner.steps": 5, "outer.rule": "nesterov"},
    ]
    assert studies.varying(said) == ["outer.rule"]
