"""`archipelago replay`: a recorded run again, also where an island trained on text that is not the run's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.transport import Transport
from archipelago.islands import inner
from archipelago.islands.creation import describe, first_snapshots
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.sharding import shard_order
from archipelago.islands.replay import ActionError, corpus_of
from archipelago.islands.sync.actions import BeginPass, parse
from archipelago.islands.sync.link import Link
from archipelago.islands.worker import Island
from archipelago.merger import record as records
from archipelago.merger.checkpointer import at_once
from archipelago.merger.service import Merger
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments import replay
from archipelago.ops.experiments.virtual_time import VirtualClock
from tests.failing import failing
from tests.small import SMALL, compiled

RECORD = Path("runs") / "taped" / "merger" / "record"
CONFIG = replace(SMALL, record=True, sync=replace(SMALL.sync, interval=6, fragments=2, grace=0.0))
STEPS = 14


def prepared(name: str, text: str) -> OpenCorpus:
    source = Path(f"{name}.txt")
    source.write_text(text)
    return prepare_text(source, name)


class Recorded:
    """A recorded run in virtual time, in the folder `runs`; its islands take steps in turn."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = MemoryBroker(self.clock)
        self.manifest = describe("taped", CONFIG, open_corpus("public").identity)
        transport = self.connect()
        first = first_snapshots(self.manifest)
        transport.create(self.manifest, first)
        folder = MergerFolder(RECORD.parent)
        folder.recorder.begin(self.manifest, first)
        checkpointer = folder.checkpointer(transport, self.manifest, 1e9, at_once)
        self.merger = Merger(self.connect(), self.clock, "merger", live_poll_seconds=0.0, checkpointer=checkpointer)
        assert self.merger.acquire()
        self.merger.load()
        self.islands: list[Island] = []

    def connect(self) -> Transport:
        return self.broker.connect("taped")

    def join(self, name: str, corpus: str = "") -> Island:
        """One more island; `corpus` is the one it is pinned to."""
        link = Link(
            self.connect(), self.manifest, f"{name}/x", shard_order(CONFIG.data.shards, CONFIG.seed, corpus), self.clock
        )
        arrivals = link.join()
        batches = Batches(open_corpus(corpus or "public").train, CONFIG, link.lease)
        island = Island(name, self.manifest, compiled(CONFIG), batches, link, arrivals, self.clock, incarnation="x")
        island.beat("joining")
        link.pump()
        self.islands.append(island)
        return island

    def play(self, steps: int) -> None:
        for _ in range(steps):
            for island in self.islands:
                self.clock.now += 1.0
                island.link.pump()
                island.boundary()
                island.link.pump()
                self.merger.turn(0.0)
                island.advance()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, this machine's corpora, and `runs`, a record in which two islands' contributions were
    merged with each other's: one island trained on the run's corpus, and one on its own.
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
        run.play(STEPS)
        run.merger.finish()
    return folder


