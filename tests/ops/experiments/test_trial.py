"""Trials: their identity, what is refused, and the records of real runs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments import trial as trials
from archipelago.ops.experiments.trial import CurvePoint, Trial, key_of, measure
from tests.failing import failing
from tests.ops.conftest import prepare_small_text
from tests.ops.experiments.trials import BASE, STUDY, record_of, trial_of


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


def test_a_record_that_leaves_out_defaults_has_the_key_of_its_trial() -> None:
    record = {"kind": "islands", "islands": 4, "slow": 1.0, "seed": 0, "settings": {"inner.steps": 24}}
    assert key_of(record) == Trial.of({"inner.steps": 24}).key
    assert key_of({**record, "chips": 1e6}) == Trial.of({"inner.steps": 24}, chips=1e6).key


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
        {"slow": 3.0, "lockstep": True},
        {"hostile": 1, "attack": "none"},
        {"hostile": 4, "attack": "flip"},
        {"hostile": -1, "attack": "flip"},
    ]
    for values in wrong:
        with failing(ConfigError, "study.trial"):
            Trial.of({}, **values)
    assert not Trial.of({}, kind="parallel", lockstep=True).lockstep


def test_a_run_that_diverges_is_a_result(corpus: OpenCorpus) -> None:
    for last in (None, math.nan, 9.0):  # It raises an error, ends without a number, or is worse than untrained.

        def diverges(trial: Trial, work: Any, note: Any, last: float | None = last) -> dict[str, Any]:
            note(CurvePoint(0, 8.0))
            if last is None:
                raise DivergedError("the loss is no number")
            note(CurvePoint(10, last))
            return {}

        found = measure(trial_of(data__corpus="small-text"), diverges)
        assert (found["diverged"], found["bits_per_byte"]) == (True, None), last
        json.dumps(found, allow_nan=False)


#: Three islands, and what differs from the usual run.
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "sending": {"sending": 30.0},
    "lockstep": {"lockstep": True},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The record of each variant of a small run."""
    folder = tmp_path_factory.mktemp("trials")
    (folder / "base.toml").write_text(BASE, encoding="utf-8")
    (folder / "rates.toml").write_text(STUDY, encoding="utf-8")
    settings = dict(studies.load(folder, "rates").trials[1].settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))
        prepare_small_text(folder)
        found = {name: measure(Trial.of(settings, islands=3, **each)) for name, each in VARIANTS.items()}
    for name, values in VARIANTS.items():
        assert not found[name]["diverged"], name
        assert {key: found[name].get(key) for key in values} == values
        assert not (set(trials.OWN) - set(values) - {"kind", "islands", "slow"}) & set(found[name]), "defaults"
    return found


@pytest.mark.full
def test_contributions_that_are_long_on_their_way_are_merged_stale(measured: dict[str, dict[str, Any]]) -> None:
    assert measured["usual"]["staleness_max"] <= 1
    assert measured["sending"]["staleness_max"] >= 2, "an interval of 12 steps passes twice"
    assert measured["sending"]["per_round"] < measured["usual"]["per_round"]


@pytest.mark.full
def test_islands_in_lockstep_adopt_at_once_what_they_send(measured: dict[str, dict[str, Any]]) -> None:
    found = measured["lockstep"]
    assert (found["staleness_max"], found["per_round"], found["tokens"]) == (0, 3.0, 3 * 24 * 4 * 32)
    assert found["curve"] != measured["usual"]["curve"]
