"""`archipelago prepare`: turn text into a corpus."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from archipelago.broker.errors import ConfigError
from archipelago.broker.process import print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.data.corpus import OpenCorpus


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into a corpus: a file or a folder of text, or `stdlib`, the sources of this Python."""

    source: Annotated[str, tyro.conf.Positional]
    """A file, a folder or `stdlib`."""
    name: str | None = None
    """The name of the corpus, for --data.corpus. The default is made from the source."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder that has one, such as that of weights to begin with: the text is stored as its
    tokens. The default stores bytes.
    """
    json: bool = False
    """Print one JSON object."""


def main(options: PrepareOptions) -> int:
    from archipelago.islands.data.corpus import data_folder

    corpus = _prepare(options)
    found: dict[str, object] = {
        "corpus": corpus.name, "digest": corpus.digest, "train": corpus.train.size, "valid": corpus.valid.size,
        "test": corpus.test.size, "folder": str(data_folder() / corpus.name),
    }  # fmt: skip
    if corpus.reading:
        found["reading"] = asdict(corpus.reading)
    if corpus.tokenizer:
        train_bytes, valid_bytes, test_bytes = corpus.text_sizes
        found |= {"vocabulary": corpus.vocabulary, "dtype": corpus.train.dtype.name, "tokenizer": corpus.tokenizer,
                  "train_bytes": train_bytes, "valid_bytes": valid_bytes, "test_bytes": test_bytes}  # fmt: skip
    if options.json:
        print_json(found)
        return 0
    if corpus.reading:
        say(corpus.describe())
    train, valid, test = (f"{len(split):,}" for split in (corpus.train, corpus.valid, corpus.test))
    if corpus.tokenizer:
        say(f"corpus {corpus.name!r}: {train} tokens to train on, {valid} and {test} held out; "
            f"{corpus.vocabulary:,} different tokens of {corpus.bytes_per_token:.2f} bytes on average")  # fmt: skip
    else:
        say(f"corpus {corpus.name!r}: {train} bytes to train on, {valid} and {test} held out")
    say(f"  digest:  {corpus.digest}   (the same on every machine of a run)")
    say(f"  use it:  archipelago up --data.corpus {corpus.name}")
    return 0


def _prepare(options: PrepareOptions) -> OpenCorpus:
    from archipelago.islands.data.corpus import STDLIB
    from archipelago.islands.data.preparation import prepare_stdlib, prepare_text
    from archipelago.islands.data.tokenizer import tokenizer_at

    if not options.source:
        raise ConfigError("no text was named", "Give a file, a folder or `stdlib`.", code="config.value")
    tokenizer = tokenizer_at(options.tokenizer) if options.tokenizer is not None else None
    if options.name and options.source == STDLIB and tokenizer is None:
        raise ConfigError(f"the corpus {options.source!r} keeps its own name", "Leave out --name.", code="config.value")
    suffix = "" if tokenizer is None else "-tokens"
    name = checked_name(_name(options) + suffix if options.name is None else options.name, "the corpus name")
    if options.source == STDLIB:
        return prepare_stdlib(name, tokenizer)
    return prepare_text(Path(options.source), name, tokenizer)


def _name(options: PrepareOptions) -> str:
    """Make a corpus's name from the source."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(options.source).resolve().stem).strip("-.") or "text"
