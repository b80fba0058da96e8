"""`archipelago prepare`: turns text or examples into a corpus that islands memory-map."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from archipelago.broker.config import BYTES
from archipelago.broker.errors import ConfigError
from archipelago.broker.process import print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.data.corpus import OpenCorpus


KNOWN = ("stdlib", "enwik8", "digits")
"""sources that are no files"""


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into a corpus: a FILE or a folder of text, `enwik8` (100 MB of Wikipedia), or `stdlib`. Or `digits`,
    scikit-learn's 1,797 small images.
    """

    source: Annotated[str, tyro.conf.Positional]
    """a file, a folder, `enwik8`, `stdlib` or `digits`"""
    name: str | None = None
    """name of the corpus, for --data.corpus; default made from the source"""
    path: Path | None = None
    """for enwik8 the official zip, for digits a scikit-learn's digits.csv.gz, if you have it; else it comes from the
    package index"""
    tokenizer: str | None = None
    """bpe:16384 learns byte-level BPE of so many tokens from the training part, and stores the text as these; default
    bytes"""
    json: bool = False
    """print one JSON object"""


def main(options: PrepareOptions) -> int:
    """Prepares one corpus."""
    from archipelago.islands.data.corpus import data_folder

    corpus = _prepared(options)
    found: dict[str, object] = {
        "corpus": corpus.name, "digest": corpus.digest, "train": corpus.train.size, "valid": corpus.valid.size,
        "test": corpus.test.size, "folder": str(data_folder() / corpus.name),
    }  # fmt: skip
    if corpus.tokenizer:
        train_bytes, valid_bytes, test_bytes = corpus.text_bytes
        found |= {"vocabulary": corpus.vocabulary, "dtype": corpus.train.dtype.name, "tokenizer": corpus.tokenizer,
                  "train_bytes": train_bytes, "valid_bytes": valid_bytes, "test_bytes": test_bytes}  # fmt: skip
    if options.json:
        print_json(found)
        return 0
    use = f"archipelago up --data.corpus {corpus.name}"
    if corpus.tokenizer:
        splits = [f"{split.size:,}" for split in (corpus.train, corpus.valid, corpus.test)]
        say(f"corpus {corpus.name!r}: {splits[0]} tokens to train on, {splits[1]} and {splits[2]} held out; "
            f"{corpus.vocabulary:,} different ones, {corpus.bytes_per_token:.2f} bytes each")  # fmt: skip
    elif corpus.train.ndim == 1:
        splits = [f"{split.size:,}" for split in (corpus.train, corpus.valid, corpus.test)]
        say(f"corpus {corpus.name!r}: {splits[0]} bytes to train on, {splits[1]} and {splits[2]} held out")
    else:
        splits = [f"{len(split):,}" for split in (corpus.train, corpus.valid, corpus.test)]
        size = corpus.train.shape[1]
        say(f"corpus {corpus.name!r}: {splits[0]} examples to train on, {splits[1]} and {splits[2]} held out; "
            f"{size:,} bytes each")  # fmt: skip
        use += f" --data.sequence-length {size - 1} --model.size {corpus.name}"
    say(f"  use it:  {use}")
    return 0


def _prepared(options: PrepareOptions) -> OpenCorpus:
    from archipelago.islands.data.corpus import prepare_text, prepare_tokens
    from archipelago.islands.data.tokenizer import vocabulary_of

    vocabulary = vocabulary_of(options.tokenizer) if options.tokenizer is not None else BYTES
    _require_used(options, vocabulary)
    if vocabulary == BYTES:
        known = _known(options)
        return known or prepare_text(Path(options.source), checked_name(_name(options), "the corpus name"))
    name = checked_name(options.name or f"{_name(options)}-bpe{vocabulary}", "the corpus name")
    known = _known(options)
    return prepare_tokens(known, name, vocabulary) if known else prepare_text(Path(options.source), name, vocabulary)


def _require_used(options: PrepareOptions, vocabulary: int) -> None:
    """Raises ConfigError for an option that would change nothing."""
    if options.name and options.source in KNOWN and vocabulary == BYTES:
        raise ConfigError(f"{options.source} keeps its own name", "Leave out --name.")
    if options.path and options.source not in ("enwik8", "digits"):
        raise ConfigError("--path is for enwik8 and digits", "Name a file or a folder as the source.")


def _known(options: PrepareOptions) -> OpenCorpus | None:
    """The corpus of bytes or examples that `source` stands for; None where it is a file or folder."""
    from archipelago.islands.data.corpus import prepare_stdlib
    from archipelago.islands.data.digits import prepare_digits
    from archipelago.islands.data.enwik8 import prepare_enwik8

    if options.source == "stdlib":
        return prepare_stdlib()
    if options.source in ("enwik8", "digits"):
        prepare = prepare_enwik8 if options.source == "enwik8" else prepare_digits
        with Progress(console=Console(stderr=True), transient=True) as bar:
            tasks: dict[str, TaskID] = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done)

            return prepare(options.path, progress)
    return None


def _name(options: PrepareOptions) -> str:
    """The name that was given, or one made from the source."""
    return options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(options.source).resolve().stem).strip("-.") or "text"
