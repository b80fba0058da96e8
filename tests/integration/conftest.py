"""A small corpus of real text, for runs of a second or two."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from archipelago.broker.config import RunConfig
from archipelago.islands.data.corpus import OpenCorpus
from archipelago.islands.data.preparation import prepare_text
from tests.small import SMALL


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare `small-text` from modules of the standard library, and return the folder."""
    folder = tmp_path_factory.mktemp("corpora")
    source = tmp_path_factory.mktemp("source")
    for name in ("argparse.py", "ast.py", "datetime.py", "inspect.py", "pathlib.py", "typing.py"):
        path = Path(sysconfig.get_path("stdlib")) / name
        if path.exists():
            (source / name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        prepare_text(source, "small-text")
    return folder


@pytest.fixture
def corpus(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> OpenCorpus:
    """Open the small corpus, and let processes of the test find it, too."""
    from archipelago.islands.data.corpus import open_corpus

    monkeypatch.setenv("ARCHIPELAGO_DATA", str(corpus_folder))
    return open_corpus("small-text")


@pytest.fixture
def config() -> RunConfig:
    """Return the config of a run of a second or two."""
    return SMALL
