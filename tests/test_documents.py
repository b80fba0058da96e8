"""Tests of README, CONTRIBUTING, CHANGELOG and docs: all links, anchors, paths and verbs in them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from archipelago.broker.codecs import CODECS
from archipelago.broker.redis.keys import Keys
from archipelago.islands.models.registry import MODELS
from archipelago.merger.merge_rules import MERGE_RULES
from archipelago.merger.outer import OUTER
from archipelago.ops.commands import VERBS, VerbGroup, parse

ROOT = Path(__file__).parents[1]
#: These pages describe the past.
HISTORY = {"CHANGELOG.md", "log.md"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PRESENT = [page for page in PAGES if page.name not in HISTORY]
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?:\]\(|\b(?:src|srcset)=\")([^)\s\"]+)[)\"]")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_ANCHOR = re.compile(r'<a id="([^"]+)">')
_CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
#: A command line: at the start of code, after a prompt, after `&&`, or after the folder that holds the program.
_VERB = re.compile(r"(?:^|\$ |&& |bin/)archipelago +([a-z][\w-]*)(?: +([a-z][\w-]*))?", re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?:\S+=\S+ )?archipelago +(.*)$", re.MULTILINE)
_PATH = re.compile(r"^(?:broker|islands|merger|ops|tests|docs)/[\w./-]*$")


def text_of(page: Path) -> str:
    """Return the page's Markdown."""
    return page.read_text(encoding="utf-8")


def links_of(page: Path) -> list[str]:
    """Return the targets of the page's links and pictures, without those that its code blocks show."""
    return _LINK.findall(_CODE_BLOCK.sub("", text_of(page)))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the page: those that GitHub gives its headings, and those in its text."""
    text = _CODE_BLOCK.sub("", text_of(page))
    headings, named = _HEADING.findall(text), set(_ANCHOR.findall(text))
    plain = [re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return named | {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def code_of(page: Path) -> list[str]:
    """Return the code blocks and code spans of the page."""
    return [block or span for block, span in _CODE.findall(text_of(page))]


def test_links_and_anchors_exist() -> None:
    for page, link in [(each, link) for each in PAGES for link in links_of(each) if "://" not in link]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links to {link}"


def verbs_of(page: Path) -> set[tuple[str, str]]:
    """Return the verbs that the page's code uses, each with the word after it."""
    return {found for code in code_of(page) for found in _VERB.findall(code)}


def test_verbs_exist() -> None:
    for page in PRESENT:
        for verb, word in verbs_of(page):
            assert verb in VERBS, f"{page.name} names `archipelago {verb}`"
            if word and isinstance(group := VERBS[verb], VerbGroup):
                assert word in group.verbs, f"{page.name} names `{verb} {word}`"


def command_lines_of(page: Path) -> list[list[str]]:
    """Return the arguments of every command line in the page's code blocks, as far as the line names all of them."""
    text = "\n".join(_CODE_BLOCK.findall(text_of(page))).replace("\\\n", " ")
    lines = [re.split(r" +#| \|", line)[0] for line in _COMMAND.findall(text)] + commands_in(text_of(page))
    return [shlex.split(line) for line in lines if "…" not in line]


def commands_in(text: str) -> list[str]:
    """Return the arguments of the commands that a sentence quotes, if they are more than a verb."""
    quoted = re.findall(r"`archipelago ([a-z]+ [^`]+)`", text)
    return [words for words in quoted if not re.fullmatch(r"(?:bench|simulate|chaos) [a-z]+", words)]


def require_parsable(args: list[str], where: str) -> None:
    """Fail unless the verb's own parser reads these arguments."""
    verb, program, rest = VERBS[args[0]], f"archipelago {args[0]}", args[1:]
    while isinstance(verb, VerbGroup):
        verb, program, rest = verb.verbs[rest[0]], f"{program} {rest[0]}", rest[1:]
    options = verb.options
    try:
        parse(options, program, rest)
    except SystemExit as left:
        assert left.code == 0, f"{where} has a command line with an error: {' '.join(args)}"


@pytest.mark.full
def test_command_lines_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/ops/test_help.py` checks the command lines in messages."""
    monkeypatch.chdir(ROOT)  # some name files of this repository
    for page in (each for each in PRESENT if each.name != "codes.md"):
        for args in command_lines_of(page):
            require_parsable(args, page.name)


def test_paths_that_pages_and_the_code_name_exist() -> None:
    named = {(page.name, code) for page in PRESENT for code in code_of(page) if _PATH.fullmatch(code)}
    for folder in ("broker", "islands", "merger", "ops", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            found = re.findall(r"\bdocs/[\w/.-]+\.md", path.read_text(encoding="utf-8"))
            named |= {(str(path.relative_to(ROOT)), name) for name in found}
    assert {(where, name) for where, name in named if not (ROOT / name).exists()} == set()


def test_the_reference_lists_all_names() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    listed = {word for page in pages for code in code_of(page) for word in (code, *code.split())}
    keys = [key for name, key in vars(Keys("RUN")).items() if name != "tag"]
    for names in (VERBS, CODECS, MODELS, MERGE_RULES, OUTER, keys):
        assert set(names) - listed == set(), "add a row to docs/reference/index.md"


def test_the_patterns_still_match() -> None:
    readme = ROOT / "README.md"
    assert {"docs/dash-light.png", "docs/dash-dark.png"} <= set(links_of(readme))
    assert "several-machines" in anchors_of(readme)
    assert {("init", ""), ("simulate", "tables"), ("bench", "study")} <= verbs_of(readme)
    assert len(PAGES) >= 8
    assert ["invite", "oslo", "--role", "island", "--run", "first"] in command_lines_of(
        ROOT / "docs" / "guide" / "two-sites.md"
    )
