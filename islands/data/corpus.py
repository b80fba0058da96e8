"""Corpora on this machine's disk: where they are, what their files say, and how they are opened.

A corpus is a folder with `text.bin` (its data) and `corpus.json` (its card, which describes the data). The data is
mapped into memory. There are two kinds:

- Running text holds the bytes of a text.
- A tokenised text holds the tokens of a text, two bytes each, or four for a large vocabulary. Its folder has a
  `tokenizer.json` too.

`preparation` writes corpora.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import platformdirs
from annotated_types import Ge, Gt
from pydantic import StringConstraints, ValidationError

from archipelago.broker.buckets.folder import is_address
from archipelago.broker.config import BYTES
from archipelago.broker.errors import ConfigError, DataError, fault_in
from archipelago.broker.files import require_local
from archipelago.broker.manifest import Corpus
from archipelago.broker.messages import adapter
from archipelago.broker.observe.progress import progress
from archipelago.broker.redis.keys import checked_name, is_name
from archipelago.islands.data.documents import Reading
from archipelago.islands.data.tokenizer import FILE as TOKENIZER_FILE
from archipelago.islands.data.tokenizer import TextTokenizer, Tokens, byte_tokenizer, dtype_of, from_file

#: The corpus that `archipelago prepare` makes by its name alone.
STDLIB = "stdlib"
TEXT_FILE, CARD_FILE = "text.bin", "corpus.json"
DATA_VARIABLE = "ARCHIPELAGO_DATA"
CARD_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Splits:
    """The sizes of the splits, in their order: elements of the data, or bytes of text."""

    train: Annotated[int, Gt(0)]
    valid: Annotated[int, Ge(0)]
    test: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Card:
    """The content of `corpus.json`.

    Attributes:
        name: The corpus's name, which is its folder's too.
        bytes: The size of `text.bin`.
        digest: BLAKE2b-128 of `text.bin`.
        source: Where the data came from, in words.
        splits: Elements of each split.
        dtype: The dtype of an element, little-endian.
        vocabulary: The number of different tokens.
        tokenizer: The digest of `tokenizer.json`. Empty if an element is a byte of the text.
        text_bytes: The bytes of text in each split, if there is a tokenizer.
        reading: The files that it was made of, if it was made of a user's files.
        example_bytes: Always 0. Version 0.2 had corpora of examples, too, with the size of one here.
    """

    name: str
    bytes: Annotated[int, Gt(0)]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    source: str
    splits: Splits
    dtype: Literal["uint8", "uint16", "uint32"] = "uint8"
    vocabulary: Annotated[int, Ge(BYTES)] = BYTES
    tokenizer: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")] = ""
    text_bytes: Splits | None = None
    reading: Reading | None = None
    example_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class OpenCorpus(Card):
    """A prepared corpus, mapped into memory, with its card.

    The three splits are contiguous, disjoint, read-only views of the file. A token is a byte unless there is a
    tokenizer.

    Attributes:
        train: The tokens to train on.
        valid: Held-out tokens for evaluations during a run.
        test: Held-out tokens for a final evaluation.
    """

    train: Tokens
    valid: Tokens
    test: Tokens

    def describe(self) -> str:
        """Return where the data came from, and what was read, skipped and held out."""
        return f"{self.source}: {self.reading.describe()}" if self.reading else self.source

    @property
    def text_sizes(self) -> tuple[int, ...]:
        """The bytes of text in each split."""
        return tuple(asdict(self.text_bytes or self.splits).values())

    @property
    def identity(self) -> Corpus:
        """The corpus as a run's manifest describes it."""
        tokens = self.train.size + self.valid.size + self.test.size
        return Corpus(self.name, self.digest, sum(self.text_sizes), self.tokenizer, tokens if self.tokenizer else 0)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the validation text. It makes losses under different tokenizers comparable."""
        return self.text_sizes[1] / self.valid.size if self.tokenizer else 1.0

    def open_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer that the text was encoded with. Raises DataError when its file is damaged."""
        if not self.tokenizer:
            return byte_tokenizer()
        folder = data_folder() / self.name
        found = from_file(folder / TOKENIZER_FILE)
        if found.digest != self.tokenizer:
            raise _damaged(folder, f"{TOKENIZER_FILE} is not the tokenizer that {CARD_FILE} names")
        return found


