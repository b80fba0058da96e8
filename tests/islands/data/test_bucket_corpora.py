"""Corpora in a bucket: prepared on one machine, downloaded once by another, and verified."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from archipelago.broker.buckets.folder import BucketError, BucketFolder
from archipelago.broker.errors import DataError
from archipelago.islands.data.corpus import data_folder, open_corpus
from archipelago.ops.launch.prepare import PrepareOptions, main
from tests.broker.buckets.faulty_bucket import FaultyFileSystem
from tests.failing import failing

TEXT = "".join(f"line {number} of a text that islands train on\n" for number in range(3000))


@pytest.fixture
def corpora(bucket: BucketFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BucketFolder:
    """The folder of corpora in the bucket, with one corpus. This machine has forgotten it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ARCHIPELAGO_DATA", bucket.address)
    (tmp_path / "mine.txt").write_text(TEXT)
    assert main(PrepareOptions(str(tmp_path / "mine.txt"))) == 0
    forget()
    return bucket


def forget() -> None:
    """Do as a machine that has downloaded nothing."""
    shutil.rmtree(data_folder())


def test_another_machine_downloads_a_corpus_once(corpora: BucketFolder, tmp_path: Path) -> None:
    assert corpora.tree().keys() == {"mine/text.bin", "mine/corpus.json"}
    for stray in ("notes.txt", "mine/notes/more.txt", "empty/text.bin"):
        corpora.write(stray, b"by hand")
    with failing(DataError, "data.missing"):
        open_corpus("other")
    opened = open_corpus("mine")
    assert bytes(opened.train) + bytes(opened.valid) + bytes(opened.test) == TEXT.encode()
    FaultyFileSystem.requests.clear()
    assert open_corpus("mine").identity == opened.identity
    assert not FaultyFileSystem.requests
    assert main(PrepareOptions(str(tmp_path / "mine.txt"), tokenizer="bpe:300")) == 0
    forget()
    assert open_corpus("mine-bpe300").open_tokenizer().vocabulary == 300


def test_an_upload_that_is_cut_off_is_no_corpus(corpora: BucketFolder, tmp_path: Path) -> None:
    """The same command completes it."""

    def fault(request: str, path: str) -> None:
        if request == "put" and path.endswith("corpus.json"):
            raise ConnectionError("reset")

    FaultyFileSystem.fault = staticmethod(fault)
    options = PrepareOptions(str(tmp_path / "mine.txt"), name="other")
    with failing(BucketError):
        main(options)
    FaultyFileSystem.fault = staticmethod(lambda request, path: None)
    local = data_folder()
    shutil.move(local, local.with_name("aside"))
    with failing(DataError, "data.missing"):
        open_corpus("other")
    shutil.move(local.with_name("aside"), local)
    assert main(options) == 0
    forget()
    assert open_corpus("other").train.size


def test_a_different_corpus_of_the_name_is_not_replaced_and_damage_is_found(
    corpora: BucketFolder, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text(TEXT.upper())
    with failing(DataError, "data.taken"):
        main(PrepareOptions(str(tmp_path / "mine.txt")))
    forget()
    assert bytes(open_corpus("mine").train[:4]) == b"line"
    forget()
    corpora.child("mine").write("text.bin", TEXT.swapcase().encode())
    with failing(DataError, "data.damaged"):
        open_corpus("mine")
    assert not (data_folder() / "mine").exists()
