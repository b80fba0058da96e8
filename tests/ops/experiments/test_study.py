"""`archipelago bench study`: the trials that a file names, which of them run, and where their results go."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.errors import ConfigError
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.ops.commands import run as archipelago
from archipelago.ops.experiments import study as studies
from archipelago.ops.experiments import trial as trials
from archipelago.ops.experiments.study import RESULTS, SHIPPED, Study
from archipelago.ops.experiments.trial import Trial, key_of
from archipelago.ops.launch.supervisor import ONE_THREAD
from tests.failing import failing
from tests.ops.experiments.trials import STUDY, record_of, trial_of


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


def test_a_wrong_study_is_refused_before_anything_runs(folder: Path) -> None:
    for text, code in (
        ("grids = 1", "study.shape"),
        ('[[grid]]\nkind = "serial"', "study.trial"),
        ("[[grid]]\nislands = 0", "study.trial"),
        ("[[grid]]\nislands = 4.5", "study.trial"),
        ("[[grid]]\nslow = inf", "study.trial"),
        ("[[grid]]\nslow = 2.0\nslowed = 1.5", "study.trial"),
        ("base = 5\n[[grid]]", "study.shape"),
        ("[[grid]]\nseeds = 3", "study.shape"),
        ("[[grid]]\nlate = 2", "study.shape"),
        ('base = "nowhere.toml"', "study.shape"),
        ("[[grid", "study.shape"),
        ('[[grid]]\n"outer.rate" = 1.0', "config.unknown-key"),
        ('[[grid]]\n"outer.learning_rate" = -1.0', "config.value"),
    ):
        (folder / "wrong.toml").write_text(text, encoding="utf-8")
        with failing(ConfigError, code):
            studies.load(folder, "wrong")
    (folder / "wrong.toml").write_text("[[grid", encoding="utf-8")
    with failing(ConfigError, "study.shape") as refused:
        studies.load(folder, "wrong")
    assert str(refused.value).split(f"Studies in {folder}: ")[1].startswith("rates."), "neither its base nor itself"


def test_the_shipped_studies_can_be_loaded() -> None:
    for path in {*SHIPPED.glob("*.toml")} - {SHIPPED / "base.toml"}:
        study = studies.load(SHIPPED, path.stem)
        assert study.about
        assert len(study.trials) >= 2


INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from archipelago.ops.cli import main; sys.exit(main())"
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Record the trials instead of running them."""
    seen: list[Trial] = []

    def measure(trial: Trial, *others: Any, **named: Any) -> dict[str, Any]:
        seen.append(trial)
        return record_of(trial)

    monkeypatch.setattr(studies, "measure", measure)
    return seen


def run_rest(study: Study, folder: Path) -> int:
    """Run the trials that have no result yet, and return their number."""
    return studies.run(study, folder, lambda: studies.recorded(folder))


def record_first(study: Study, folder: Path, count: int) -> None:
    """Record results of the first trials."""
    for trial in study.trials[:count]:
        studies.append(folder / f"{study.name}.jsonl", record_of(trial))


def test_a_recorded_trial_is_not_measured_again(folder: Path, measured: list[Trial]) -> None:
    study = studies.load(folder, "rates")
    record_first(study, folder, 2)
    assert [run_rest(study, folder), run_rest(study, folder)] == [4, 0]
    assert measured == list(study.trials[2:])
    path = folder / "rates.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [key_of(line) for line in lines] == [t.key for t in study.trials]
    (folder / "more.toml").write_text(STUDY.replace("sgd", "nesterov"), encoding="utf-8")
    assert run_rest(studies.load(folder, "more"), folder) == 4, "the baselines are those of the other study"
    path.write_bytes(path.read_bytes()[:-40])
    measured.clear()
    run_rest(study, folder)
    assert measured == list(study.trials[5:]), "the line that was cut off is measured again"
    assert set(studies.recorded(folder)) >= {t.key for t in study.trials}


def test_a_study_is_compared_with_the_baselines_in_its_own_file(folder: Path) -> None:
    trial = trial_of("parallel")
    for name, loss in (("early", 2.0), ("late", 3.0)):
        studies.append(folder / f"{name}.jsonl", record_of(trial, loss))
    names = ("early", "late", "other")
    assert [studies.recorded(folder, name)[trial.key]["bits_per_byte"] for name in names] == [2.0, 3.0, 2.0]