def data_folder() -> Path:
    """Return the folder of all corpora on this machine: $ARCHIPELAGO_DATA, or one in the user's cache."""
    chosen = os.environ.get(DATA_VARIABLE)
    if not chosen:
        return platformdirs.user_cache_path("archipelago") / "corpora"
    require_local(Path(chosen), "$ARCHIPELAGO_DATA")
    return Path(chosen).expanduser()


def prepared() -> list[str]:
    """Return the names of the corpora on this machine."""
    return sorted(card.parent.name for card in data_folder().glob(f"[!.]*/{CARD_FILE}"))


def is_prepared(name: str) -> bool:
    return (data_folder() / checked_name(name, "the corpus name") / CARD_FILE).is_file()


def open_corpus(name: str, *, verifies: bool = False) -> OpenCorpus:
    """Open the corpus of that name. `stdlib` is prepared on first use.

    Args:
        verifies: Whether to read all data, and compare it with its digest. Its size is always compared.

    Raises:
        DataError: It is not there (`data.missing`), or its files do not fit each other (`data.damaged`).
        ConfigError: No corpus can have that name, or it is the path or the address of a text (`data.missing`).
    """
    is_path = os.path.exists(name)  # noqa: PTH110 - it takes any text
    if is_address(name) or (is_path and not is_name(name)):
        raise ConfigError(
            f"{name!r} is a path or an address, and not the name of a prepared corpus",
            f"Run `archipelago prepare {name}` for a file or a folder on this machine, and give the corpus's name, "
            "which that says.",
            code="data.missing",
        )
    if not is_prepared(name):
        if name == STDLIB:
            from archipelago.islands.data.preparation import prepare_stdlib

            return prepare_stdlib()
        present = ", ".join(prepared()) or "none yet"
        what = name if is_path else "FILE_OR_FOLDER --name NAME"
        raise DataError(
            f"there is no corpus {name!r} in {data_folder()} (prepared: {present})",
            f"Run `archipelago prepare {what}`, or name another corpus.",
            code="data.missing",
        )
    folder = data_folder() / name
    card = _read_card(folder)
    try:
        size = (folder / TEXT_FILE).stat().st_size
        if size != card.bytes:
            raise _damaged(folder, f"{TEXT_FILE} holds {size:,} bytes, and {CARD_FILE} says {card.bytes:,}")
        if verifies and digest_of(folder / TEXT_FILE) != card.digest:
            raise _damaged(folder, f"{TEXT_FILE} does not have digest {card.digest}")
        data: Tokens = np.memmap(folder / TEXT_FILE, dtype=dtype_of(card.vocabulary), mode="r")
    except OSError as error:
        raise _damaged(folder, f"{TEXT_FILE} cannot be read: {error.strerror}") from None
    train, valid, test = np.split(data, [card.splits.train, card.splits.train + card.splits.valid])
    return OpenCorpus(**vars(card), train=train, valid=valid, test=test)


def _read_card(folder: Path) -> Card:
    """Read `corpus.json`. Raises DataError (`data.damaged`) unless it describes the corpus of its folder."""
    try:
        with (folder / CARD_FILE).open("rb") as file:
            card: Card = adapter(Card).validate_json(file.read(CARD_BYTES_MAX))
    except OSError as error:
        raise _damaged(folder, f"{CARD_FILE} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise _damaged(folder, f"{CARD_FILE}: {fault_in(error)}") from None
    splits, dtype = asdict(card.splits).values(), dtype_of(card.vocabulary)
    is_tokenised = card.vocabulary > BYTES
    is_consistent = (
        card.name == folder.name
        and sum(splits) * dtype.itemsize == card.bytes
        and dtype.name == card.dtype
        and is_tokenised == bool(card.tokenizer) == bool(card.text_bytes)
        and not card.example_bytes
    )
    if not is_consistent:
        raise _damaged(folder, f"{CARD_FILE} contradicts itself or its folder's name, or is of examples")
    return card


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(
        f"the corpus {folder.name!r} is damaged ({why})",
        f"Delete {folder}, and prepare it again or copy it from a machine where `archipelago doctor` accepts it.",
        code="data.damaged",
    )


def digest_of(path: Path) -> str:
    """Return the BLAKE2b-128 digest of a file, 32 hexadecimal digits. Raises OSError if it cannot be read."""
    with progress(f"verifying {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
