"""Corpora: prepared text, or examples, on this machine's disk, mapped into memory and never read whole.

Each corpus is a folder with `text.bin` (the bytes) and `corpus.json` (what they are). Most are running text; one of
examples has as many bytes for each, such as an image's pixels and its label. One with a `tokenizer.json` holds the
tokens that it made of a text, two bytes each, or four of a large vocabulary. A folder is written beside its place and
then renamed into it, so that a corpus is there completely or not at all, whoever else prepares it meanwhile.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import secrets
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
import platformdirs
from annotated_types import Ge, Gt
from numpy.typing import NDArray
from pydantic import StringConstraints, TypeAdapter, ValidationError

from archipelago.broker.config import BYTES
from archipelago.broker.errors import DataError
from archipelago.broker.manifest import Corpus
from archipelago.broker.redis.keys import checked_name
from archipelago.islands.data.tokenizer import FILE as TOKENIZER_FILE
from archipelago.islands.data.tokenizer import (
    TextTokenizer,
    Tokens,
    character_start,
    dtype_of,
    from_file,
    of_bytes,
    pieces,
    trained,
)

STDLIB = "stdlib"
MINIMUM_BYTES = 64 << 10
CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
_PIECES_AT_ONCE = 16
"""pieces of text that are made tokens of together, on all cores"""
_CARD_BYTES = 64 << 10
_PREPARE = "`archipelago prepare FILE_OR_DIR --name NAME`"
_PREPARED_BY_NAME = frozenset({"digits", "enwik8"})
_NOT_STDLIB_TEXT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""folders that are no part of the library, and tests, which slim installations leave out"""


@dataclass(frozen=True)
class OpenCorpus:
    """A prepared corpus. The three splits are contiguous, disjoint, read-only views of the mapped file: [tokens] of
    running text, which are its bytes unless there is a tokenizer; [examples, bytes of one] of a corpus of examples.
    """

    name: str
    digest: str
    """BLAKE2b-128 of the whole text, or of its tokens; 32 hexadecimal digits"""
    source: str
    """where the text came from, in words"""
    train: Tokens
    valid: Tokens
    test: Tokens
    vocabulary: int = BYTES
    tokenizer: str = ""
    """digest of the tokenizer; empty where a token is a byte"""
    text_bytes: tuple[int, ...] = ()
    """of the text of each split, in their order, where there is a tokenizer"""

    @property
    def identity(self) -> Corpus:
        """What the run's manifest holds of it."""
        tokens = self.train.size + self.valid.size + self.test.size
        if self.tokenizer:
            return Corpus(self.name, self.digest, sum(self.text_bytes), self.tokenizer, tokens)
        return Corpus(self.name, self.digest, tokens)

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text, which evaluations read: what makes losses by different tokenizers comparable."""
        return self.text_bytes[1] / self.valid.size if self.tokenizer else 1.0

    def open_tokenizer(self) -> TextTokenizer:
        """What made tokens of the text. Raises DataError when its file is damaged."""
        if not self.tokenizer:
            return of_bytes()
        folder = data_folder() / self.name
        found = from_file(folder / TOKENIZER_FILE)
        if found.digest != self.tokenizer:
            raise _damaged(folder, f"{TOKENIZER_FILE} is another than corpus.json says")
        return found


@dataclass(frozen=True)
class _Splits:
    """Elements of each split, or bytes of its text, in their order."""

    train: Annotated[int, Gt(0)]
    valid: Annotated[int, Ge(0)]
    test: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class _Card:
    """What `corpus.json` holds."""

    name: str
    bytes: Annotated[int, Gt(0)]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    source: str
    splits: _Splits
    example_bytes: Annotated[int, Ge(0)] = 0
    """of each example; 0 for running text"""
    dtype: Literal["uint8", "uint16", "uint32"] = "uint8"
    """of an element of text.bin, little-endian"""
    vocabulary: Annotated[int, Ge(BYTES)] = BYTES
    tokenizer: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")] = ""
    """digest of tokenizer.json; empty where an element is a byte of the text"""
    text_bytes: _Splits | None = None
    """of the text of each split, where there is a tokenizer"""


_CARD = TypeAdapter(_Card)


def splits_of(size: int) -> tuple[int, int, int]:
    """Bytes for training (90 %), validation and test (5 % each) of a text of `size` bytes."""
    train, valid = size * 90 // 100, size * 5 // 100
    return train, valid, size - train - valid


def splits_of_examples(count: int) -> tuple[int, int, int]:
    """Examples for training (80 %), validation and test (10 % each): such corpora are small."""
    train, valid = count * 80 // 100, count * 10 // 100
    return train, valid, count - train - valid


def data_folder() -> Path:
    """Where corpora live: $ARCHIPELAGO_DATA, or the user's cache."""
    chosen = os.environ.get("ARCHIPELAGO_DATA")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("archipelago") / "corpora"


