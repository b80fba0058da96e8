"""`archipelago prepare`: turns text into a byte corpus that islands memory-map."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

from broker.keys import checked_name
from broker.process import print_json
from ops.settings import say


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into a corpus: a FILE or a folder of text, `enwik8` (100 MB of Wikipedia), or `stdlib`."""

    source: Annotated[str, tyro.conf.Positional]
    """a file, a folder, `enwik8` or `stdlib`"""
    name: str | None = None
    """name of the corpus, for --data.corpus; default made from the source"""
    path: Path | None = None
    """for enwik8: the official zip, if you have it; else it comes from the package index"""
    json: bool = False
    """print one JSON object"""


def main(options: PrepareOptions) -> int:
    """Prepares one corpus."""
    from islands.corpus import data_folder, prepare_stdlib, prepare_text
    from islands.enwik8 import prepare_enwik8

    if options.source == "stdlib":
        corpus = prepare_stdlib()
    elif options.source == "enwik8":
        with Progress(console=Console(stderr=True), transient=True) as bar:
            tasks = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done)

            corpus = prepare_enwik8(options.path, progress)
    else:
        source = Path(options.source)
        name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", source.resolve().stem).strip("-.") or "text"
        corpus = prepare_text(source, checked_name(name, "the corpus name"))
    found = {"corpus": corpus.name, "digest": corpus.digest, "train": len(corpus.train), "valid": len(corpus.valid),
             "test": len(corpus.test), "folder": str(data_folder() / corpus.name)}  # fmt: skip
    if options.json:
        print_json(found)
    else:
        say(
            f"corpus {corpus.name!r}: {found['train']:,} bytes to train on, "
            f"{found['valid']:,} and {found['test']:,} held out"
        )
        say(f"  use it:  archipelago up --data.corpus {corpus.name}")
    return 0
