"""Write the pages of `docs/reference` that follow from the code: `python docs/generate.py`. A test compares them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import subprocess
import sys
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import groupby, product
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser

from archipelago.broker.config import RunConfig
from archipelago.ops.commands import VERBS, Verb, VerbGroup, Verbs, examples_of
from archipelago.ops.experiments import study
from archipelago.ops.watch.history import refusal_remedy

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
PROBLEMS = "../guide/problems.md"
CODES = f"""{WRITTEN}# Codes

Errors end with their codes in brackets, and so do the [problems]({PROBLEMS}) that `status` and the page show and what
`doctor` finds. A log names the codes of its lines with `--log-json`; after `refused.`, they may name another code of
this page, such as `wire.payload`. Texts have names and numbers in place of `…`, and may say more. Each begins with
where it is seen.
"""
STUDIES = f"""{WRITTEN}# Tables of studies

What `archipelago bench study NAME --show` prints from the recorded results. A trial is named by the settings that
differ from those of most trials of its study; M is the number of islands, or of workers of data-parallel training. The
ratio of its bits per byte is to the best data-parallel trial with as many workers and tokens, by Muon where the study
has it; with hostile islands, to the run without them.
"""
#: What the line about a study's commit begins with. A test does not compare these lines, which follow from the history.
RECORDED = "Recorded by commit"
#: What a code looks like. Codes of classes of errors may have one word.
_CODE = re.compile(r"[a-z]+(\.[a-z0-9-]+)+")
#: By the name of a call: where users see its code, the prefix of the code, and which arguments are code, sentence and
#: remedy. A text in place of a number is the sentence or the remedy itself.
_TELLS: dict[str, tuple[str, str, int, int | str, int | str]] = {
    "error": ("error", "", 0, 1, 2), "log": ("log", "", 0, 1, 2), "Problem": ("status", "", 0, 3, 4),
    "problem": ("doctor", "", 0, 1, 2), "warning": ("doctor", "", 0, 1, 2), "_tell": ("log", "", 0, 1, ""),
    "Reason": ("log", "refused.", 0, 1, ""), "wrong": ("error", "task.", 0, 1, 2),
    "MismatchError": ("error", "", 0, "the worker and its run have different …", 4),
    "call": ("error", "task.", 0, "failed: …", "Correct the task's file."),
}  # fmt: skip
_READ = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.Call, ast.Tuple)
#: A code, where it is seen, what is said, and the remedy.
Told = tuple[str, str, str, str]
#: Names of a source, and the texts that each may stand for.
Texts = MutableMapping[str, list[str]]
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
        # The verb's own options say most about it, so those that many verbs share come last.
        own = inspect.get_annotations(options)
        for field in sorted(dataclasses.fields(options), key=lambda each: each.name not in own):
            if field.name == "settings":
                continue
            flag = field.name.strip("_").replace("_", "-")
            is_positional = "Positional" in str(hints[field.name])
            meaning = re.sub(r"\bdocs/(guide/([\w-]+)\.md(#[\w-]+)?)", r"[\2](../\1)", told[field.name])
            page += row(f"`{flag.upper() if is_positional else '--' + flag}`", default_of(field), meaning)
        examples = examples_of(f"archipelago {words}").items()
        page += "".join(["\n```console\n", *(f"$ {line}\n    {what}\n" for line, what in examples), "```\n"])
    return page


def texts_of(node: ast.AST | None, known: Texts) -> list[str]:
    """Return the texts that an expression may make, with an ellipsis for each part that is known only when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Name(id=name):
            return known.get(name, ["…"])
        case ast.FormattedValue(format_spec=None, value=value):
            return texts_of(value, known)
        case ast.IfExp(body=one, orelse=other):
            return texts_of(one, known) + texts_of(other, known)
        case ast.BoolOp(values=values):
            return [text for value in values for text in texts_of(value, known)]
        case ast.JoinedStr(values=parts):
            return ["".join(each) for each in product(*(texts_of(part, known) for part in parts))]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return ["".join(each) for each in product(texts_of(left, known), texts_of(right, known))]
    return ["…"]


def nodes_of(path: Path) -> list[ast.AST]:
    """Return the parts of a file that `codes_in` reads, in the order of their lines."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sorted((node for node in nodes if isinstance(node, _READ)), key=attrgetter("lineno"))


def names_in(node: ast.AST, known: Texts) -> Iterator[tuple[str, list[str]]]:
    """Yield the names that an assignment gives to texts, with these texts."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            yield from ((ast.unparse(name), texts_of(value, known)) for name, value in zip(names, values, strict=True))
        case ast.Assign(targets=[name], value=value) | ast.AnnAssign(target=name, value=value):
            yield ast.unparse(name), texts_of(value, known)
        case ast.For(target=target):
            yield from ((ast.unparse(each), ["…"]) for each in ast.walk(target))
        case ast.AugAssign(target=name, op=op, value=value):
            yield ast.unparse(name), texts_of(ast.BinOp(name, op, value), known)


