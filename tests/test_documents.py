"""README and docs: whatever they link to in this repository is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    files = [link for link in links if link and "://" not in link]
    missing = [link for link in files if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_a_page_with_pictures_is_among_them() -> None:
    """Else the pattern has stopped matching."""
    assert "docs/parity.png" in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
