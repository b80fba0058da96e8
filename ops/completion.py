"""`archipelago completion`: print a script with which bash and zsh complete verbs and options."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from archipelago.broker.process import print_json
from archipelago.ops import commands

_SCRIPT = """\
# Completion of archipelago for bash and zsh.
[ -n "$ZSH_VERSION" ] && autoload -Uz compinit bashcompinit && compinit && bashcompinit
_archipelago() {{
  local words word="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _archipelago archipelago
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script with which bash and zsh complete verbs and options. It takes some seconds, so keep it in a file.

    In bash, write it to ~/.local/share/bash-completion/completions/archipelago. In zsh, write it to a file that
    ~/.zshrc reads with `source`.
    """

    json: bool = False
    """Print one JSON object: the words that may follow each verb."""


def main(options: CompletionOptions) -> int:
    """Print the script."""
    found = dict(_words("", commands.VERBS))
    if options.json:
        print_json(found)
        return 0
    longest_first = sorted(found, key=lambda verb: -len(verb))
    cases = "\n".join(f'    "{verb} "*) words="{" ".join(found[verb])}" ;;' for verb in longest_first if verb)
    sys.stdout.write(_SCRIPT.format(cases=f'{cases}\n    *) words="{" ".join(found[""])}" ;;'))
    return 0


def _words(before: str, verbs: commands.Verbs) -> Iterator[tuple[str, list[str]]]:
    """Yield the words that may follow `before`, and each of its verbs."""
    yield before, [*verbs]
    for name, verb in verbs.items():
        words = f"{before} {name}".strip()
        if isinstance(verb, commands.VerbGroup):
            yield from _words(words, importlib.import_module(verb.module).VERBS)
            continue
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            commands.run([*words.split(), "--help"])
        yield words, sorted(set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*[\w]", text.getvalue())))
