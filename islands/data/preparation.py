"""Preparing corpora: text, tokens or examples are written to disk, measured and hashed on the way.

A corpus is written to a temporary folder, which is then renamed. It is therefore complete or absent, even when several
processes prepare it at once.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import BYTES
from archipelago.broker.errors import DataError
from archipelago.broker.files import staged_folder
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.data.corpus import (
    CARD_FILE,
    STDLIB,
    TEXT_FILE,
    Card,
    OpenCorpus,
    Splits,
    card_json,
    data_folder,
    is_prepared,
    open_corpus,
)
from archipelago.islands.data.tokenizer import FILE as TOKENIZER_FILE
from archipelago.islands.data.tokenizer import TextTokenizer, character_start, dtype_of, pieces, train
from archipelago.islands.data.verification import record_verified

MINIMUM_BYTES = 64 << 10
CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
#: The pieces of text that are tokenised together, on all cores.
_PIECES_AT_ONCE = 16


def splits_of(size: int) -> tuple[int, int, int]:
    """Split a text of `size` bytes into 90 % for training, and 5 % each for validation and test."""
    train, valid = size * 90 // 100, size * 5 // 100
    return train, valid, size - train - valid


def splits_of_examples(count: int) -> tuple[int, int, int]:
    """Split `count` examples into 80 % for training, and 10 % each for validation and test. Such corpora are small."""
    train, valid = count * 80 // 100, count * 10 // 100
    return train, valid, count - train - valid


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Read the rest of a stream, about 1 MiB at a time."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


class TextWriter:
    """Writes a corpus's data, and measures and hashes it on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=16)
        self.size = 0

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of the data so far, 32 hexadecimal digits."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def sync(self) -> None:
        """Wait until the data is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_text(self, path: Path) -> bool:
        """Append a text file, after a newline unless it is the first.

        Returns:
            False if the file is not UTF-8 text. Nothing is appended then.
        """
        size, before = self.size, self._hash.copy()
        decoder = codecs.getincrementaldecoder("utf-8")()
        if self.size:
            self.write(b"\n")
        with path.open("rb") as source:
            try:
                for chunk in chunks(source):
                    if b"\0" in chunk:
                        break
                    decoder.decode(chunk)
                    self.write(chunk)
                else:
                    decoder.decode(b"", final=True)
                    return True
            except UnicodeDecodeError:
                pass  # handled like a NUL byte
        self._file.seek(size)
        self._file.truncate()
        self.size, self._hash = size, before
        return False

    def write_files(self, files: Iterable[Path], what: str) -> str:
        """Append text files. Returns `what` they are, with the numbers of files that were written and skipped."""
        written = [self.write_text(path) for path in files]
        return f"{what} ({sum(written):,} files of text, {len(written) - sum(written):,} others skipped)"


#: Writes a corpus's data, and returns where it came from, in words.
Fill = Callable[[TextWriter], str]


def create(name: str, fill: Fill, example_bytes: int = 0, vocabulary: int = BYTES) -> OpenCorpus:
    """Create a corpus. If another process creates the same one at the same time, one of the two is used.

    Args:
        name: The corpus's name.
        fill: Writes the data.
        example_bytes: The size of each example. 0 for running text.
        vocabulary: With more than the 256 bytes, a tokenizer of this many tokens is learned from the training split,
            and the corpus holds the tokens of all splits.

    Raises:
        DataError: There is too little data (`data.too-small`), a different corpus has that name (`data.taken`), or the
            folder cannot be written (`data.unwritable`).
    """
    final, card = data_folder() / checked_name(name, "the corpus name"), None
    try:
        with staged_folder(final) as stage:
            card = _write(stage, name, fill, example_bytes)
            if vocabulary > BYTES:
                card = _tokenise(stage, card, vocabulary)
            (stage / CARD_FILE).write_bytes(card_json(card))
            record_verified(stage / TEXT_FILE, card.digest)
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


def _write(stage: Path, name: str, fill: Fill, example_bytes: int) -> Card:
    """Write the data. Returns the card that describes it."""
    with (stage / TEXT_FILE).open("wb") as file:
        writer = TextWriter(file)
        source = fill(writer)
        writer.sync()
    if writer.size < MINIMUM_BYTES:
        raise DataError(
            f"{source} holds {writer.size:,} bytes of data, which is too little to train on",
            f"Prepare UTF-8 text or examples of at least {MINIMUM_BYTES:,} bytes.",
            code="data.too-small",
        )
    size = example_bytes or 1
    counts = splits_of_examples(writer.size // size) if example_bytes else splits_of(writer.size)
    return Card(name, writer.size, writer.digest, source, Splits(*(count * size for count in counts)), example_bytes)


def _tokenise(stage: Path, card: Card, vocabulary: int) -> Card:
    """Replace the text in `stage` by its tokens, and add their tokenizer. Returns the new card."""
    path, text = stage / TEXT_FILE, stage / "text"
    path.rename(text)
    sizes = _whole_characters(text, card.splits)
    with text.open("rb") as source, path.open("wb") as file:
        tokenizer = train(pieces(source, sizes.train, _PIECE_BYTES), vocabulary)
        source.seek(0)
        writer = TextWriter(file)
        counts = [_write_tokens(writer, source, size, tokenizer) for size in asdict(sizes).values()]
        writer.sync()
    text.unlink()
    (stage / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
    return replace(
        card,
        bytes=writer.size,
        digest=writer.digest,
        splits=Splits(*counts),
        dtype=dtype_of(vocabulary).name,  # type: ignore[arg-type]
        vocabulary=vocabulary,
        tokenizer=tokenizer.digest,
        text_bytes=sizes,
    )


def _whole_characters(text: Path, splits: Splits) -> Splits:
    """Move the borders of the splits so that they cut no character."""
    mapped = np.memmap(text, dtype=np.uint8, mode="r")

    def start(place: int) -> int:
        window = max(0, place - 3)
        return window + character_start(mapped[window : place + 1].tobytes(), place - window)

    first, second = start(splits.train), start(splits.train + splits.valid)
    return Splits(first, second - first, mapped.size - second)


def _write_tokens(writer: TextWriter, source: BinaryIO, size: int, tokenizer: TextTokenizer) -> int:
    """Append the tokens of the next `size` bytes. Returns the number of tokens."""
    before, texts = writer.size, pieces(source, size, _PIECE_BYTES)
    while some := list(islice(texts, _PIECES_AT_ONCE)):
        for tokens in tokenizer.encode_batch(some):
            writer.write(tokens.tobytes())
    return (writer.size - before) // dtype_of(tokenizer.vocabulary).itemsize


def prepare_text(source: Path, name: str, vocabulary: int = BYTES) -> OpenCorpus:
    """Prepare a text file, or all text files of a folder in the order of their paths, joined by newlines.

    Hidden files are left out. Files that are not UTF-8 text are skipped, and the corpus's `source` counts them.

    Args:
        source: The file or folder.
        name: The corpus's name.
        vocabulary: With more than the 256 bytes, the corpus holds tokens of byte-level BPE.

    Raises:
        DataError: There is nothing at `source` (`data.no-source`), the name is reserved (`data.taken`), or one of the
            errors of `create`.
    """
    if name == STDLIB:
        raise DataError(
            f"the name {name!r} is reserved for the standard library's sources",
            "Choose another --name.",
            code="data.taken",
        )
    if not (source.is_file() or source.is_dir()):
        raise DataError(f"there is no file or folder {source}", "Check the path.", code="data.no-source")
    files = _visible_files(source) if source.is_dir() else [source]
    return create(name, lambda writer: writer.write_files(files, source.name or str(source)), vocabulary=vocabulary)


def _visible_files(folder: Path) -> list[Path]:
    def is_visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()

    return sorted(filter(is_visible, folder.rglob("*")), key=lambda path: path.relative_to(folder).as_posix())


def prepare_tokens(of: OpenCorpus, name: str, vocabulary: int) -> OpenCorpus:
    """Prepare a corpus of text again, as tokens of byte-level BPE.

    Raises:
        DataError: `of` holds tokens or examples (`data.not-text`), or one of the errors of `create`.
    """
    if of.tokenizer or of.train.ndim != 1:
        raise DataError(f"the corpus {of.name!r} is not a text of bytes", "Name a text.", code="data.not-text")

    def fill(writer: TextWriter) -> str:
        for split in (of.train, of.valid, of.test):
            for start in range(0, split.size, CHUNK_BYTES):
                writer.write(split[start : start + CHUNK_BYTES].tobytes())
        return of.source

    return create(name, fill, vocabulary=vocabulary)


def prepare_examples(examples_NxR: NDArray[np.uint8], name: str, source: str) -> OpenCorpus:
    """Prepare examples of R bytes each, in their order: the first are trained on, the last are held out.

    A model of examples takes the last byte of each as its label. Raises the errors of `create`.
    """

    def fill(writer: TextWriter) -> str:
        writer.write(examples_NxR.tobytes())
        return source

    return create(name, fill, examples_NxR.shape[1])
