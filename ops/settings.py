"""Options that several verbs share, and how flags, a TOML file and defaults become one config."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from archipelago.broker import config
from archipelago.broker.config import RunConfig
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.logs import as_json

if TYPE_CHECKING:
    from rich.console import Console

CONFIG_FLAG = "--config"
PIPE_WIDTH = 160
"""characters of a line that goes to a file"""

log = logging.getLogger(__name__)


def config_file(args: Sequence[str]) -> RunConfig:
    """Defaults for the flags: those of the TOML file that `--config PATH` names, if any. Flags win over the file."""
    for index, arg in enumerate(args):
        if arg == CONFIG_FLAG:
            if index + 1 == len(args):
                raise ConfigError("--config needs a path", "Write --config FILE.toml.")
            return config.from_toml(Path(args[index + 1]))
        if arg.startswith(f"{CONFIG_FLAG}="):
            return config.from_toml(Path(arg.partition("=")[2]))
    return RunConfig()


def to_toml(settings: RunConfig) -> str:
    """The config as a TOML file that `--config` reads back."""
    lines, sections = [], []
    for key, value in dataclasses.asdict(settings).items():
        if isinstance(value, dict):
            sections += ["", f"[{key}]", *(_line(name, part) for name, part in value.items())]
        else:
            lines.append(_line(key, value))
    return "\n".join([*lines, *sections]) + "\n"


def _line(name: str, value: object) -> str:
    """TOML has no word for nothing."""
    return f"# {name}: what suits, while nothing is set" if value is None else f"{name} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a TOML string is a JSON string, but for DEL and for pairs of surrogates
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def table_console() -> Console:
    """Standard output for tables; in a pipe or a file, where lines have no end, they are as wide as they are."""
    from rich.console import Console  # most verbs print no tables, and want to start at once

    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else PIPE_WIDTH
    return console


def say(text: str = "") -> None:
    """A line for people: on standard error, since standard output belongs to results. A record with `--log-json`."""
    if as_json():
        if text.strip():
            log.info("%s", text.strip())
        return
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