def _stay_in_a_copy_of(folder: Path, present: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`present` holds all that is in the folder, and nothing is compiled that is already."""
    shutil.copytree(folder, present, dirs_exist_ok=True)
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(present / "data"))
    monkeypatch.setattr(inner, "compile_steps", lambda model, config: compiled(CONFIG))
    monkeypatch.setattr(replay, "keep_compiled", lambda: None)


@pytest.fixture
def data(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, as the present folder; where its corpora are. Nothing is compiled that is already."""
    _stay_in_a_copy_of(recorded, tmp_path, monkeypatch)
    return tmp_path / "data"


def replayed(capsys: pytest.CaptureFixture[str]) -> tuple[int, Mapping[str, Any]]:
    """Exit status and the JSON object."""
    capsys.readouterr()
    status = replay.main(replay.ReplayOptions("taped", json=True))
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("data")
def test_an_island_is_trained_again_on_its_own_text(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = records.read(RECORD).rounds
    who = [member.island for entry, _ in rounds.values() for member in entry.members]
    assert min(who.count("open"), who.count("pinned")) >= 2, "nothing to find out"
    status, found = replayed(capsys)
    assert (status, found["first_difference"], found["same"]) == (0, "", True)
    assert found["islands_from_payloads"] == {}
    assert found["trained_again"] == found["contributions"] == len(who)
    assert [f["digest"] for f in found["fragments"]] == [f["recorded"] for f in found["fragments"]]


def test_where_its_text_is_not_it_goes_by_its_payloads(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "site")
    status, found = replayed(capsys)
    assert (status, found["same"], found["rounds"]) == (0, True, found["rounds_recorded"])
    assert found["islands_from_payloads"].keys() == {"pinned/x"}
    assert 0 < found["trained_again"] < found["contributions"]
    replay.main(replay.ReplayOptions("taped"))
    assert "pinned/x goes by its recorded payloads: there is no corpus 'site'" in "".join(capsys.readouterr())


def test_another_text_of_that_name_is_a_difference_that_says_so(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(data / "site")
    prepared("site", "Another text of the same name.\n" * 5000)
    status, found = replayed(capsys)
    assert (status, found["same"]) == (1, False)
    assert found["first_difference"].startswith("contribution pinned/x/")
    assert "is the corpus 'site' here the one" in found["first_difference"]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", ["..", "../elsewhere", "x" * 78, "-"])
def test_a_corpus_that_no_machine_can_have_is_missed(name: str) -> None:
    """Actions come from outside."""
    record = records.read(RECORD)
    record.actions = [
        replace(actions, text=actions.text.replace(" dsite/", f" d{name}/")) for actions in record.actions
    ]
    found = replay.again(record, islands=True)
    assert (found["same"], found["first_difference"]) == (True, "")
    assert found["islands_from_payloads"].keys() == {"pinned/x"}


# -- a run that was steered -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steered(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of a run whose outer rate was steered twice and whose merger was replaced in between."""
    folder = tmp_path_factory.mktemp("steered")
    shutil.copytree(recorded / "data", folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))
        run = Recorded()
        run.join("open")
        run.play(4)
        run.connect().reader.steer({"outer.learning_rate": "0.25", "sync.quorum": "2"})
        run.play(4)
        checkpointer = MergerFolder(RECORD.parent).checkpointer(run.connect(), run.manifest, 1e9, at_once)
        run.merger = Merger(run.connect(), run.clock, "merger", live_poll_seconds=0.0, checkpointer=checkpointer)
        assert run.merger.acquire()
        run.merger.load()
        run.play(4)
        run.connect().reader.steer({"outer.learning_rate": ""})
        run.play(6)
        run.merger.finish()
    return folder


@pytest.fixture
def _steered_data(steered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of that as the present folder."""
    _stay_in_a_copy_of(steered, tmp_path, monkeypatch)


@pytest.mark.usefixtures("_steered_data")
def test_a_steered_run_replays_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    tape = [entry for entry, _ in records.read(RECORD).rounds.values()]
    changes = [entry.steered for entry in sorted(tape, key=lambda entry: entry.round) if entry.steered]
    assert changes == ["outer.learning_rate=0.25 sync.quorum=2", "outer.learning_rate=0.7"]
    assert len({entry.epoch for entry in tape}) == 2
    status, found = replayed(capsys)
    assert (status, found["first_difference"], found["same"]) == (0, "", True)
    assert found["trained_again"] == found["contributions"] > 0
    assert found["rounds"] == len(tape)


@pytest.mark.usefixtures("_steered_data")
def test_what_was_steered_is_in_the_bits() -> None:
    record = records.read(RECORD)
    record.rounds = {number: (replace(entry, steered=""), ds) for number, (entry, ds) in record.rounds.items()}
    found = replay.again(record, islands=False)
    assert not found["same"]
    assert "digest" in found["first_difference"]


@pytest.mark.usefixtures("_steered_data")
def test_another_rule_is_steered_as_the_run_was_unless_it_is_what_was_steered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_bits_per_byte", lambda run: 0.0)
    record = records.read(RECORD)
    assert replay.what_if(record, CONFIG)["same"], "the run's own rate, steered as it was"
    assert replay.main(replay.ReplayOptions("taped", set=("outer.lr=0.7",), json=True)) == 0
    all_the_time = json.loads(capsys.readouterr().out)
    assert not all_the_time["same"], "the run's own rate all the time"
    assert all_the_time["rounds"] == len(record.rounds)


# -- which text it was ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "corpus"),
    [
        (["join:0,0", "d3:0:0:0", "n1"], ""),
        (["join:0,0", "dsite/3:0:0:0", "n1", "dsite/1:2:0:0"], "site"),
        (["join:0,0", "d3:2199023255552:0:0", "n1", "dsite/3:0:0:0!"], "site"),  # it waited for its first lease
        (["whole:a/before@9", "n1"], "site"),
        (["whole:a/round@9", "n1"], ""),
        (["whole:a/nobody@9", "n1"], ""),
    ],
)
def test_the_shards_name_the_corpus(mine: list[str], corpus: str) -> None:
    others = {"a/before": ["join:0,0", "dsite/0:0:0:0", "n9"], "a/round": ["whole:a/x@1"]}
    assert corpus_of("a/x", {who: list(map(parse, words)) for who, words in {**others, "a/x": mine}.items()}) == corpus


def test_actions_that_name_two_corpora_are_refused() -> None:
    with failing(ActionError):
        corpus_of("a/x", {"a/x": [BeginPass("one/1:0:0:0"), BeginPass("two/1:0:0:0")]})
