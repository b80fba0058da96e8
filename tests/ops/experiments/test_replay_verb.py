"""`archipelago replay`: a recorded run is repeated, also if an island trained on another corpus."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.control import STEPS as STEPS_FIELD
from archipelago.islands import inner
from archipelago.islands.creation import describe, first_snapshots
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.replay import ActionError, corpus_of
from archipelago.islands.sync.actions import BeginPass, Length, parse, unfolded
from archipelago.islands.worker import Island
from archipelago.merger import record as records
from archipelago.merger.beside import at_once
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments import recorded_run, replay
from tests.failing import failing
from tests.harness.played import PlayedRun
from tests.small import SMALL, compiled

RECORD = Path("runs") / "taped" / "merger" / "record"
CONFIG = replace(SMALL, record=True, sync=replace(SMALL.sync, interval=6, fragments=2, grace=0.0))


def prepared(name: str, text: str) -> OpenCorpus:
    source = Path(f"{name}.txt")
    source.write_text(text)
    return prepare_text(source, name)


class Recorded(PlayedRun):
    """A recorded run in virtual time, in the folder `runs`. Its islands step in turn."""

    def __init__(self) -> None:
        manifest = describe("taped", CONFIG, open_corpus("public").identity)
        first = first_snapshots(manifest)
        super().__init__(manifest, first)
        MergerFolder(RECORD.parent).recorder.begin(manifest, first)
        self.replace_merger()
        self.islands: list[Island] = []

    def replace_merger(self) -> None:
        """Let another merger go on, which records."""
        checkpointer = MergerFolder(RECORD.parent).checkpointer(self.transport, self.manifest, 1e9, at_once)
        self.merger = self.new_merger(checkpointer=checkpointer)

    def join(self, name: str, corpus: str = "") -> None:
        """Add an island, pinned to `corpus` if that is given."""
        link = self.link(f"{name}/x", shard_order(CONFIG.data.shards, CONFIG.seed, corpus))
        arrivals = link.join()
        batches = Batches(open_corpus(corpus or "public").train, CONFIG, link.lease)
        island = Island(name, self.manifest, compiled(CONFIG), batches, link, arrivals, self.clock, incarnation="x")
        island.beat("joining")
        link.pump()
        self.islands.append(island)

    def step_in_turn(self, steps: int) -> None:
        for _ in range(steps):
            for island in self.islands:
                self.pass_boundary(island)
                island.advance()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, this machine's corpora, and `runs`, the record of a run of two islands.

    One island trained on the run's corpus, and one on its own. Meanwhile the outer rate was steered twice, another
    merger took over, and the run was extended.
    """
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))
        prepared("public", "What everyone may read, line by line.\n" * 4000)
        prepared("site", "The text of ONE site: 0123456789.\n" * 4000)
        run = Recorded()
        run.join("open")
        run.join("pinned", "site")
        run.step_in_turn(4)
        run.transport.reader.steer({"outer.learning_rate": "0.25", "sync.quorum": "2"})
        run.step_in_turn(4)
        run.replace_merger()
        run.step_in_turn(4)
        run.transport.reader.steer({"outer.learning_rate": "", STEPS_FIELD: str(2 * CONFIG.inner.steps)})
        run.step_in_turn(6)
        run.merger.finish()
    return folder


