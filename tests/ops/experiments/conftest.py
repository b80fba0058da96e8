"""Fixtures of the tests of experiments: a folder with a small study."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.experiments.trials import BASE, STUDY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "bench"
    found.mkdir()
    (found / "base.toml").write_text(BASE, encoding="utf-8")
    (found / "rates.toml").write_text(STUDY, encoding="utf-8")
    return found