def prepared() -> list[str]:
    """Names of the corpora on this machine."""
    return sorted(card.parent.name for card in data_folder().glob("[!.]*/corpus.json"))


def is_prepared(name: str) -> bool:
    """Whether a corpus of that name is on this machine."""
    return (data_folder() / checked_name(name, "the corpus name") / "corpus.json").is_file()


def open_corpus(name: str) -> OpenCorpus:
    """The corpus of that name; `stdlib` is prepared on first use.

    Raises DataError when it is not there or its files do not fit each other, ConfigError for a name that cannot be.
    """
    if not is_prepared(name):
        if name == STDLIB:
            return prepare_stdlib()
        there = ", ".join(prepared()) or "none yet"
        how = f"`archipelago prepare {name}`" if name in _PREPARED_BY_NAME else _PREPARE
        raise DataError(
            f"there is no corpus {name!r} in {data_folder()} (prepared: {there})", f"Prepare it with {how}."
        )
    folder = data_folder() / name
    card = _read_card(folder)
    try:
        size = (folder / "text.bin").stat().st_size
        if size != card.bytes:
            raise _damaged(folder, f"text.bin holds {size:,} bytes and corpus.json says {card.bytes:,}")
        text: Tokens = np.memmap(folder / "text.bin", dtype=dtype_of(card.vocabulary), mode="r")
    except OSError as error:
        raise _damaged(folder, f"text.bin cannot be read: {error.strerror}") from None
    train, valid, test = np.split(text, [card.splits.train, card.splits.train + card.splits.valid])
    if card.example_bytes:
        train, valid, test = (split.reshape(-1, card.example_bytes) for split in (train, valid, test))
    of_text = asdict(card.text_bytes).values() if card.text_bytes else ()
    known = (card.vocabulary, card.tokenizer, tuple(of_text))
    return OpenCorpus(name, card.digest, card.source, train, valid, test, *known)


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(f"the corpus {folder.name!r} is damaged ({why})", f"Delete {folder} and prepare it again.")


