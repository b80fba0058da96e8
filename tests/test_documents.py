"""Tests of README, CONTRIBUTING, CHANGELOG and docs: all links, anchors, paths and verbs in them exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from archipelago.broker.codecs import CODECS
from archipelago.broker.redis.keys import Keys
from archipelago.islands.models.registry import MODELS
from archipelago.merger.merge_rules import MERGE_RULES
from archipelago.merger.outer import OUTER
from archipelago.ops.commands import VERBS
from archipelago.ops.verbs import Group, parse

ROOT = Path(__file__).parents[1]
#: These pages describe the past.
HISTORY = {"CHANGELOG.md", "log.md"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?:\]\(|\b(?:src|srcset)=\")([^)\s\"]+)[)\"]")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
#: A command line: at the start of code, after a prompt, after `&&`, or after the folder that holds the program.
_VERB = re.compile(r"(?:^|\$ |&& |bin/)archipelago +([a-z][\w-]*)(?: +([a-z][\w-]*))?", re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?:\S+=\S+ )?archipelago +(.*)$", re.MULTILINE)
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
    """Return the code blocks and code spans of the page."""
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


def verbs_of(page: Path) -> set[tuple[str, str]]:
    """Return the verbs that the page's code uses, each with the word after it."""
    return {found for code in code_of(page) for found in _VERB.findall(code)}


@pages
def test_verbs_exist(page: Path) -> None:
    """The log and the changelog are not checked, because they name commands that have since changed."""
    if page.name in HISTORY:
        return
    for verb, word in verbs_of(page):
        assert verb in VERBS, f"{page.name} names `archipelago {verb}`"
        if word and isinstance(group := VERBS[verb], Group):
            assert word in importlib.import_module(group.module).VERBS, f"{page.name} names `{verb} {word}`"


def command_lines_of(page: Path) -> list[list[str]]:
    """Return the arguments of every command line in the page's code blocks, as far as the line names all of them."""
    text = "\n".join(_CODE_BLOCK.findall(text_of(page))).replace("\\\n", " ")
    lines = [re.split(r" +#| \|", line)[0] for line in _COMMAND.findall(text)] + commands_in(text_of(page))
    return [shlex.split(line) for line in lines if "…" not in line]


def commands_in(text: str) -> list[str]:
    """Return the arguments of the commands that a sentence quotes, if they are more than a verb."""
    quoted = re.findall(r"`archipelago ([a-z]+ [^`]+)`", text)
    return [words for words in quoted if not re.fullmatch(r"(?:bench|simulate|chaos) [a-z]+", words)]


def messages_of(path: Path) -> list[str]:
    """Return the texts in a source file. Those with values in them are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    formatted = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in formatted]
    return [node.value for node in texts if isinstance(node.value, str)]


def require_parsable(args: list[str], where: str) -> None:
    """Fail unless the verb's own parser reads these arguments."""
    verb, program, rest = VERBS[args[0]], f"archipelago {args[0]}", args[1:]
    while isinstance(verb, Group):
        verb, program, rest = importlib.import_module(verb.module).VERBS[rest[0]], f"{program} {rest[0]}", rest[1:]
    options = getattr(importlib.import_module(verb.module), verb.options)
    try:
        parse(options, program, rest)
    except SystemExit as left:
        assert left.code == 0, f"{where} has a command line with an error: {' '.join(args)}"


@pytest.mark.full
@pages
def test_command_lines_can_be_parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in HISTORY:
        return
    monkeypatch.chdir(ROOT)  # some name files of this repository
    for args in command_lines_of(page):
        require_parsable(args, page.name)


@pytest.mark.full
def test_command_lines_in_messages_can_be_parsed() -> None:
    sources = [path for folder in ("broker", "islands", "merger", "ops") for path in (ROOT / folder).rglob("*.py")]
    found = {(line, path) for path in sources for text in messages_of(path) for line in commands_in(text)}
    assert len(found) > 20
    for line, path in sorted(found):
        if "…" not in line and not line.startswith("prepare --tokenizer"):  # that names the option only
            require_parsable(shlex.split(line.replace("%s", "NAME")), str(path.relative_to(ROOT)))


@pages
def test_paths_in_this_repository_exist(page: Path) -> None:
    if page.name in HISTORY:
        return
    named = {code for code in code_of(page) if _PATH.fullmatch(code)}
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize(
    "names",
    [VERBS, CODECS, MODELS, MERGE_RULES, OUTER, [key for name, key in vars(Keys("RUN")).items() if name != "tag"]],
    ids=["verbs", "codecs", "models", "merge rules", "outer rules", "keys"],
)
def test_the_reference_lists_all_names(names: Iterable[str]) -> None:
    listed = {word for code in code_of(ROOT / "docs" / "reference.md") for word in (code, *code.split())}
    assert not set(names) - listed


def test_documents_that_the_code_names_exist() -> None:
    for folder in ("broker", "islands", "merger", "ops", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            named = re.findall(r"\bdocs/[\w/.-]+\.md", path.read_text(encoding="utf-8"))
            missing = {name for name in named if not (ROOT / name).exists()}
            assert not missing, f"{path.relative_to(ROOT)} names {missing}"


def test_the_patterns_still_match() -> None:
    readme = ROOT / "README.md"
    assert {"docs/dash-light.png", "docs/dash-dark.png"} <= set(links_of(readme))
    assert "two-commands" in anchors_of(readme)
    assert {("init", ""), ("simulate", "tables"), ("bench", "study")} <= verbs_of(readme)
    assert len(PAGES) >= 8
    assert ["invite", "oslo", "--role", "island", "--run", "first"] in command_lines_of(
        ROOT / "docs" / "guide" / "two-sites.md"
    )
