"""Tests of the pages that `docs/generate.py` writes, and of their form on the site."""

from __future__ import annotations

import re

import pytest

from archipelago.broker.failpoints import FAILPOINTS
from archipelago.islands.models.llama import DENSE
from archipelago.islands.models.registry import MODELS
from docs.generate import FOLDER, PAGES, RECORDED, ROOT
from docs.site import on_page_content

#: Texts with the form of a code: modules, tensors and a file of the system.
OTHERS = {"broker.config", "broker.errors", "norm.scale", "optimizer.state", "cpu.max"}
_CODE, _ANCHOR = re.compile(r'"([a-z]+\.[a-z][a-z-]+)"'), re.compile(r'<a id="([^"]+)">')
_FILE = re.compile(r"^archipelago\.|\.(acl|bin|conf|css|html|js|json|jsonl|key|lock|log|pem|py|safetensors|toml)$")


def lines_of(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith(RECORDED)]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_follow_from_the_code(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert lines_of(written) == lines_of(PAGES[name]()), "the code has changed: run `.venv/bin/python docs/generate.py`"


def test_every_code_in_the_source_is_on_the_page() -> None:
    """A text with the form of a code is one, unless it is known to name something else."""
    paths = [path for folder in ("broker", "islands", "merger", "ops") for path in (ROOT / folder).rglob("*.py")]
    texts = {text for path in paths for text in _CODE.findall(path.read_text(encoding="utf-8"))}
    codes, settings = (
        set(_ANCHOR.findall((FOLDER / f"reference/{name}.md").read_text(encoding="utf-8")))
        for name in ("codes", "settings")
    )
    unknown = texts - codes - settings - set(FAILPOINTS) - OTHERS
    assert {text for text in unknown if not _FILE.search(text)} == set()


def test_the_table_of_models_has_their_sizes_and_rates() -> None:
    page = (FOLDER / "reference/index.md").read_text(encoding="utf-8").replace(",", "")
    table = page.partition("## Models")[2].partition("## ")[0]
    rows = {name: rest.split(" | ") for name, rest in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE)}
    assert rows.keys() == MODELS.keys()
    assert {name: float(row[-1]) for name, row in rows.items()} == {n: m.learning_rate for n, m in MODELS.items()}
    for name, size in DENSE.items():
        assert rows[name][:4] == [str(each) for each in (size.width, size.layers, size.heads, size.hidden)]


def test_a_line_of_the_site_does_not_end_inside_a_flag() -> None:
    page = f"<p>a-b <code>up --one-process &lt;a&gt;</code> <code>{'long-' * 9}</code></p><code class='x'>--json</code>"
    assert on_page_content(page) == page.replace("--one-process", '<span class="word">--one-process</span>')


def test_examples_of_verbs_are_blocks_that_are_copied_without_prompts() -> None:
    blocks = re.findall(r"```(\w*)\n\$ archipelago", PAGES["reference/verbs.md"]())
    assert set(blocks) == {"console"}
