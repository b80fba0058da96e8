"""Tests of the pages that `docs/generate.py` writes."""

from __future__ import annotations

import pytest

from docs.generate import FOLDER, PAGES, RECORDED


def lines_of(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith(RECORDED)]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_follow_from_the_code(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert lines_of(written) == lines_of(PAGES[name]()), "the code has changed: run `.venv/bin/python docs/generate.py`"
