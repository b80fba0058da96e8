"""Trials: their identity, and the records of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError, DivergedError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.tasks.workload import Workload
from archipelago.ops.experiments import baselines
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments import trial as trials
from archipelago.ops.experiments.baselines import Point
from archipelago.ops.experiments.trial import Trial, key_of, measure
from tests.failing import failing
from tests.ops.experiments.trials import record_of, trial_of


def test_baselines_ignore_settings_that_they_do_not_read() -> None:
    settings = {
        "outer.rule": "nesterov",
        "outer.momentum": 0.5,
        "sync.interval": 6,
        "sync.fragments": 2,
        "inner.steps": 9,
    }
    keys = {kind: dict(Trial.of(kind, 4, 3.0, 0, settings).settings) for kind in trials.KINDS}
    assert keys["islands"] == settings
    assert keys["parallel"] == keys["one"] == {"inner.steps": 9}
    assert keys["diloco"] == {"outer.momentum": 0.5, "sync.interval": 6, "inner.steps": 9}
    assert Trial.of("diloco", 4, 3.0, 0, settings).slow == 1.0, "every replica waits for the slowest"
    assert Trial.of("parallel", 4, 3.0, 0, settings).slow == 3.0, "it has as many tokens as the islands"


@given(st.sampled_from(trials.KINDS), st.integers(1, 64), st.floats(1, 100), st.integers(0, 99))
def test_a_record_has_the_key_of_its_trial_also_after_json(kind: str, islands: int, slow: float, seed: int) -> None:
    found = Trial.of(kind, islands, slow, seed, {"inner.learning_rate": 3e-3, "outer.rule": "sgd"})
    assert key_of(json.loads(json.dumps(record_of(found)))) == found.key


@pytest.mark.parametrize("how", ["raises", "no number", "worse than untrained"])
def test_a_run_that_diverges_is_a_result(how: str, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(trial: Trial, work: Any, note: Any) -> dict[str, Any]:
        note(Point(0, 8.0))
        if how == "raises":
            raise DivergedError("the loss is no number")
        note(Point(10, math.nan if how == "no number" else 9.0))
        return {}

    monkeypatch.setitem(trials._RUNS, "islands", diverges)
    found = measure(trial_of(data__corpus="small-text"))
    assert (found["diverged"], found["bits_per_byte"]) == (True, None)
    json.dumps(found, allow_nan=False)


def test_several_islands_can_be_slow() -> None:
    settings = {"inner.steps": 24}
    half = Trial.of("islands", 4, 3.0, 0, settings, slowed=2)
    assert trials.work(half) == pytest.approx(2 + 2 / 3)
    assert half.key != Trial.of("islands", 4, 3.0, 0, settings).key
    assert Trial.of("islands", 4, 1.0, 0, settings, slowed=2) == Trial.of("islands", 4, 1.0, 0, settings)
    for slowed in (0, 4):
        with failing(ConfigError, "study.slow"):
            Trial.of("islands", 4, 3.0, 0, settings, slowed=slowed)


def test_islands_can_be_slow_and_fail_but_not_send_late_on_a_tape() -> None:
    settings = {"inner.steps": 24}
    on_their_way: list[dict[str, Any]] = [{"sending": 4.0}, {"late": 4.0}]
    both = Trial.of("islands", 4, 3.0, 0, settings, slowed=2, chips=1e6)
    assert (both.slow, both.slowed, both.chips) == (3.0, 2, 1e6)
    assert Trial.of("parallel", 4, 3.0, 0, settings, slowed=2, chips=1e6) == Trial.of(
        "parallel", 4, 3.0, 0, settings, slowed=2
    ), "failures cost the baseline no token"
    for late in on_their_way:
        with failing(ConfigError, "study.slow"):
            Trial.of("islands", 4, 1.0, 0, settings, chips=1e6, **late)


@pytest.mark.full
def test_contributions_that_are_long_on_their_way_are_merged_stale(folder: Path, corpus: OpenCorpus) -> None:
    settings = dict(studies.load(folder, "rates").trials[1].settings)
    at_once, late = (measure(Trial.of("islands", 3, 1.0, 0, settings, sending=steps)) for steps in (0.0, 30.0))
    assert at_once["staleness_max"] <= 1
    assert late["staleness_max"] >= 2, "an interval of 12 steps passes twice"
    assert late["per_round"] < at_once["per_round"]
    assert not late["diverged"]
    assert late["sending"] == 30.0
    assert "sending" not in at_once, "the record leaves out defaults"


@pytest.mark.full
def test_late_events_make_another_trial(folder: Path, corpus: OpenCorpus) -> None:
    settings = dict(studies.load(folder, "rates").trials[1].settings)
    at_once, late = (measure(Trial.of("islands", 2, 1.0, 0, settings, late=steps)) for steps in (0.0, 4.0))
    assert late["late"] == 4.0
    assert "late" not in at_once
    assert late["curve"] != at_once["curve"]
    assert not late["diverged"]
    with failing(ConfigError, "study.slow"):
        Trial.of("islands", 2, 1.0, 0, settings, late=-1.0)


@pytest.mark.full
def test_islands_in_lockstep_adopt_at_once_what_they_send(folder: Path, corpus: OpenCorpus) -> None:
    settings = dict(studies.load(folder, "rates").trials[1].settings)
    usual, lockstep = (measure(Trial.of("islands", 3, 1.0, 0, settings, lockstep=flag)) for flag in (False, True))
    assert (lockstep["staleness_max"], lockstep["per_round"]) == (0, 3.0)
    assert lockstep["tokens"] == 3 * Trial.of("islands", 3, 1.0, 0, settings).config.inner.steps * 4 * 32
    assert lockstep["curve"] != usual["curve"]
    assert lockstep["lockstep"]
    assert "lockstep" not in usual, "the record leaves out defaults"


def test_lockstep_is_for_islands_that_are_equally_fast() -> None:
    with failing(ConfigError, "study.lockstep"):
        Trial.of("islands", 2, 3.0, 0, {}, lockstep=True)
    assert not Trial.of("parallel", 2, 1.0, 0, {}, lockstep=True).lockstep


def test_a_record_that_leaves_out_defaults_has_the_key_of_its_trial() -> None:
    record = {"kind": "islands", "islands": 4, "slow": 1.0, "seed": 0, "settings": {"inner.steps": 24}}
    assert trials.key_of(record) == Trial.of("islands", 4, 1.0, 0, {"inner.steps": 24}).key
    assert trials.key_of({**record, "chips": 1e6}) == Trial.of("islands", 4, 1.0, 0, {"inner.steps": 24}, chips=1e6).key


@pytest.mark.full
def test_a_trial_along_a_tape_trains_on_as_many_tokens(folder: Path, corpus: OpenCorpus) -> None:
    """Failures cost time, not tokens, so the losses are comparable."""
    settings = dict(studies.load(folder, "rates").trials[1].settings)
    found = [measure(Trial.of("islands", 2, 1.0, 0, settings, chips=chips)) for chips in (0.0, 2.4e6)]
    found.append(measure(Trial.of("islands", 2, 3.0, 0, settings, chips=2.4e6)))
    assert found[1]["tokens"] == pytest.approx(found[0]["tokens"], rel=0.1)
    assert found[2]["tokens"] == pytest.approx(found[0]["tokens"] * (1 + 1 / 3) / 2, rel=0.1)
    for record in found[1:]:
        assert record["goodput"] < 0.9
        assert record["chips"] == 2.4e6
        assert not record["diverged"]


def test_slow_islands_are_compared_at_equal_tokens() -> None:
    assert trials.work(trial_of(islands=4)) == 4.0
    assert trials.work(trial_of(islands=4, slow=4.0)) == 3.25


@pytest.mark.parametrize(("kind", "steps", "tokens"), [("diloco", 24, 0), ("parallel", 16, 0), ("one", 24, 4096)])
def test_each_baseline_gets_as_many_tokens_as_the_islands(
    kind: str, steps: int, tokens: int, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two islands, one of them three times slower, make 24 + 8 steps of 128 tokens. DiLoCo waits for the slow one."""
    asked: list[tuple[int, int]] = []

    def record(work: Workload, size: int, note: Any, *rest: float) -> None:
        asked.append((int(rest[0]) if kind == "parallel" else work.config.inner.steps, size))
        note(Point(0, 8.0))
        note(Point(100, 4.0))

    for name in ("diloco", "data_parallel", "one_process"):
        monkeypatch.setattr(baselines, name, record)
    settings: dict[str, Any] = {
        "data__corpus": "small-text",
        "data__batch_size": 4,
        "data__sequence_length": 32,
        "inner__steps": 24,
    }
    found = measure(trial_of(kind, slow=3.0, **settings))
    assert asked == [(steps, tokens or 2)]
    assert (found["bits_per_byte"], found["tokens"], found["diverged"]) == (4.0, 100, False)