def _read_card(folder: Path) -> _Card:
    """Raises DataError unless corpus.json describes the corpus of its folder."""
    try:
        with (folder / "corpus.json").open("rb") as file:
            card = _CARD.validate_json(file.read(_CARD_BYTES))
    except OSError as error:
        raise _damaged(folder, f"corpus.json cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise _damaged(folder, f"corpus.json: {error.errors()[0]['msg'].lower()}") from None
    splits, dtype = asdict(card.splits).values(), dtype_of(card.vocabulary)
    uneven = card.example_bytes and any(split % card.example_bytes for split in splits)
    tokenised = card.vocabulary > BYTES
    wrong = dtype.name != card.dtype or tokenised != bool(card.tokenizer) or tokenised != bool(card.text_bytes)
    if card.name != folder.name or sum(splits) * dtype.itemsize != card.bytes or uneven or wrong:
        raise _damaged(folder, "corpus.json contradicts itself or its folder")
    return card


class TextWriter:
    """Writes a corpus's text, measuring and hashing on the way, and can take back what it wrote last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=16)
        self.size = 0

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of what is written, 32 hexadecimal digits."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def write_text(self, path: Path) -> bool:
        """Appends a text file, after a newline if it is not the first. False, and no change, unless it is UTF-8."""
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
                pass  # same as a NUL byte: not text
        self._file.seek(size)
        self._file.truncate()
        self.size, self._hash = size, before
        return False


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """What is left of `stream`, about 1 MiB at a time."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def create(name: str, fill: Callable[[TextWriter], str], example_bytes: int = 0, vocabulary: int = BYTES) -> OpenCorpus:
    """Makes a corpus of what `fill` writes; `fill` returns where that came from, in words.

    With `example_bytes`, that is whole examples of this size. With a `vocabulary` of more than the bytes, a tokenizer
    of so many tokens is learnt from the training part, and kept with the tokens that it makes of all parts. If somebody
    else has put the same corpus there meanwhile, theirs is used. Raises DataError when the text is too short, when a
    different corpus of that name is there, or when the folder cannot be written.
    """
    final = data_folder() / checked_name(name, "the corpus name")
    with _staging_folder(final) as stage:
        with (stage / "text.bin").open("wb") as file:
            writer = TextWriter(file)
            source = fill(writer)
            file.flush()
            os.fsync(file.fileno())
        if writer.size < MINIMUM_BYTES:
            raise DataError(
                f"{source} gives {writer.size:,} bytes of text, which is too little to train on",
                f"Name text (UTF-8) of at least {MINIMUM_BYTES:,} bytes.",
            )
        card = _card(name, writer, source, example_bytes)
        if vocabulary > BYTES:
            card = _tokenised(stage, card, vocabulary)
        (stage / "corpus.json").write_bytes(_CARD.dump_json(card, indent=2, exclude_none=True))
        _publish(stage, final)
    corpus = open_corpus(name)
    if (corpus.digest, corpus.tokenizer) != (card.digest, card.tokenizer):
        raise DataError(
            f"a different corpus {name!r} is already there (digest {corpus.digest}, not {card.digest})",
            f"Choose another --name, or delete {final}.",
        )
    return corpus


def _card(name: str, writer: TextWriter, source: str, example_bytes: int) -> _Card:
    size = example_bytes or 1
    counts = splits_of_examples(writer.size // size) if example_bytes else splits_of(writer.size)
    splits = _Splits(*(count * size for count in counts))
    return _Card(name, writer.size, writer.digest, source, splits, example_bytes)


def _tokenised(stage: Path, card: _Card, vocabulary: int) -> _Card:
    """Puts tokens in the place of the text in `stage`, and their tokenizer beside them; the card that fits these."""
    path, text = stage / "text.bin", stage / "text"
    path.rename(text)
    sizes = _whole_characters(text, card.splits)
    with text.open("rb") as source, path.open("wb") as file:
        tokenizer = trained(pieces(source, sizes.train, _PIECE_BYTES), vocabulary)
        source.seek(0)
        writer = TextWriter(file)
        counts = [_write_tokens(writer, source, size, tokenizer) for size in asdict(sizes).values()]
        file.flush()
        os.fsync(file.fileno())
    text.unlink()
    (stage / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
    return replace(
        card,
        bytes=writer.size,
        digest=writer.digest,
        splits=_Splits(*counts),
        dtype=dtype_of(vocabulary).name,  # type: ignore[arg-type]
        vocabulary=vocabulary,
        tokenizer=tokenizer.digest,
        text_bytes=sizes,
    )


def _whole_characters(text: Path, splits: _Splits) -> _Splits:
    """The splits of that text, moved so that no character is cut."""
    mapped = np.memmap(text, dtype=np.uint8, mode="r")

    def start(place: int) -> int:
        window = max(0, place - 3)
        return window + character_start(mapped[window : place + 1].tobytes(), place - window)

    first, second = start(splits.train), start(splits.train + splits.valid)
    return _Splits(first, second - first, mapped.size - second)


def _write_tokens(writer: TextWriter, source: BinaryIO, size: int, tokenizer: TextTokenizer) -> int:
    """Appends the tokens of the next `size` bytes; how many."""
    before, texts = writer.size, pieces(source, size, _PIECE_BYTES)
    while some := list(islice(texts, _PIECES_AT_ONCE)):
        for tokens in tokenizer.encoded(some):
            writer.write(tokens.tobytes())
    return (writer.size - before) // dtype_of(tokenizer.vocabulary).itemsize


@contextmanager
def _staging_folder(final: Path) -> Iterator[Path]:
    """A new folder beside `final`, gone afterwards. Raises DataError for what the file system refuses meanwhile."""
    stage = final.parent / f".{final.name}-{secrets.token_hex(8)}"
    try:
        stage.mkdir(parents=True)
        yield stage
    except OSError as error:
        raise DataError(
            f"the corpus {final.name!r} cannot be prepared in {final.parent} ({error})",
            "Check the path, the disk's space and rights, or set ARCHIPELAGO_DATA to another folder.",
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _publish(stage: Path, final: Path) -> None:
    """Renames `stage` to `final`, unless a corpus is there already."""
    try:
        stage.rename(final)
    except OSError:
        if not (final / "corpus.json").is_file():
            raise


def prepare_stdlib() -> OpenCorpus:
    """The standard library's own sources as a corpus; the one that is there already, if any.

    Files come in the order of a hash of their path, so that the three splits are of similar text. Raises DataError when
    this Python carries no sources.
    """
    if is_prepared(STDLIB):
        return open_corpus(STDLIB)
    root = Path(sysconfig.get_path("stdlib"))
    files = _stdlib_files(root)
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            f"Use a Python that is not frozen or zipped, or prepare text of your own with {_PREPARE}.",
        )

    def fill(writer: TextWriter) -> str:
        return _write_files(writer, files, f"standard library of Python {platform.python_version()}")

    return create(STDLIB, fill)


def _stdlib_files(root: Path) -> list[Path]:
    """The library's sources, without tests and without `_sysconfigdata`, which differs from build to build."""

    def place(path: Path) -> bytes:
        return hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).digest()

    wanted = (
        path
        for path in root.rglob("*.py")
        if _NOT_STDLIB_TEXT.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(filter(Path.is_file, wanted), key=place)


def prepare_text(source: Path, name: str, vocabulary: int = BYTES) -> OpenCorpus:
    """A text file, or all text files of a folder in the order of their paths, joined by newlines, as corpus `name`.

    With a `vocabulary` of more than the bytes, as tokens of byte-level BPE. Hidden files are left out; files that are
    not UTF-8 text are skipped and counted in the corpus's `source`. Raises DataError when `source` is not there, when
    it holds too little text, or when `name` stands for other text.
    """
    if name == STDLIB:
        raise DataError(f"{STDLIB!r} is the name of the Python standard library's sources", "Choose another --name.")
    if not (source.is_file() or source.is_dir()):
        raise DataError(f"there is no file or folder to prepare at {source}", "Check the path.")
    files = _visible_files(source) if source.is_dir() else [source]

    def fill(writer: TextWriter) -> str:
        return _write_files(writer, files, source.name or str(source))

    return create(name, fill, vocabulary=vocabulary)


def prepare_tokens(of: OpenCorpus, name: str, vocabulary: int) -> OpenCorpus:
    """A prepared text once more, as tokens of byte-level BPE. Raises DataError for what is no text of bytes."""
    if of.tokenizer or of.train.ndim != 1:
        raise DataError(f"the corpus {of.name!r} is no text of bytes", "Name a text.")

    def fill(writer: TextWriter) -> str:
        for split in (of.train, of.valid, of.test):
            for start in range(0, split.size, CHUNK_BYTES):
                writer.write(split[start : start + CHUNK_BYTES].tobytes())
        return of.source

    return create(name, fill, vocabulary=vocabulary)


def prepare_examples(examples_NxR: NDArray[np.uint8], name: str, source: str) -> OpenCorpus:
    """Examples of R bytes each as corpus `name`, in their order: the first are trained on, the last are held out.

    A model of examples takes the last byte of each as its label. Raises DataError when they are too few, or when `name`
    stands for other ones.
    """

    def fill(writer: TextWriter) -> str:
        writer.write(examples_NxR.tobytes())
        return source

    return create(name, fill, examples_NxR.shape[1])


def _visible_files(folder: Path) -> list[Path]:
    def visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()

    return sorted(filter(visible, folder.rglob("*")), key=lambda path: path.relative_to(folder).as_posix())


def _write_files(writer: TextWriter, files: Iterable[Path], what: str) -> str:
    """Appends the files; returns `what` they are, with how many were written and skipped."""
    written = [writer.write_text(path) for path in files]
    return f"{what} ({sum(written):,} files of text, {len(written) - sum(written):,} others skipped)"