@pytest.mark.full
def test_trials_learn(folder: Path, corpus: OpenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `archipelago bench study` twice, with real trials of every kind.

    Two islands, one of them three times slower, make 24 + 8 steps, and some more until they hear that the run is over.
    Baselines get the tokens of 32 steps.
    """
    for name, value in ONE_THREAD.items():  # which the command sets, too
        monkeypatch.setenv(name, os.environ.get(name, value))
    study = 'base = "base.toml"\n[[grid]]\nkind = ["parallel", "one", "islands"]\nislands = 2\nslow = 3.0\n'
    study += (
        '"outer.rule" = "nesterov"\n"merge.rest" = "average"\n"merge.embedding" = "average"\n"sync.fragments" = 1\n'
    )
    (folder / "kinds.toml").write_text(study, encoding="utf-8")
    assert archipelago(["bench", "study", "kinds", "--folder", str(folder)]) == 0
    before = (folder / "kinds.jsonl").read_bytes()
    records = [json.loads(line) for line in before.splitlines()]
    assert {r["kind"] for r in records} == set(trials.KINDS)
    for r in records:
        assert not r["diverged"]
        assert r["bits_per_byte"] < 0.8 * r["curve"][0][1], f"{r['kind']} learnt nothing"
        assert r["tokens"] == pytest.approx(32 * 4 * 32, rel=0.3 if r["kind"] == "islands" else 0.0), r["kind"]
        assert r["test"] != r["bits_per_byte"], "it is another text"
        assert r["provenance"]["versions"].keys() >= {"jax"}
    ours = next(r for r in records if r["kind"] == "islands")
    assert ours["rounds"] >= 2
    assert archipelago(["bench", "study", "kinds", "--folder", str(folder)]) == 0
    assert (folder / "kinds.jsonl").read_bytes() == before


@pytest.mark.full
def test_an_interrupt_keeps_finished_trials(folder: Path, corpus: OpenCorpus, until: Any) -> None:
    study = 'base = "base.toml"\nseeds = [0, 1, 2, 3, 4, 5, 6, 7]\n[[grid]]\nkind = "one"\n"inner.steps" = 40\n'
    (folder / "long.toml").write_text(study, encoding="utf-8")
    command = [sys.executable, "-c", INTERRUPTIBLE, "bench", "study", "long", "--folder", str(folder)]
    path = folder / "long.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "a first result", seconds=300.0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert 1 <= len(studies.recorded(folder)) < 8


def test_a_result_is_shown_with_the_settings_that_vary() -> None:
    at_once, parallel = trial_of(outer__rule="sgd"), trial_of("parallel", islands=3)
    late = dataclasses.replace(at_once, sending=6.0)
    names = studies.varying([t.named_values for t in (parallel, at_once, late)])
    assert names == ["sending"]
    assert studies.in_words(late, record_of(late, 2.5), names) == "2.5000  islands M=2 seed=0 sending=6.0"
    assert studies.in_words(at_once, record_of(at_once, None), names) == "diverged  islands M=2 seed=0 sending=0.0"


def test_a_trial_that_is_cut_is_kept_and_shown_and_is_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(trial: Trial, work: Any, progress: Any) -> dict[str, Any]:
        progress({**record_of(trial), "share": 0.5})
        raise KeyboardInterrupt

    study, path = studies.load(folder, "rates"), folder / "rates.jsonl"
    monkeypatch.setattr(studies, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        run_rest(study, folder)
    kept = [studies.unfinished(path, trial) for trial in study.trials]
    assert kept == [{**record_of(study.trials[0]), "share": 0.5}, *[None] * 5]
    assert not studies.recorded(folder)
    assert archipelago(["bench", "study", "rates", "--show", f"--folder={folder}"]) == 0
    assert capsys.readouterr().err.count("50%") == 1


CLAIM = """
import fcntl, sys
with open(sys.argv[1], "ab") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(sys.argv[2]))
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_trial_that_another_process_runs_is_left_to_it(folder: Path, measured: list[Trial]) -> None:
    study = studies.load(folder, "rates")
    number = str(zlib.crc32(study.trials[0].key.encode()))
    command = [sys.executable, "-c", CLAIM, str(folder / ".rates.lock"), number]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        assert run_rest(study, folder) == 5
        other.communicate()
    assert run_rest(study, folder) == 1
    assert measured == [*study.trials[1:], study.trials[0]]


def test_results_of_shipped_studies_go_to_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, Any]] = []
    monkeypatch.setattr(studies, "run", lambda study, results, known: seen.append((results, known().keys())))
    for args in (["muon"], ["rates", f"--folder={folder}"]):
        assert archipelago(["bench", "study", *args]) == 0
    assert seen == [(RESULTS, studies.recorded(SHIPPED).keys()), (folder, set())]
