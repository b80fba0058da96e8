"""Preparing corpora: text or tokens are written to disk with a card that describes them.

A corpus is written to a temporary folder, which is then renamed. It is therefore complete or absent, even when several
processes prepare it at once.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from archipelago.broker.errors import DataError
from archipelago.broker.files import staged_folder, sync
from archipelago.broker.messages import adapter
from archipelago.broker.observe.progress import progress
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.data.corpus import (
    CARD_FILE,
    STDLIB,
    TEXT_FILE,
    Card,
    OpenCorpus,
    Splits,
    data_folder,
    digest_of,
    is_prepared,
    open_corpus,
)
from archipelago.islands.data.documents import Choice, choose, visible_files
from archipelago.islands.data.tokenizer import FILE as TOKENIZER_FILE
from archipelago.islands.data.tokenizer import TextTokenizer, character_start, dtype_of, pieces

MINIMUM_BYTES = 64 << 10
_PIECE_BYTES = 64 << 10
#: The pieces of text that are tokenised together, on all cores.
_PIECES_AT_ONCE = 16


def splits_of(size: int) -> Splits:
    """Split a text of `size` bytes into 90 % for training, and 5 % each for validation and test."""
    train, valid = size * 90 // 100, size * 5 // 100
    return Splits(train, valid, size - train - valid)


def create(
    files: Sequence[Path],
    name: str,
    source: str,
    tokenizer: TextTokenizer | None = None,
    skipped: Mapping[str, int] | None = None,
    holds_out: bool = True,
) -> OpenCorpus:
    """Create a corpus of text files. If another process creates the same one at the same time, one of them is used.

    Args:
        source: Where the data comes from, in words.
        tokenizer: What the text is stored with; None for its bytes.
        skipped, holds_out: As for `choose`.

    Raises:
        DataError: There is too little data (`data.too-small`), a different corpus has that name (`data.taken`), or the
            folder cannot be written (`data.unwritable`).
    """
    final, card = data_folder() / checked_name(name, "the corpus name"), None
    try:
        with staged_folder(final) as stage:
            card = _write(stage, name, source, choose(files, skipped, holds_out), tokenizer)
    except OSError as error:
        if card is None or not is_prepared(name):
            raise DataError(
                f"the corpus {name!r} cannot be prepared in {final.parent} ({error})",
                "Check the path, the disk's space and permissions, or set ARCHIPELAGO_DATA to another folder.",
                code="data.unwritable",
            ) from error
    corpus = open_corpus(name)
    if (corpus.digest, corpus.tokenizer) != (card.digest, card.tokenizer):
        raise DataError(
            f"there is a different corpus {name!r} already (digest {corpus.digest}, not {card.digest})",
            f"Choose another --name, or delete {final}.",
            code="data.taken",
        )
    return corpus


def _write(stage: Path, name: str, source: str, choice: Choice, tokenizer: TextTokenizer | None) -> Card:
    """Write the data, and the card that describes it. Returns the card."""
    path, reading = stage / TEXT_FILE, choice.reading
    with path.open("wb") as file:
        sizes = choice.write(file)
    if (size := sum(sizes)) < MINIMUM_BYTES:
        read = reading.describe().partition(";")[0]
        raise DataError(
            f"{source} ({read}) holds {size:,} bytes of data, which is too little to train on",
            f"Prepare UTF-8 text of at least {MINIMUM_BYTES:,} bytes.",
            code="data.too-small",
        )
    described: dict[str, Any] = {"splits": Splits(*sizes) if len(sizes) > 1 else splits_of(size)}
    if tokenizer is not None:
        with progress("turning the text into tokens"):
            described = _tokenise(stage, described["splits"], tokenizer)
    sync(path)
    card = Card(name, path.stat().st_size, digest_of(path), source, reading=reading, **described)
    (stage / CARD_FILE).write_bytes(adapter(Card).dump_json(card, indent=2, exclude_none=True))
    return card


def _tokenise(stage: Path, splits: Splits, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Replace the text in `stage` by its tokens, and add their tokenizer. Returns the parts of the card about them."""
    path, text = stage / TEXT_FILE, stage / "text"
    path.rename(text)
    sizes = _whole_characters(text, splits)
    with text.open("rb") as source, path.open("wb") as file:
        counts = [_write_tokens(file, source, size, tokenizer) for size in asdict(sizes).values()]
    text.unlink()
    (stage / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
    return {
        "splits": Splits(*counts),
        "dtype": dtype_of(tokenizer.vocabulary).name,
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.digest,
        "text_bytes": sizes,
    }


def _whole_characters(text: Path, splits: Splits) -> Splits:
    """Move the borders of the splits so that they cut no character."""
    mapped = np.memmap(text, dtype=np.uint8, mode="r")

    def start(place: int) -> int:
        window = max(0, place - 3)
        return window + character_start(mapped[window : place + 1].tobytes(), place - window)

    first, second = start(splits.train), start(splits.train + splits.valid)
    return Splits(first, second - first, mapped.size - second)


def _write_tokens(target: BinaryIO, source: BinaryIO, size: int, tokenizer: TextTokenizer) -> int:
    """Append the tokens of the next `size` bytes. Returns the number of tokens."""
    count, texts = 0, pieces(source, size, _PIECE_BYTES)
    while some := list(islice(texts, _PIECES_AT_ONCE)):
        for tokens in tokenizer.encode_batch(some):
            target.write(tokens.tobytes())
            count += len(tokens)
    return count


def prepare_text(source: Path, name: str, tokenizer: TextTokenizer | None = None) -> OpenCorpus:
    """Prepare a text file, or all text files of a folder, joined by newlines.

    Of a folder, `documents` chooses what is held out; of a file, it is the last tenth. Hidden files, and files that are
    empty or not UTF-8 text, are skipped, and the corpus's `reading` counts them. Raises DataError if there is nothing
    at `source` (`data.no-source`), if the name is reserved (`data.taken`), or as `create`.
    """
    if name == STDLIB:
        raise DataError(
            f"the name {name!r} is reserved for the standard library's sources",
            "Choose another --name.",
            code="data.taken",
        )
    if not (source.is_file() or source.is_dir()):
        raise DataError(f"there is no file or folder {source}", "Copy it here first.", code="data.no-source")
    files, skipped = ([source], None) if source.is_file() else visible_files(source)
    return create(files, name, source.name or str(source), tokenizer, skipped, holds_out=source.is_dir())


# -- the sources of this Python's standard library: text that every machine has ----------------------------------------

#: Folders that do not belong to the library, and tests, which slim installations leave out.
_OTHER_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def prepare_stdlib(name: str = STDLIB, tokenizer: TextTokenizer | None = None) -> OpenCorpus:
    """Prepare the sources of this Python's standard library, or open the corpus of their bytes if it exists.

    Raises:
        DataError: This Python has no sources (`data.no-source`), or one of the errors of `create`.
    """
    if tokenizer is None and is_prepared(name):
        return open_corpus(name)
    root = Path(sysconfig.get_path("stdlib"))
    files = _sources(root)
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            "Use a Python that is not frozen or zipped, or prepare another text with `archipelago prepare FILE`.",
            code="data.no-source",
        )
    return create(files, name, f"standard library of Python {platform.python_version()}", tokenizer)


def _sources(root: Path) -> list[Path]:
    """Return the library's sources, without tests and without `_sysconfigdata`, which differs between builds."""
    wanted = (
        path
        for path in root.rglob("*.py")
        if _OTHER_FOLDERS.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return list(filter(Path.is_file, wanted))
