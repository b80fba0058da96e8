"""Studies: what a file names, what is measured again and what is not, and what is made of the results."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ArchipelagoError, ConfigError, DivergedError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.cli import run as archipelago
from archipelago.ops.experiments import study as sweep_study
from archipelago.ops.experiments import study_run
from archipelago.ops.experiments import trial as sweep_trial
from archipelago.ops.experiments.results import Row, baseline, grouped, show
from archipelago.ops.experiments.trial import Trial, key_of, measure

BASE = """
[data]
corpus = "small-text"
sequence_length = 32
batch_size = 4
shards = 8
held_out_sequences = 32

[inner]
steps = 24
warmup_steps = 4

[sync]
interval = 12
"""
STUDY = """
about = "which rate"
base = "base.toml"
seeds = [1, 0]

[[grid]]
kind = "parallel"
islands = 2

[[grid]]
islands = [2, 4]
seeds = [0]
"outer.rule" = "sgd"
"outer.learning_rate" = [0.5, 1.0]
"""
REPOSITORY = Path(__file__).parents[3]

INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from archipelago.ops.cli import main; sys.exit(main())"
)
"""the command line, also where the tests run in the background of a shell, which lets interrupts be ignored"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "bench"
    found.mkdir()
    (found / "base.toml").write_text(BASE, encoding="utf-8")
    (found / "rates.toml").write_text(STUDY, encoding="utf-8")
    return found


def record_of(trial: Trial, loss: float | None = 2.0, tokens: int = 1000) -> dict[str, Any]:
    return {
        "kind": trial.kind,
        "islands": trial.islands,
        "slow": trial.slow,
        "seed": trial.seed,
        "settings": dict(trial.settings),
        "bits_per_byte": loss,
        "diverged": loss is None,
        "tokens": tokens,
        "seconds": 1.0,
    }


def trial(kind: str = "islands", islands: int = 2, seed: int = 0, slow: float = 1.0, **settings: Any) -> Trial:
    return Trial.of(kind, islands, slow, seed, {name.replace("__", "."): value for name, value in settings.items()})