def told_by(name: str, args: list[list[str]]) -> Iterator[Told]:
    """Yield the codes that a call of this name tells users about, by its row of `_TELLS`."""
    where, prefix, *places = _TELLS[name]
    codes, said, remedies = (
        [place] if isinstance(place, str) else args[place] if place < len(args) else [""] for place in places
    )
    for code in codes:
        if _CODE.fullmatch(prefix + code):
            yield prefix + code, where, max(said, key=len), max(remedies, key=len)


def codes_of_call(node: ast.Call, known: Texts) -> Iterator[Told]:
    """Yield the codes of a call: by its name in `_TELLS`, as its argument `code`, or in the `extra` of a log line."""
    name = re.split(r"\W", ast.unparse(node.func).split(" if ")[0])[-1]
    args, given = [texts_of(each, known) for each in node.args], {each.arg: each.value for each in node.keywords}
    if "code" in given:
        yield from told_by(name if name in _TELLS else "error", [texts_of(given["code"], known), *args])
    elif isinstance(extra := given.get("extra"), ast.Dict):
        text, *others = (max(each, key=len) for each in args[name == "log" :])  # `log` has the level first
        said, _, remedy = (re.sub(r"%[.\d]*[a-z]", "%s", text) % tuple(others)).partition(". ")
        values = {ast.unparse(key): value for key, value in zip(extra.keys, extra.values, strict=True) if key}
        yield from told_by("log", [texts_of(values.get("'code'"), known), [said], [remedy]])
    elif name in _TELLS:
        yield from told_by(name, args)


def codes_of_row(node: ast.Tuple, known: Texts) -> Iterator[Told]:
    """Yield the codes of a row of a table of errors: its code, perhaps what happened, and a remedy, which is a text."""
    args = [texts_of(each, known) for each in node.elts]
    if args and " " in args[-1][0]:
        yield from told_by("error", [args[0], ["…"], args[1]] if len(args) == 2 else args)


def codes_in(nodes: Iterable[ast.AST], constants: Texts) -> Iterator[Told]:
    """Yield each code in a file that a user can see. The file's own constants count before those of the others."""
    own: Texts = {}
    known = ChainMap(own, constants)
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            own.clear()
        elif isinstance(node, ast.Call):
            yield from codes_of_call(node, known)
        elif isinstance(node, ast.Tuple):
            yield from codes_of_row(node, known)
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    said = (ast.get_docstring(node) or "").split("\n\n")[0]
                    yield ast.literal_eval(line.value), "error", said, ""
        for name, texts in names_in(node, known):
            (constants if name.isupper() else own)[name] = texts


def worth(told: Told) -> tuple[str, bool, bool, int]:
    """Return a key that sorts texts by their code, and of one code, the text that says most last."""
    code, _, said, remedy = told
    return code, said.strip("…") != "", remedy != "", len(said + remedy)


def codes_page() -> str:
    """Return the page of all codes, each with the sentence and the remedy in the source that say most."""
    paths = sorted(path for folder in ("broker", "islands", "merger", "ops") for path in (ROOT / folder).rglob("*.py"))
    files = [nodes_of(path) for path in paths]
    page, constants = CODES, dict[str, list[str]]()
    for nodes in files:
        constants.update(each for node in nodes for each in names_in(node, constants) if each[0].isupper())
    found = [each for nodes in files for each in codes_in(nodes, constants)]
    for code, same in groupby(sorted(found, key=worth), key=itemgetter(0)):
        _, where, said, remedies = zip(*same, strict=True)
        remedy = remedies[-1] or max(remedies, key=len)
        if code.startswith("refused.") and not remedy:
            remedy = refusal_remedy(f"{code} {said[-1]}")
        seen = [f"[status]({PROBLEMS}#{code})" if each == "status" else each for each in sorted({*where})]
        texts = [re.sub(r"…(?:[ .:]*…)+", "…", text).replace("<", "&lt;") for text in (said[-1], remedy)]
        happened, to_do = ["as its text says" if text == "…" else text for text in texts]
        # A heading for each code is what a search of the site finds and leads to.
        page += f'\n### <a id="{code}"></a>{code}\n\n*{", ".join(seen)}*: {happened}\n'
        page += f"\n**What to do**: {to_do}\n" if to_do else ""
    return page


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
    for each in (study.load(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))):
        commit = recorded_by(folder / f"{each.name}.jsonl")
        page += f"\n## {each.name}\n\n{each.about.rstrip('?')}.\n{RECORDED} {commit}.\n\n"
        page += (
            row("trial", "bits per byte", "ratio", "on the test text", "seeds") + "| --- | --- | --- | --- | --- |\n"
        )
        found = study.show(each, study.recorded(folder, each.name), quiet=True)["rows"]
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
