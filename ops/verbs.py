"""Find and run the verb that a command line names. A verb's module is imported only when that verb runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from archipelago.broker.files import require_local
from archipelago.ops.examples import examples_text
from archipelago.ops.settings import config_file

Options = TypeVar("Options")

#: How options are shown: `[URL]` in place of `[{None}|STR]`.
READABLE = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
#: The words about an option without a default, also where they are broken over two lines of a frame.
_NO_DEFAULT = re.compile(r"\(default:[ │|\n]+None\)")


class Verb(NamedTuple):
    """The location of a verb's code, and its summary.

    Attributes:
        module: The module, which has `main(options) -> int`.
        options: The name of its dataclass of options, whose docstring is the verb's help.
        summary: One line for the list of verbs, written here so that the list needs no imports.
    """

    module: str
    options: str
    summary: str


class Group(NamedTuple):
    """A verb that consists of several verbs.

    Attributes:
        module: The module, which has these verbs as `VERBS`.
        summary: One line for the list of verbs.
    """

    module: str
    summary: str


Verbs = Mapping[str, Verb | Group]


def nothing() -> None:
    """Do nothing."""


def run(program: str, summary: str, verbs: Verbs, args: Sequence[str], begin: Callable[[], None] = nothing) -> int:
    """Run the verb that `args` begins with, or list the verbs.

    Args:
        program: The words before `args`, such as `archipelago bench`.
        summary: The line above the list of verbs.
        verbs: The verbs by name.
        args: The rest of the command line.
        begin: Called once the verb's code is loaded and its options are read, before it runs.

    Returns:
        The exit status.
    """
    if not args or args[0] not in verbs:
        return _overview(program, summary, verbs, args)
    verb, program = verbs[args[0]], f"{program} {args[0]}"
    module = importlib.import_module(verb.module)
    if isinstance(verb, Group):
        return run(program, verb.summary, module.VERBS, args[1:], begin)
    options = parse(getattr(module, verb.options), program, args[1:])
    begin()
    return int(module.main(options))


def parse(options_type: type[Options], program: str, args: Sequence[str]) -> Options:
    """Return the options that `args` state. A file named with `--config` supplies the defaults of the settings."""
    with _readable_help(program):
        options: Options = tyro.cli(
            options_type, prog=program, args=list(args), config=READABLE, **_defaults(options_type, args)
        )
    for each in dataclasses.fields(options_type):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if isinstance(value, Path):
            require_local(value, f"--{each.name.strip('_').replace('_', '-')}")
    return options


@contextlib.contextmanager
def _readable_help(program: str) -> Iterator[None]:
    """Print the help that the block prints, if it does: without defaults that say nothing, and with examples."""
    # The library draws frames only for an output that says that it can show them.
    shown = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding or "utf-8", newline="", write_through=True)
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        shown.seek(0)
        if text := shown.read():
            sys.stdout.write(_without_none(text) + examples_text(program))


def _without_none(text: str) -> str:
    """Remove the words `(default: None)` from a help text. What is not set has its default in its description.

    The words become spaces, because the text lies in a frame; a line that then is empty is left out.
    """
    blank = _NO_DEFAULT.sub(lambda found: re.sub(r"\(default:|None\)", lambda word: " " * len(word[0]), found[0]), text)
    blank = blank.replace("show this help message and exit", "Show this help message and end.")
    both = zip(text.splitlines(), blank.splitlines(), strict=True)
    return "".join(f"{line}\n" for before, line in both if line == before or line.strip(" │|"))


def _defaults(options_type: type[Any], args: Sequence[str]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(options_type)}
    if "settings" not in names or "config" not in names:
        return {}
    required = [f for f in dataclasses.fields(options_type) if f.default is f.default_factory is dataclasses.MISSING]
    missing = {f.name: tyro.MISSING for f in required}
    return {"default": options_type(**missing, settings=config_file(args))}


def _overview(program: str, summary: str, verbs: Verbs, args: Sequence[str]) -> int:
    """Print the list of verbs: on standard output if the user asked for it, otherwise as part of an error."""
    asked = not args or args[0] in ("-h", "--help", "help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        out.write(f"error: there is no verb {args[0]!r}. Choose one of these:\n\n")
    out.write(f"usage: {program} VERB [OPTIONS]\n\n{summary}\n\n")
    width = max(10, 2 + max(map(len, verbs)))
    for name, verb in verbs.items():
        out.write(f"  {name:<{width}}{verb.summary}\n")
    out.write(f"\n`{program} VERB --help` lists the options of a verb, with examples.\n")
    if not asked:
        out.write(f"`{program} --help` shows this list.\n")
    return 0 if asked else 2
