"""Write the pages of `docs/reference` that follow from the code: `python docs/generate.py`. A test compares them."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser

from archipelago.broker.config import RunConfig
from archipelago.ops.commands import VERBS, Verb, VerbGroup, Verbs, examples_of
from archipelago.ops.experiments import study

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs"
WRITTEN = "<!-- Written by docs/generate.py from the code. Do not edit. -->\n\n"
SETTINGS = f"""{WRITTEN}# Settings

They belong to the run, are fixed when it is created, and are the same for all workers. The
[reference](index.md#settings) says more about some of them.
"""
VERBS_PAGE = f"""{WRITTEN}# Verbs

`archipelago VERB --help` says the same. `--json` prints one JSON object on standard output.
"""
CODES = f"""{WRITTEN}# Codes of errors

An error has names and numbers in place of `…`, and may say more. It ends with its code in brackets.
The codes of what is wrong in a run that goes on are in [problems](../guide/problems.md).

| code | what happened | what to do |
| --- | --- | --- |
"""
STUDIES = f"""{WRITTEN}# Tables of studies

What `archipelago bench study NAME --show` prints from the recorded results. A trial is named by the settings that
differ from those of most trials of its study; M is the number of islands, or of workers of data-parallel training. The
ratio of its bits per byte is to the best data-parallel trial with as many workers and tokens, by Muon where the study
has it; with hostile islands, to the run without them.
"""
#: What the line about a study's commit begins with. A test does not compare these lines, which follow from the history.
RECORDED = "Recorded by commit"
#: The signs of the bounds that `annotated_types` puts on a setting.
_SIGNS = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<", "MultipleOf": "a multiple of"}


def row(*cells: str) -> str:
    """Return one row of a table. Each cell becomes one line, and the code's bars and angle brackets are shown."""
    return f"| {' | '.join(' '.join(each.split()).replace('|', '&#124;') for each in cells)} |\n"


def named(name: str) -> str:
    """Return a name that is an anchor of its page."""
    return f'<a id="{name}"></a>`{name}`'


def descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field of a dataclass and of its bases."""
    parsed = [
        docstring_parser.parse_from_object(each) for each in reversed(kind.__mro__) if dataclasses.is_dataclass(each)
    ]
    return {param.arg_name: (param.description or "").replace("<", "&lt;") for each in parsed for param in each.params}


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of an option; nothing if its description says what happens without it."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return "" if shown in ("", "None") else f"`{shown.lower() if isinstance(value, bool) else shown}`"


def range_of(hint: Any) -> str:
    """Return the values that the type of a setting allows: its choices, or its bounds."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in get_args(hint))
    parts = getattr(hint, "__metadata__", ())
    # Python may take Ge(0) for Ge(0.0), which are equal, so a bound is shown without a zero after its point.
    bounds = [f"{_SIGNS[type(each).__name__]} {dataclasses.astuple(each)[0]:,}".removesuffix(".0") for each in parts]
    return ", ".join(bounds or filter(None, map(range_of, get_args(hint)))).replace("<", "&lt;")


def settings_page() -> str:
    """Return the page of all settings of a run."""
    page, sections = SETTINGS, [("", RunConfig), *get_type_hints(RunConfig).items()]
    for name, kind in [each for each in sections if isinstance(each[1], type) and dataclasses.is_dataclass(each[1])]:
        hints, told = get_type_hints(kind, include_extras=True), descriptions(kind)
        about = docstring_parser.parse_from_object(kind).short_description
        page += (
            f"\n## {name or 'run'}\n\n{about}\n\n| setting | default | range | meaning |\n| --- | --- | --- | --- |\n"
        )
        for field in dataclasses.fields(kind):
            if not dataclasses.is_dataclass(hints[field.name]):
                key = f"{name}.{field.name}".lstrip(".")
                page += row(named(key), default_of(field), range_of(hints[field.name]), told[field.name])
    return page


def every_verb(table: Verbs, words: str = "") -> Iterator[tuple[str, Verb]]:
    """Yield each verb with the words that select it."""
    for name, verb in table.items():
        if isinstance(verb, VerbGroup):
            yield from every_verb(verb.verbs, f"{words}{name} ")
        else:
            yield words + name, verb


def verbs_page() -> str:
    """Return the page of all verbs with their options and examples."""
    page = VERBS_PAGE
    for words, verb in every_verb(VERBS):
        options = verb.options
        hints, told, parsed = get_type_hints(options, include_extras=True), descriptions(options), options.__doc__
        page += f"\n## {words}\n\n{docstring_parser.parse(parsed).short_description}\n"
        page += "".join(f"\n{part}\n" for part in [docstring_parser.parse(parsed).long_description] if part)
        if "settings" in hints:
            page += "\nIt takes all [settings](settings.md), too, as flags such as `--sync.interval 24`.\n"
        page += "\n| option | default | meaning |\n| --- | --- | --- |\n"
        for field in (each for each in dataclasses.fields(options) if each.name != "settings"):
            flag = field.name.strip("_").replace("_", "-")
            is_positional = "Positional" in str(hints[field.name])
            page += row(f"`{flag.upper() if is_positional else '--' + flag}`", default_of(field), told[field.name])
        examples = examples_of(f"archipelago {words}").items()
        page += "".join(["\n```text\n", *(f"$ {line}\n    {what}\n" for line, what in examples), "```\n"])
    return page


def template(node: ast.expr) -> str:
    """Return the text that an expression makes, with an ellipsis for each part that is known only when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("<", "&lt;")
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"…(?:[ .:]*…)+", "…", "".join(map(template, node.values)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return template(node.body) if isinstance(node, ast.IfExp) else "…"


def errors_in(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the code, the sentence and the remedy of each error that a file makes; of a class, what it stands for."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            said = [template(each) for each in node.args[:2]]
            codes = [
                each.value.value
                for each in node.keywords
                if each.arg == "code" and isinstance(each.value, ast.Constant)
            ]
            if codes and "." in str(codes[0]):
                yield str(codes[0]), "".join(said[:1]), "".join(said[1:])
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    yield ast.literal_eval(line.value), (ast.get_docstring(node) or "").split("\n\n")[0], ""


def codes_page() -> str:
    """Return the page of all codes of errors, each with the longest sentence and remedy that the code has for it."""
    paths = sorted(path for folder in ("broker", "islands", "merger", "ops") for path in (ROOT / folder).rglob("*.py"))
    found = sorted((each for path in paths for each in errors_in(path)), key=lambda each: (each[0], len("".join(each))))
    longest = {code: (said, remedy) for code, said, remedy in found}
    return CODES + "".join(row(named(code), *texts) for code, texts in longest.items())


def recorded_by(path: Path) -> str:
    """Return the last commit that added results to a file, with its date. Others have only deleted some."""
    git = ["git", "log", "--format=%h of %as", "--numstat", "--", str(path)]
    words = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    lines = [line for line in words if line]
    added = [commit for commit, counts in zip(lines[::2], lines[1::2], strict=False) if not counts.startswith("0\t")]
    return added[0] if added else ""


def studies_page() -> str:
    """Return the page of the recorded results of all studies."""
    page, folder = STUDIES, ROOT / "ops/experiments/studies"
    known = study.recorded(folder)
    for each in (study.load(folder, name) for name in study.names(folder)):
        commit = recorded_by(folder / f"{each.name}.jsonl")
        page += f"\n## {each.name}\n\n{each.about.rstrip('?')}.\n{RECORDED} {commit}.\n\n"
        page += (
            row("trial", "bits per byte", "ratio", "on the test text", "seeds") + "| --- | --- | --- | --- | --- |\n"
        )
        found = study.show(each, known, quiet=True)["rows"]
        varying = list(found[0])[1 : list(found[0]).index("seeds")]
        usual = {key: Counter(str(trial[key]) for trial in found).most_common(1)[0][0] for key in varying}
        for trial in found:
            values = {key: str(trial[key]).removesuffix(".0") for key in varying if str(trial[key]) != usual[key]}
            settings = [f"`{key.replace('islands', 'M')}` {value}" for key, value in values.items() if value]
            losses = f"{trial['bits_per_byte']:.4f}" + (f" ± {trial['spread']:.3f}" if trial["seeds"] > 1 else "")
            ratios = (trial[key] for key in ("to_parallel", "to_parallel_on_test"))
            shown = ("" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios)
            name = ", ".join([trial["kind"], *settings])
            page += row(name, losses, *shown, str(trial["seeds"]))
    return page


PAGES = {
    "reference/settings.md": settings_page,
    "reference/verbs.md": verbs_page,
    "reference/codes.md": codes_page,
    "results/studies.md": studies_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")
