"""`archipelago replay`: the rounds of a recorded run are merged again, by its own rules and by others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.control import STEPS as STEPS_FIELD
from archipelago.islands.data.batches import Batches
from archipelago.islands.data.corpus import open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.ranges import range_order
from archipelago.islands.tasks.ours import first_snapshots, our_work
from archipelago.islands.worker import Island
from archipelago.merger import record as records
from archipelago.merger.beside import at_once
from archipelago.merger.storage import MergerFolder
from archipelago.ops.experiments import replay
from tests.harness.merger_run import finish
from tests.harness.played import PlayedRun
from tests.small import SMALL, compiled

RECORD = Path("runs") / "taped" / "merger" / "record"
CONFIG = replace(SMALL, record=True, sync=replace(SMALL.sync, interval=6, fragments=2, grace=0.0))


class Recorded(PlayedRun):
    """A recorded run in virtual time, in the folder `runs`. Its islands step in turn."""

    def __init__(self) -> None:
        manifest = our_work(CONFIG, open_corpus("public")).describe("taped")
        first = first_snapshots(manifest)
        super().__init__(manifest, first)
        MergerFolder(RECORD.parent).recorder.begin(manifest, first)
        self.replace_merger()
        self.islands: list[Island] = []

    def replace_merger(self) -> None:
        """Let another merger go on, which records."""
        checkpointer = MergerFolder(RECORD.parent).checkpointer(self.transport, self.manifest, 1e9, at_once)
        self.merger = self.new_merger(checkpointer=checkpointer)

    def join(self, name: str) -> None:
        link = self.link(f"{name}/x", range_order(CONFIG.data.shards, CONFIG.seed))
        arrivals = link.join()
        batches = Batches(open_corpus("public").train, CONFIG, link.lease)
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
    """A folder with `runs`, the record of a run of two islands.

    Meanwhile the outer rate was steered twice, another merger took over, and the run was extended.
    """
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ARCHIPELAGO_DATA", str(folder / "data"))
        Path("text").write_text("What everyone may read, line by line.\n" * 4000)
        prepare_text(Path("text"), "public")
        run = Recorded()
        run.join("a")
        run.join("b")
        run.step_in_turn(4)
        run.transport.reader.steer({"outer.learning_rate": "0.25", "sync.quorum": "2"})
        run.step_in_turn(4)
        run.replace_merger()
        run.step_in_turn(4)
        run.transport.reader.steer({"outer.learning_rate": "", STEPS_FIELD: str(2 * CONFIG.inner.steps)})
        run.step_in_turn(6)
        finish(run.merger)
    return folder


@pytest.fixture
def data(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `recorded` the working directory."""
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(replay, "keep_compiled", lambda: None)


@pytest.mark.usefixtures("data")
def test_the_rounds_are_merged_again_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    tape = sorted((entry for entry, _ in records.read(RECORD).rounds.values()), key=lambda entry: entry.round)
    who = [member.island for entry in tape for member in entry.members]
    assert min(who.count("a"), who.count("b")) >= 2, "both islands must contribute"
    longer = f"{STEPS_FIELD}={2 * CONFIG.inner.steps}"
    changes = [set(entry.steered.split()) for entry in tape if entry.steered]
    assert changes == [{"outer.learning_rate=0.25", "sync.quorum=2"}, {"outer.learning_rate=0.7", longer}]
    assert len({entry.epoch for entry in tape}) == 2, "another merger took over"
    assert replay.main(replay.ReplayOptions("taped", json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first_difference"], found["same"]) == ("", True)
    assert (found["rounds"], found["rounds_recorded"]) == (len(tape), len(tape))
    assert found["contributions"] == len(who)
    assert [f["digest"] for f in found["fragments"]] == [f["recorded"] for f in found["fragments"]]
    assert replay.main(replay.ReplayOptions("taped")) == 0
    assert f"{len(tape)} of {len(tape)} rounds" in capsys.readouterr().err


@pytest.mark.usefixtures("data")
def test_a_record_without_its_steering_differs() -> None:
    record = records.read(RECORD)
    record.rounds = {number: (replace(entry, steered=""), ds) for number, (entry, ds) in record.rounds.items()}
    found = replay.repeat([record])
    assert not found["same"]
    assert found["first_difference"]
