"""Functions that several verbs share: read and write run settings, and print lines for people."""

from __future__ import annotations

import dataclasses
import logging
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from archipelago.broker import config
from archipelago.broker.config import RunConfig, differing
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.logs import as_json, printable_lines

if TYPE_CHECKING:
    from rich.console import Console

CONFIG_FLAG = "--config"
#: Characters in a line of a table that is written to a pipe or a file.
PIPE_WIDTH = 160

log = logging.getLogger(__name__)


def config_file(args: Sequence[str]) -> RunConfig | None:
    """Return the config in the TOML file that `--config PATH` names; None without one.

    Flags on the command line override the values in the file. Raises ConfigError if the path is missing or the file
    cannot be read.
    """
    for index, arg in enumerate(args):
        if arg == CONFIG_FLAG:
            if index + 1 == len(args):
                raise ConfigError("--config needs a path", "Write --config FILE.toml.", code="config.value")
            return config.from_toml(Path(args[index + 1]))
        if arg.startswith(f"{CONFIG_FLAG}="):
            return config.from_toml(Path(arg.partition("=")[2]))
    return None


def setting_text(value: object) -> str:
    """Return the value of a setting as users write it; `unset` if the program chooses it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else '""' if value == "" else str(value)


def is_given(flag: str, file: Path | None = None) -> bool:
    """Return whether the user gave a flag, or its setting in a file. The value does not tell: it may be the default."""
    section, _, name = flag.removeprefix("--").replace("-", "_").rpartition(".")
    values = tomllib.loads(file.read_text(encoding="utf-8")) if file else {}
    in_file = name in (values.get(section, {}) if section else values)
    return in_file or any(arg.partition("=")[0].replace("_", "-") == flag for arg in sys.argv[1:])


def to_toml(settings: RunConfig) -> str:
    """Return the config as a TOML file that `--config` can read. Settings that are not set are left out."""
    return tomli_w.dumps(_set(dataclasses.asdict(settings)))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the values that are None: TOML cannot express them."""
    return {
        key: _set(value) if isinstance(value, dict) else value for key, value in values.items() if value is not None
    }


def table_console() -> Console:
    """Return a console on standard output for tables, with a fixed width when it is a pipe or a file."""
    from rich.console import Console  # Importing rich here keeps the start of other verbs quick.

    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else PIPE_WIDTH
    return console


def say(text: str = "") -> None:
    """Print a line for people on standard error, or write a log record with `--log-json`.

    Standard output is reserved for results.
    """
    if as_json():
        if text.strip():
            log.info("%s", text.strip())
        return
    sys.stderr.write(printable_lines(text) + "\n")
    sys.stderr.flush()


def flags(config: RunConfig) -> list[str]:
    """Return the flags of the command line that give this config, without those of settings at their defaults."""
    found = []
    for key, (value, _) in differing(config, RunConfig()).items():
        section, _, name = key.replace("_", "-").rpartition(".")
        prefix = f"--{section}." if section else "--"
        if isinstance(value, bool):
            found.append(f"{prefix}{'' if value else 'no-'}{name}")
        elif value is not None:
            found += [f"{prefix}{name}", str(value)]
    return found


def confirm(what: str, run: str, *, given: bool) -> None:
    """Ask for the run's name on a terminal. Raise ConfigError unless it is typed, or --yes was given."""
    if given:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"nothing was done. {what}", "Confirm it with --yes.", code="config.unconfirmed")
    sys.stderr.write(f"{what}\nType the name of the run to go on: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != run:
        raise ConfigError("nothing was done, because another name was typed", code="config.unconfirmed")
