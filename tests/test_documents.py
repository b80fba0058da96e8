"""README, CONTRIBUTING, CHANGELOG and docs: links, anchors, paths and verbs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from archipelago.ops.cli import VERBS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?:\]\(|\b(?:src|srcset)=\")([^)\s\"]+)[)\"]")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
#: A command line: at the start of code, after a prompt, after `&&`, or after the folder that holds the program.
_VERB = re.compile(r"(?:^|\$ |&& |bin/)archipelago +([a-z][\w-]*)", re.MULTILINE)
_PATH = re.compile(r"^(?:broker|islands|merger|ops|tests|docs)/[\w./-]*$")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    """Return the page's Markdown."""
    return page.read_text(encoding="utf-8")


def links_of(page: Path) -> list[str]:
    """Return the targets of the page's links and pictures, without those that its code blocks show."""
    return _LINK.findall(_CODE_BLOCK.sub("", text_of(page)))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the page's headings."""
    headings = _HEADING.findall(_CODE_BLOCK.sub("", text_of(page)))
    plain = [re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def code_of(page: Path) -> list[str]:
    """Return the page's code, blocks and spans."""
    return [block or span for block, span in _CODE.findall(text_of(page))]


@pages
def test_links_and_anchors_exist(page: Path) -> None:
    for link in links_of(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {link}"


@pages
def test_verbs_exist(page: Path) -> None:
    used = {verb for code in code_of(page) for verb in _VERB.findall(code)}
    assert used <= set(VERBS), f"{page.name} names {used - set(VERBS)}"


@pages
def test_paths_in_this_repository_exist(page: Path) -> None:
    """A log describes the past, so its paths may be gone."""
    if page.name in ("log.md", "CHANGELOG.md"):
        return
    named = {code for code in code_of(page) if _PATH.fullmatch(code)}
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing, f"{page.name} names {missing}"


def test_the_patterns_still_match() -> None:
    readme = ROOT / "README.md"
    assert {"docs/dash-light.png", "docs/dash-dark.png"} <= set(links_of(readme))
    assert "two-commands" in anchors_of(readme)
    assert {"init", "merger", "island"} <= {verb for code in code_of(readme) for verb in _VERB.findall(code)}
    assert len(PAGES) >= 8
