"""The help of each verb: examples that its own parser reads, whole sentences, and no marks of the parser's library."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipelago.broker.config import RunConfig, flat
from archipelago.ops import commands
from archipelago.ops.commands import EXAMPLES, VERBS, examples_of, run
from archipelago.ops.watch.status import COLUMNS, StatusOptions
from docs.generate import every_verb

WATCH_PAGE = Path(__file__).parents[2] / "docs" / "guide" / "watch.md"


ALL = dict(every_verb(VERBS))


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run([*words.split(), "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_parser_of_each_verb_reads_its_examples() -> None:
    parsed = list[str]()
    for words, verb in ALL.items():
        options, found = (
            verb.options,
            examples_of(f"archipelago {words}"),
        )
        assert found and callable(verb.module.main), words
        for command in found:
            commands.parse(options, f"archipelago {words}", shlex.split(command)[1 + len(words.split()) :])
        parsed += found
    assert sorted(parsed) == sorted(EXAMPLES)


def test_help_is_readable_and_ends_with_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ALL:
        text = help_of(words, capsys)
        assert text.startswith(f"usage: archipelago {words} ")
        assert "--json" in text or words == "completion", words  # whose output is a script
        assert "{None}" not in text and not re.search(r"default:[\s│]*None", text), words
        assert text.rstrip().endswith(list(examples_of(f"archipelago {words}").values())[-1])
        frames = [line for line in text.splitlines() if line.startswith(("│", "╭", "╰"))]
        assert len({len(line) for line in frames}) <= 1, f"the frame of {words} is whole"


def descriptions(options: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each option, from the strings below the fields."""
    for kind in filter(dataclasses.is_dataclass, options.__mro__):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                yield field.target.id, ast.literal_eval(below.value)


def test_options_are_described_in_whole_sentences() -> None:
    for words, verb in ALL.items():
        for name, text in descriptions(verb.options):
            assert re.match(r"[A-Z0-9`$]", text) and text.rstrip().endswith("."), f"{words} --{name}: {text}"


def flags_of(words: str) -> set[str]:
    """Return the flags of a verb."""
    options = ALL[words].options
    names = [field.name.strip("_") for field in dataclasses.fields(options)]
    names += list(flat(RunConfig())) if "settings" in names else []
    return {f"--{sign}{name.replace('_', '-')}" for name in names for sign in ("", "no-")} | {"--help"}


def command_lines_in(source: str) -> list[str]:
    """Return the command lines between backticks in the strings and comments of a Python file."""
    whole = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that continue on the next line
    return re.findall(r"`archipelago ([a-z][^`\n]*)`", whole)


def test_messages_name_flags_that_exist() -> None:
    root, seen = Path(commands.__file__).parents[1], 0
    for path in (file for folder in ("broker", "islands", "merger", "ops") for file in (root / folder).rglob("*.py")):
        for line in command_lines_in(path.read_text(encoding="utf-8")):
            words = next((words for words in ALL if re.match(rf"{words}\b", line)), "")
            assert words or line.split()[0] in VERBS, f"{path.relative_to(root)}: archipelago {line}"
            named = set(re.findall(r"(?<= )--[a-z][a-z.-]*", line))
            assert named <= (flags_of(words) if words else set()), f"{path.relative_to(root)}: archipelago {line}"
            seen += len(named)
    assert seen > 20


@pytest.mark.full  # It loads every verb.
def test_a_shell_completes_verbs_options_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    capsys.readouterr()
    assert run(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f". {tmp_path}/script; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _tyro_archipelago"
        bash = ["bash", "-c", f'{line}; echo "${{COMPREPLY[@]}}"']
        return subprocess.run(bash, capture_output=True, text=True, check=True).stdout.split()

    assert completed("archipelago", "st") == ["status", "steer"]
    assert completed("archipelago", "bench", "st") == ["study"]
    assert completed("archipelago", "status", "demo", "--wa") == ["--watch"]
    assert "--inner.learning-rate" in completed("archipelago", "up", "--inner.l")
    assert completed("archipelago", "status", "ru") == [], "the shell then completes files"


def test_a_url_is_shown_as_such_and_a_name_can_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert " [URL]" in help_of("status", capsys).splitlines()[0]
    assert commands.parse(StatusOptions, "x", []).run is None
    assert commands.parse(StatusOptions, "x", ["--run", "None"]).run == "None"


def test_the_guide_explains_each_column() -> None:
    guide = WATCH_PAGE.read_text(encoding="utf-8")
    assert [column for column in COLUMNS if f"| `{column}` | " not in guide] == []
