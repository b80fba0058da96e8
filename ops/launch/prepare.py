"""`archipelago prepare`: turn text into a corpus."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from archipelago.broker.buckets.folder import is_address
from archipelago.broker.config import BYTES
from archipelago.broker.errors import ConfigError
from archipelago.broker.observe.progress import progress as waiting
from archipelago.broker.process import print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.ops.settings import say

if TYPE_CHECKING:
    from archipelago.islands.data.corpus import OpenCorpus


@dataclass(frozen=True)
class PrepareOptions:
    """Turn text into a corpus: a file or a folder of text, `enwik8` (100 MB of Wikipedia), or `stdlib`."""

    source: Annotated[str, tyro.conf.Positional]
    """A file, a folder, an address such as s3://BUCKET/TEXTS, `enwik8` or `stdlib`."""
    name: str | None = None
    """The name of the corpus, for --data.corpus. The default is made from the source."""
    tokenizer: str | None = None
    """`bpe:16384` learns byte-level BPE with this many tokens from the training split, and stores the text as tokens.
    The name of a tokenizer.json, or of a folder that has one, takes this tokenizer, for instance that of weights to
    begin with. The default stores bytes.
    """
    json: bool = False
    """Print one JSON object."""


def main(options: PrepareOptions) -> int:
    """Prepare one corpus, and print a summary."""
    from archipelago.islands.data.copies import bucket_of_corpora, upload_corpus
    from archipelago.islands.data.corpus import CARD_FILE, data_folder

    bucket = bucket_of_corpora()  # an unknown scheme shows before the work begins
    corpus = _prepare(options)
    upload_corpus(data_folder() / corpus.name, CARD_FILE)
    found: dict[str, object] = {
        "corpus": corpus.name, "digest": corpus.digest, "train": corpus.train.size, "valid": corpus.valid.size,
        "test": corpus.test.size, "folder": str(data_folder() / corpus.name),
    }  # fmt: skip
    if corpus.reading:
        found["reading"] = asdict(corpus.reading)
    if corpus.tokenizer:
        train_bytes, valid_bytes, test_bytes = corpus.text_bytes
        found |= {"vocabulary": corpus.vocabulary, "dtype": corpus.train.dtype.name, "tokenizer": corpus.tokenizer,
                  "train_bytes": train_bytes, "valid_bytes": valid_bytes, "test_bytes": test_bytes}  # fmt: skip
    if bucket:
        found["bucket"] = f"{bucket}/{corpus.name}"
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
    if bucket:
        say(f"  it is in {bucket}/{corpus.name}; machines with the same ARCHIPELAGO_DATA download it when they need it")
    say(f"  use it:  archipelago up --data.corpus {corpus.name}")
    return 0


def _prepare(options: PrepareOptions) -> OpenCorpus:
    from archipelago.islands.data.copies import fetch_text
    from archipelago.islands.data.corpus import KNOWN
    from archipelago.islands.data.preparation import is_bytes, prepare_text, prepare_tokens
    from archipelago.islands.data.tokenizer import encoding_of

    encoding = encoding_of(options.tokenizer) if options.tokenizer is not None else BYTES
    is_known, is_tokenised = options.source in KNOWN, not is_bytes(encoding)
    _require_useful(options, is_known=is_known, is_tokenised=is_tokenised)
    suffix = (f"-bpe{encoding}" if isinstance(encoding, int) else "-tokens") if is_tokenised else ""
    name = options.name or _name(options) + suffix
    if not is_known:
        with tempfile.TemporaryDirectory(prefix="archipelago-") as folder, _progress() as progress:
            source = fetch_text(options.source, Path(folder)) if is_address(options.source) else Path(options.source)
            return prepare_text(source, checked_name(name, "the corpus name"), encoding, progress)
    plain = _prepare_known(options)
    if not is_tokenised:
        return plain
    with waiting("making the tokens"):
        return prepare_tokens(plain, checked_name(name, "the corpus name"), encoding)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that says from time to time how far each activity is."""
    with waiting("preparing the text") as activity:

        def progress(what: str, done: int, total: int) -> None:
            activity.what, activity.done, activity.total = what, done, total

        yield progress


def _require_useful(options: PrepareOptions, *, is_known: bool, is_tokenised: bool) -> None:
    """Raise ConfigError (`config.value`) for an option that would change nothing."""
    if options.name and is_known and not is_tokenised:
        raise ConfigError(f"the corpus {options.source!r} keeps its own name", "Leave out --name.", code="config.value")


def _prepare_known(options: PrepareOptions) -> OpenCorpus:
    """Prepare the public data set that `source` names."""
    from archipelago.islands.data.copies import download_corpus
    from archipelago.islands.data.corpus import CARD_FILE, TEXT_FILE, data_folder, is_prepared
    from archipelago.islands.data.preparation import prepare_enwik8, prepare_stdlib

    if not is_prepared(options.source):
        download_corpus(data_folder() / options.source, CARD_FILE, TEXT_FILE)  # the bucket's, if it has it
    if options.source == "stdlib":
        return prepare_stdlib()
    with _progress() as progress:
        return prepare_enwik8(progress)


def _name(options: PrepareOptions) -> str:
    """Make a corpus's name from the source."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(options.source).resolve().stem).strip("-.") or "text"
