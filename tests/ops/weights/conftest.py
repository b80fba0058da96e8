"""Fixtures of tests of weights: two corpora, commands, and an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from archipelago.islands.data.preparation import prepare_text
from archipelago.ops.weights.export import write
from tests.learned import learned
from tests.ops.weights.small_runs import LINES, VOCABULARY, found_of


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two corpora: `small`, in bytes, and `tokens`."""
    made, source = tmp_path_factory.mktemp("corpora"), tmp_path_factory.mktemp("source") / "text"
    source.write_text("".join(LINES), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(made))
        prepare_text(source, "small")
        prepare_text(source, "tokens", learned(tuple(LINES), VOCABULARY))
    return made


@pytest.fixture(autouse=True)
def _corpora(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(folder))


@pytest.fixture(scope="package")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a small run. Tests that change it copy it first."""
    out = tmp_path_factory.mktemp("exported") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCHIPELAGO_DATA", str(folder))
        write(found_of(), out, "float32")
    return out
