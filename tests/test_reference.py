"""Tests of the pages of `docs/reference` that `docs/generate.py` writes."""

from __future__ import annotations

import pytest

from docs.generate import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_follow_from_the_code(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "the code has changed: run `.venv/bin/python docs/generate.py`"