# -- what a file names -----------------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_lists_with_the_first_seed_first(folder: Path) -> None:
    study = sweep_study.load(folder, "rates")
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
    assert sweep_study.names(folder) == ["rates"], "a base is no study"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[grid]]\n"outer.rate" = 1.0', "outer.rate"),
        ('[[grid]]\n"outer.learning_rate" = -1.0', "outer.learning_rate"),
        ("grids = 1", "unknown keys: grids"),
        ('[[grid]]\nkind = "serial"', "no kind of run 'serial'"),
        ("[[grid]]\nislands = 0", "0 islands"),
        ("[[grid]]\nislands = 4.5", "4.5 islands"),
        ("[[grid]]\nslow = inf", "inf times slower"),
        ("[[grid]]\nslow = 2.0\nslowed = 1.5", "1.5 slow islands"),
        ("base = 5\n[[grid]]", "5 cannot be read"),
        ("[[grid]]\nseeds = 3", "cannot be read"),
        ('base = "nowhere.toml"', "nowhere.toml cannot be read"),
        ("[[grid", "is not TOML"),
    ],
)
def test_a_study_that_cannot_be_is_said_before_anything_runs(folder: Path, text: str, why: str) -> None:
    (folder / "wrong.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        sweep_study.load(folder, "wrong")


def test_baselines_are_shared_among_what_does_not_matter_to_them() -> None:
    settings = {
        "outer.rule": "nesterov",
        "outer.momentum": 0.5,
        "sync.interval": 6,
        "sync.fragments": 2,
        "inner.steps": 9,
    }
    keys = {kind: dict(Trial.of(kind, 4, 3.0, 0, settings).settings) for kind in sweep_trial.KINDS}
    assert keys["islands"] == settings
    assert keys["parallel"] == keys["one"] == {"inner.steps": 9}
    assert keys["diloco"] == {"outer.momentum": 0.5, "sync.interval": 6, "inner.steps": 9}
    assert Trial.of("diloco", 4, 3.0, 0, settings).slow == 1.0, "all wait for the slowest"
    assert Trial.of("parallel", 4, 3.0, 0, settings).slow == 3.0, "it has as many tokens as the islands"


@given(st.sampled_from(sweep_trial.KINDS), st.integers(1, 64), st.floats(1, 100), st.integers(0, 99))
def test_a_record_has_the_key_of_its_trial_also_after_json(kind: str, islands: int, slow: float, seed: int) -> None:
    found = Trial.of(kind, islands, slow, seed, {"inner.learning_rate": 3e-3, "outer.rule": "sgd"})
    assert key_of(json.loads(json.dumps(record_of(found)))) == found.key


# -- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials are not run, but noted."""
    seen: list[Trial] = []

    def results(trials: list[Trial], jobs: int) -> Any:
        for one in trials:
            seen.append(one)
            yield one, record_of(one)

    monkeypatch.setattr(study_run, "_results", results)
    return seen


def test_what_is_recorded_is_not_measured_again(folder: Path, measured: list[Trial]) -> None:
    study = sweep_study.load(folder, "rates")
    assert study_run.run(study, folder, 1, sweep_study.recorded(folder), most=2) == 2
    assert study_run.run(study, folder, 1, sweep_study.recorded(folder)) == 4
    assert study_run.run(study, folder, 1, sweep_study.recorded(folder)) == 0
    assert measured == list(study.trials)
    lines = [json.loads(line) for line in (folder / "rates.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [key_of(line) for line in lines] == [t.key for t in study.trials]
    assert {line["command"] for line in lines} == {"archipelago bench study rates"}


def test_a_baseline_of_another_study_is_not_measured_again(folder: Path, measured: list[Trial]) -> None:
    (folder / "more.toml").write_text(STUDY.replace("sgd", "nesterov"), encoding="utf-8")
    study_run.run(sweep_study.load(folder, "rates"), folder, 1, sweep_study.recorded(folder))
    measured.clear()
    study_run.run(sweep_study.load(folder, "more"), folder, 1, sweep_study.recorded(folder))
    assert [t.kind for t in measured] == ["islands"] * 4


def test_a_line_that_was_cut_off_is_measured_again_and_spoils_no_other(folder: Path, measured: list[Trial]) -> None:
    study = sweep_study.load(folder, "rates")
    study_run.run(study, folder, 1, sweep_study.recorded(folder), most=3)
    path = folder / "rates.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    measured.clear()
    study_run.run(study, folder, 1, sweep_study.recorded(folder))
    assert measured == list(study.trials[2:])
    assert set(sweep_study.recorded(folder)) == {t.key for t in study.trials}


def test_trials_run_in_processes_of_their_own_and_learn(folder: Path, corpus: OpenCorpus) -> None:
    """The whole way, with real runs of every kind: `archipelago sweep`, twice."""
    study = 'base = "base.toml"\n[[grid]]\nkind = ["parallel", "diloco", "one", "islands"]\nislands = 2\n'
    (folder / "kinds.toml").write_text(study + '"outer.rule" = "nesterov"\n', encoding="utf-8")
    assert archipelago(["bench", "study", "kinds", "--folder", str(folder)]) == 0
    before = (folder / "kinds.jsonl").read_bytes()
    records = [json.loads(line) for line in before.splitlines()]
    assert {r["kind"] for r in records} == set(sweep_trial.KINDS)
    for r in records:
        assert not r["diverged"]
        assert r["bits_per_byte"] < 0.8 * r["curve"][0][1], f"{r['kind']} learnt nothing"
        assert r["tokens"] == pytest.approx(2 * 24 * 4 * 32, rel=0.05)
        assert r["version"].count("+") == 1
    ours = next(r for r in records if r["kind"] == "islands")
    assert ours["rounds"] >= 12
    assert (folder / "kinds.png").stat().st_size > 1000
    assert archipelago(["bench", "study", "kinds", "--folder", str(folder)]) == 0
    assert (folder / "kinds.jsonl").read_bytes() == before


def test_an_interrupt_keeps_what_is_done(folder: Path, corpus: OpenCorpus, until: Any) -> None:
    study = 'base = "base.toml"\nseeds = [0, 1, 2, 3, 4, 5, 6, 7]\n[[grid]]\nkind = "one"\n"inner.steps" = 400\n'
    (folder / "long.toml").write_text(study, encoding="utf-8")
    command = [sys.executable, "-c", INTERRUPTIBLE, "bench", "study", "long", "--folder", str(folder)]
    path = folder / "long.jsonl"
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "a first result", seconds=300.0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert 1 <= len(sweep_study.recorded(folder)) < 8


def _dies(trial: Trial) -> dict[str, Any]:
    os._exit(9)


def test_a_process_that_is_killed_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run, "measure", _dies)
    with pytest.raises(ArchipelagoError, match="a measuring process was killed"):
        study_run.run(sweep_study.load(folder, "rates"), folder, 1, sweep_study.recorded(folder))
    assert sweep_study.recorded(folder) == {}


@pytest.mark.parametrize("how", ["raises", "no number", "worse than untrained"])
def test_a_run_that_diverges_is_a_result(how: str, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from archipelago.ops.experiments.baselines import Point

    def diverges(trial: Trial, config: Any, corpus: Any, note: Any) -> dict[str, Any]:
        note(Point(0, 8.0))
        if how == "raises":
            raise DivergedError("the loss is no number")
        note(Point(10, math.nan if how == "no number" else 9.0))
        return {}

    monkeypatch.setitem(sweep_trial._RUNS, "islands", diverges)
    found = measure(trial(data__corpus="small-text"))
    assert (found["diverged"], found["bits_per_byte"]) == (True, None)
    json.dumps(found, allow_nan=False)


def test_several_islands_can_be_slow() -> None:
    settings = {"inner.steps": 24}
    half = Trial.of("islands", 4, 3.0, 0, settings, slowed=2)
    assert sweep_trial.work(half) == pytest.approx(2 + 2 / 3)
    assert half.key != Trial.of("islands", 4, 3.0, 0, settings).key
    assert Trial.of("islands", 4, 1.0, 0, settings, slowed=2) == Trial.of("islands", 4, 1.0, 0, settings)
    for slowed in (0, 4):
        with pytest.raises(ConfigError, match="slow islands of 4"):
            Trial.of("islands", 4, 3.0, 0, settings, slowed=slowed)


def test_what_is_long_on_its_way_is_merged_stale(folder: Path, corpus: OpenCorpus) -> None:
    settings = dict(sweep_study.load(folder, "rates").trials[1].settings)
    at_once, late = (measure(Trial.of("islands", 3, 1.0, 0, settings, sending=steps)) for steps in (0.0, 30.0))
    assert at_once["staleness_max"] <= 1
    assert late["staleness_max"] >= 2, "an interval of 12 steps passes twice"
    assert late["per_round"] < at_once["per_round"]
    assert not late["diverged"]
    assert late["sending"] == 30.0
    assert "sending" not in at_once, "records from before keep their keys"


def test_what_comes_late_makes_another_trial(folder: Path, corpus: OpenCorpus) -> None:
    settings = dict(sweep_study.load(folder, "rates").trials[1].settings)
    at_once, late = (measure(Trial.of("islands", 2, 1.0, 0, settings, late=steps)) for steps in (0.0, 4.0))
    assert late["late"] == 4.0
    assert "late" not in at_once
    assert late["curve"] != at_once["curve"]
    assert not late["diverged"]
    with pytest.raises(ConfigError, match="to hear"):
        Trial.of("islands", 2, 1.0, 0, settings, late=-1.0)


def test_a_record_from_before_these_were_known_has_the_key_that_it_had() -> None:
    record = {"kind": "islands", "islands": 4, "slow": 1.0, "seed": 0, "settings": {"inner.steps": 24}}
    assert sweep_trial.key_of(record) == Trial.of("islands", 4, 1.0, 0, {"inner.steps": 24}).key
    assert (
        sweep_trial.key_of({**record, "chips": 1e6})
        == Trial.of("islands", 4, 1.0, 0, {"inner.steps": 24}, chips=1e6).key
    )


def test_a_trial_along_a_tape_trains_on_as_many_tokens(folder: Path, corpus: OpenCorpus) -> None:
    """Failures cost time and not tokens, so that the loss is comparable."""
    settings = dict(sweep_study.load(folder, "rates").trials[1].settings)
    found = [measure(Trial.of("islands", 2, 1.0, 0, settings, chips=chips)) for chips in (0.0, 2.4e6)]
    assert found[1]["tokens"] == pytest.approx(found[0]["tokens"], rel=0.1)
    assert found[1]["goodput"] < 0.9
    assert found[1]["chips"] == 2.4e6
    assert not found[1]["diverged"]


def test_slow_islands_are_compared_at_equal_tokens() -> None:
    assert sweep_trial.work(trial(islands=4)) == 4.0
    assert sweep_trial.work(trial(islands=4, slow=4.0)) == 3.25


# -- showing ---------------------------------------------------------------------------------------------------------


def results(*losses: tuple[Trial, float | None, int]) -> list[Row]:
    return grouped(record_of(one, loss, tokens) for one, loss, tokens in losses)


def test_rows_are_means_over_seeds_and_ratios_are_taken_seed_by_seed() -> None:
    rows = results(
        (trial("parallel", seed=0), 2.0, 1000),
        (trial("parallel", seed=1), 4.0, 1000),
        (trial(seed=1), 4.4, 990),
        (trial(seed=0), 2.0, 990),
    )
    parallel, ours = rows
    assert (ours.mean, list(ours.losses)) == (3.2, [0, 1])
    assert baseline(ours, rows) is parallel
    assert ours.ratios(parallel) == [1.0, 1.1]


def test_the_baseline_is_the_best_one_of_as_many_islands_and_tokens() -> None:
    rows = results(
        (trial("parallel", inner__learning_rate=1e-3), 2.0, 1000),
        (trial("parallel", inner__learning_rate=2e-3), 1.9, 1000),
        (trial("parallel", inner__learning_rate=9.0), None, 1000),
        (trial("parallel", islands=4), 1.0, 1000),
        (trial("parallel", inner__steps=99), 1.0, 3000),
        (trial(), 2.1, 1010),
    )
    found = baseline(rows[-1], rows)
    assert found is not None
    assert found.settings["inner.learning_rate"] == 2e-3


def test_one_seed_that_diverges_spoils_the_mean() -> None:
    (row,) = results((trial(seed=0), 2.0, 1000), (trial(seed=1), None, 500))
    assert (row.diverged, row.losses, row.mean) == (1, {}, math.inf)


def test_only_what_differs_within_a_kind_is_shown() -> None:
    rows = results(
        (trial("parallel", inner__steps=5), 2.0, 1000),
        (trial(inner__steps=5, outer__rule="sgd"), 2.0, 1000),
        (trial(inner__steps=5, outer__rule="nesterov"), 2.0, 1000),
    )
    assert sweep_study.varying([row.settings for row in rows]) == ["outer.rule"]


def test_a_result_says_what_tells_it_from_the_others() -> None:
    at_once, parallel = trial(outer__rule="sgd"), trial("parallel", islands=3)
    late = dataclasses.replace(at_once, late=6.0)
    names = sweep_study.varying([t.said for t in (parallel, at_once, late)])
    assert names == ["late"]
    assert study_run.in_words(late, record_of(late, 2.5), names) == "2.5000  islands M=2 seed=0 late=6.0"
    assert study_run.in_words(at_once, record_of(at_once, None), names) == "diverged  islands M=2 seed=0 late=0.0"


def test_the_test_text_has_a_column_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = sweep_study.load(folder, "rates")
    losses = {"parallel": (2.0, 3.0), "islands": (2.2, 3.6)}
    known = {
        t.key: {**record_of(t, losses[t.kind][0]), "test": losses[t.kind][1]} for t in study.trials if t.kind in losses
    }
    rows = show(study, known, folder)["rows"]
    found = {r["kind"]: (r["to_parallel"], r["to_parallel_on_test"]) for r in rows if r["islands"] == 2}
    assert found == {"parallel": (1.0, 1.0), "islands": (pytest.approx(1.1), pytest.approx(1.2))}
    assert "1.2000" in capsys.readouterr().out


@pytest.mark.parametrize(
    "x",
    [
        "",
        'x = "islands"\nlines = ["outer.learning_rate"]\n',
        'x = "outer.learning_rate"\n',  # of which data-parallel has none
    ],
)
def test_a_study_is_shown_as_far_as_it_has_come(
    folder: Path, x: str, measured: list[Trial], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rates.toml").write_text(x + STUDY.replace("islands = 2\n", "islands = [2, 4]\n"), encoding="utf-8")
    study = sweep_study.load(folder, "rates")
    assert show(study, {}, folder)["rows"] == []
    known = {t.key: record_of(t, None if t.islands == 4 and t.kind == "islands" else 2.0) for t in study.trials}
    found = show(study, known, folder)
    assert [row["diverged"] for row in found["rows"]].count(1) == 2
    assert "1 diverged" in capsys.readouterr().out
    assert Path(found["picture"]).stat().st_size > 1000


def test_without_a_name_all_studies_are_listed(
    folder: Path, measured: list[Trial], capsys: pytest.CaptureFixture[str]
) -> None:
    study_run.run(sweep_study.load(folder, "rates"), folder, 1, sweep_study.recorded(folder), most=2)
    capsys.readouterr()
    assert archipelago(["bench", "study", "--folder", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"studies": [{"study": "rates", "trials": 6, "done": 2, "about": "which rate"}]}


def test_the_studies_that_ship_can_be_read() -> None:
    for name in sweep_study.names(REPOSITORY / "ops" / "experiments" / "studies"):
        study = sweep_study.load(REPOSITORY / "ops" / "experiments" / "studies", name)
        assert study.about
        assert len(study.trials) >= 2
