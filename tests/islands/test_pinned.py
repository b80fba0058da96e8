"""Pinned text, which stays at its site. Only islands there read it; the run knows its name and digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from archipelago.broker.errors import DataError, MismatchError
from archipelago.broker.memory.transport import MemoryBroker
from archipelago.broker.transport import Transport
from archipelago.islands.creation import describe
from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text
from archipelago.islands.data.ranges import range_order
from archipelago.islands.tasks.ours import register_text, training_text
from tests import samples
from tests.harness import tiny
from tests.harness.tiny import TinyRun
from tests.small import SMALL

CONFIG = replace(tiny.CONFIG, data=replace(tiny.CONFIG.data, sequence_length=32))
PINNED = range_order(CONFIG.data.shards, CONFIG.seed, "site")


@pytest.fixture
def run() -> TinyRun:
    return TinyRun(tiny.manifest(config=CONFIG))


def test_pinned_and_public_ranges_have_different_readers(run: TinyRun) -> None:
    public, pinned, second = run.island("a"), run.island("p", shards=PINNED), run.island("q", shards=PINNED)
    windows = tiny.TEXT.size // CONFIG.data.sequence_length // CONFIG.data.shards
    begun: dict[str, list[str]] = {"a": [], "p": [], "q": []}
    for _ in range(3 * windows // CONFIG.data.batch_size):  # a little more than three passes over a range each
        for island in (public, pinned, second):
            run.play(island, 1)
            (name,) = island.batches.held()[-1:]
            if begun[island.name][-1:] != [name]:
                begun[island.name].append(name)
    assert {name.partition("/")[0] for which in "pq" for name in begun[which]} == {"site"}
    assert all("/" not in name for name in begun["a"])
    assert len(begun["a"]) >= 3
    assert len(begun["p"]) + len(begun["q"]) >= 5
    # Each of the two islands first reads two different ranges of the four.
    assert not set(begun["p"][:2]) & set(begun["q"][:2])
    cursors = run.transport.reader.cursors()
    assert {name for name in cursors if "/" in name} <= set(PINNED)
    assert max(cursors[name] for name in PINNED if name in cursors) >= (1, 0)
    assert all(pass_number <= 2 for pass_number, _ in cursors.values())
    members = {member.island for entry in run.transport.reader.tape(1000) for member in entry.members}
    assert members == {"a", "p", "q"}  # it receives the progress of the others


# -- the name -------------------------------------------------------------------------------------------------------


def prepared(folder: Path, text: str, patch: pytest.MonkeyPatch, name: str = "site") -> None:
    """Make `folder` the folder of this machine's corpora, and create a corpus of that name."""
    source = folder.parent / f"{folder.name}.txt"
    source.write_text(text)
    patch.setenv("ARCHIPELAGO_DATA", str(folder))
    prepare_text(source, name)


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """Return a run on a corpus `public`. Other machines may have another corpus of that name."""
    prepared(tmp_path / "here", "the public text\n" * 8000, monkeypatch, "public")
    transport = MemoryBroker().connect("pinned")
    manifest = describe("pinned", SMALL, open_corpus("public").identity)
    transport.create(manifest, samples.first_snapshots(manifest))
    return transport


def text_of(transport: Transport, pinned: str | None) -> OpenCorpus:
    """Return the text that an island on this machine would train on."""
    corpus = training_text(transport.reader.manifest(), pinned)
    register_text(corpus, transport, pinned)
    return corpus


def test_the_first_pinned_text_registers_its_name(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the text of one site\n" * 8000
    prepared(tmp_path / "one", text, monkeypatch)  # a site without the run's own corpus
    first = text_of(transport, "site")
    assert first.name == "site"
    prepared(tmp_path / "same", text, monkeypatch)
    assert text_of(transport, "site").digest == first.digest
    prepared(tmp_path / "other", text.upper(), monkeypatch)
    with pytest.raises(MismatchError) as raised:
        text_of(transport, "site")
    assert "site" in raised.value.subject
    assert raised.value.run_value == first.digest
    assert raised.value.worker_value not in (first.digest, "")
    prepared(tmp_path / "other", text.upper(), monkeypatch, "site-2")
    assert text_of(transport, "site-2").digest == raised.value.worker_value


def test_another_text_of_the_runs_name_or_a_missing_pinned_text_is_refused(
    transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = transport.reader.manifest()
    assert text_of(transport, None).identity == manifest.corpus
    with pytest.raises(DataError):
        text_of(transport, "nowhere")
    prepared(tmp_path / "there", "another public text\n" * 8000, monkeypatch, "public")
    with pytest.raises(MismatchError) as raised:
        text_of(transport, None)
    assert "public" in raised.value.subject
