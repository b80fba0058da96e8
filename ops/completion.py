"""`archipelago completion`: print a script of the parser's library, with which a shell completes words."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from archipelago.ops import commands


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script with which a shell completes verbs and options. It takes some seconds, so keep it in a file.

    In bash, write it to ~/.local/share/bash-completion/completions/archipelago. In zsh, write it to a file
    `_archipelago` in a folder of $fpath.
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional] = "bash"
    """The shell."""


def main(options: CompletionOptions) -> int:
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        asked = ["--tyro-print-completion", options.shell]
        tyro.cli(_any_of(commands.VERBS), prog="archipelago", args=asked, config=commands.READABLE)
    sys.stdout.write(script.getvalue().replace("complete -F", "complete -o default -F"))  # or it completes no files
    return 0


def _any_of(verbs: commands.Verbs) -> Any:
    """Return a type whose values are the options of one of these verbs."""
    return functools.reduce(operator.or_, _types(verbs))


def _types(verbs: commands.Verbs) -> Iterator[Any]:
    for name, verb in verbs.items():
        if isinstance(verb, commands.VerbGroup):
            made = dataclasses.make_dataclass(name, [("verb", Annotated[_any_of(verb.verbs), tyro.conf.arg(name="")])])
        else:
            made = verb.options
        yield Annotated[made, tyro.conf.subcommand(name, prefix_name=False)]