@pytest.fixture
def data(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `recorded` as the working directory. The fixture is the folder with its corpora."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(inner, "compile_steps", lambda model, config: compiled(CONFIG))
    monkeypatch.setattr(replay, "keep_compiled", lambda: None)
    return tmp_path / "data"


def replayed(capsys: pytest.CaptureFixture[str]) -> tuple[int, Mapping[str, Any]]:
    """Replay, and return the exit status and the JSON object."""
    capsys.readouterr()
    status = replay.main(replay.ReplayOptions("taped", json=True))
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.usefixtures("data")
def test_each_island_is_trained_again_on_its_own_text_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    record = records.read(RECORD)
    tape = sorted((entry for entry, _ in record.rounds.values()), key=lambda entry: entry.round)
    who = [member.island for entry in tape for member in entry.members]
    assert min(who.count("open"), who.count("pinned")) >= 2, "both islands must contribute"
    longer = f"{STEPS_FIELD}={2 * CONFIG.inner.steps}"
    changes = [set(entry.steered.split()) for entry in tape if entry.steered]
    assert changes == [{"outer.learning_rate=0.25", "sync.quorum=2"}, {"outer.learning_rate=0.7", longer}]
    assert len({entry.epoch for entry in tape}) == 2, "another merger took over"
    for name in ("open", "pinned"):
        done = unfolded([actions for actions in record.actions if actions.island == name])
        assert [action for action in done if isinstance(action, Length)] == [Length(2 * CONFIG.inner.steps)]
    status, found = replayed(capsys)
    assert (status, found["first_difference"], found["same"]) == (0, "", True)
    assert found["islands_from_payloads"] == {}
    assert found["trained_again"] == found["contributions"] == len(who)
    assert found["rounds"] == len(tape)
    assert [f["digest"] for f in found["fragments"]] == [f["recorded"] for f in found["fragments"]]


@pytest.mark.full
def test_an_island_without_its_corpus_uses_its_payloads(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "site")
    status, found = replayed(capsys)
    assert (status, found["same"], found["rounds"]) == (0, True, found["rounds_recorded"])
    assert found["islands_from_payloads"].keys() == {"pinned/x"}
    assert 0 < found["trained_again"] < found["contributions"]
    replay.main(replay.ReplayOptions("taped"))
    assert "pinned/x" in capsys.readouterr().err


@pytest.mark.full
def test_another_corpus_of_that_name_is_a_difference(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "site")
    prepared("site", "Another text of the same name.\n" * 5000)
    status, found = replayed(capsys)
    assert (status, found["same"]) == (1, False)
    assert "pinned/x/" in found["first_difference"] and "'site'" in found["first_difference"]


@pytest.mark.full
@pytest.mark.usefixtures("data")
def test_an_impossible_corpus_name_counts_as_a_missing_corpus() -> None:
    """Another program may have written the actions."""
    record = records.read(RECORD)
    written = record.actions
    for name in ("..", "../elsewhere", "x" * 78, "-"):
        record.actions = [replace(actions, text=actions.text.replace(" dsite/", f" d{name}/")) for actions in written]
        found = recorded_run.repeat([record], islands=True)
        assert (found["same"], found["first_difference"]) == (True, ""), name
        assert found["islands_from_payloads"].keys() == {"pinned/x"}, name


@pytest.mark.full
@pytest.mark.usefixtures("data")
def test_a_record_without_its_steering_differs() -> None:
    record = records.read(RECORD)
    record.rounds = {number: (replace(entry, steered=""), ds) for number, (entry, ds) in record.rounds.items()}
    found = recorded_run.repeat([record], islands=False)
    assert not found["same"]
    assert found["first_difference"]


@pytest.mark.full
@pytest.mark.usefixtures("data")
def test_other_rules_are_steered_except_for_the_settings_that_they_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorded_run, "bits_per_byte", lambda manifest, shards: 0.0)
    record = records.read(RECORD)
    assert recorded_run.what_if([record], CONFIG)["same"], "the run's own rate, with its steering"
    assert replay.main(replay.ReplayOptions("taped", set=("outer.lr=0.7",), json=True)) == 0
    all_the_time = json.loads(capsys.readouterr().out)
    assert not all_the_time["same"], "the run's own rate without its steering"
    assert all_the_time["rounds"] == len(record.rounds)


# -- the corpus of an island -------------------------------------------------------------------------------------------


def test_the_shards_name_the_corpus() -> None:
    others = {"a/before": ["join:0,0", "dsite/0:0:0:0", "n9"], "a/round": ["whole:a/x@1"]}
    for mine, corpus in (
        (["join:0,0", "d3:0:0:0", "n1"], ""),
        (["join:0,0", "dsite/3:0:0:0", "n1", "dsite/1:2:0:0"], "site"),
        (["join:0,0", "d3:2199023255552:0:0", "n1", "dsite/3:0:0:0!"], "site"),  # It waited for its first lease.
        (["whole:a/before@9", "n1"], "site"),
        (["whole:a/round@9", "n1"], ""),
        (["whole:a/unknown@9", "n1"], ""),
    ):
        actions = {who: list(map(parse, words)) for who, words in {**others, "a/x": mine}.items()}
        assert corpus_of("a/x", actions) == corpus, mine
    with failing(ActionError):  # They name two corpora.
        corpus_of("a/x", {"a/x": [BeginPass("one/1:0:0:0"), BeginPass("two/1:0:0:0")]})
