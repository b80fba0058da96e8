"""Tokenizers: bytes themselves, or byte-level BPE learnt from a text. Every text has tokens, every token has bytes.

Both are `tokenizer.json` files as Hugging Face's `tokenizers` reads and writes them, so other programs find the same
tokens. Training and encoding give the same result on every machine: whoever prepares the same text has the same corpus.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import BYTES
from archipelago.broker.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
VOCABULARY_MAX = 1 << 20
_FILE_BYTES_MAX = 256 << 20
_SPEC = re.compile(r"bpe:([0-9]{1,9})")

Tokens = NDArray[np.unsignedinteger]
"""uint8 where a token is a byte, else uint16, or uint32 for more than 65,536 of them"""


def _characters() -> list[str]:
    """The character that stands for each byte in the vocabulary of a byte-level tokenizer (GPT-2's `bytes_to_unicode`):
    the byte's own in Latin-1 where that prints, else the next one from U+0100 on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(BYTES)]


_CHARACTERS = _characters()
_BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTERS)}


def vocabulary_of(spec: str) -> int:
    """V of `bpe:V`. Raises ConfigError for any other text, and where V is out of range."""
    found = _SPEC.fullmatch(spec)
    size = int(found[1]) if found else 0
    if not BYTES < size <= VOCABULARY_MAX:
        raise ConfigError(
            f"--tokenizer cannot be {spec!r:.80}", f"Write bpe:V, with V tokens, {BYTES + 1} to {VOCABULARY_MAX:,}."
        )
    return size


def dtype_of(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned integer that holds a token, little-endian."""
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


class TextTokenizer:
    """From text to tokens and back. `encode` takes any text; `bytes_of` inverts it for any tokens."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.vocabulary: int = inner.get_vocab_size()
        try:
            names = [inner.id_to_token(token) for token in range(self.vocabulary)]
            self._bytes = [bytes(_BYTE_OF[character] for character in name or "\n") for name in names]
        except KeyError:
            raise DataError(
                "the tokenizer is not of the byte-level kind, whose tokens stand for bytes",
                "Use one that `archipelago prepare --tokenizer` or `archipelago export` wrote.",
            ) from None

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of its file, 32 hexadecimal digits."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        return str(self._inner.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """Its tokens."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encoded(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each, by all cores of this machine."""
        dtype = dtype_of(self.vocabulary)
        return [np.array(found.ids, dtype) for found in self._inner.encode_batch_fast(list(texts))]

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """What they stand for. Raises IndexError for a token that is not there."""
        return b"".join(self._bytes[token] for token in tokens)

    def decoded(self, tokens: Iterable[int]) -> Iterator[str]:
        """What each adds to the text, and what is left at the end; bytes that are no UTF-8 as U+FFFD.

        A character of several tokens comes with the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self._bytes[token])
        yield decoder.decode(b"", final=True)


def of_bytes() -> TextTokenizer:
    """A token is a byte, and its number that byte: what corpora without a tokenizer hold."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_CHARACTERS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return TextTokenizer(inner)


def trained(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Byte-level BPE of that many tokens, learnt from `texts` (GPT-2, Radford et al. 2019).

    The 256 bytes are among them, so that no text is without tokens. Raises DataError when the text has too few pairs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=_CHARACTERS, show_progress=False, special_tokens=[]
    )
    inner.train_from_iterator(texts, trainer)
    made = TextTokenizer(inner)
    if made.vocabulary < vocabulary:
        raise DataError(
            f"the text gives {made.vocabulary:,} tokens, not the {vocabulary:,} that --tokenizer names",
            f"Write bpe:{made.vocabulary}, or name a larger text.",
        )
    return made


def from_file(path: Path) -> TextTokenizer:
    """The tokenizer in a `tokenizer.json`. Raises DataError when it cannot be read, or is of another kind."""
    from tokenizers import Tokenizer  # most corpora are of bytes

    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError("it is too large")
        inner = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the tokenizer {path} cannot be read ({error.strerror})", "Check the path.") from None
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise DataError(f"{path} holds no tokenizer ({error!s:.200})", "Put back a copy, or make it again.") from None
    return TextTokenizer(inner)


def pieces(stream: BinaryIO, size: int, piece_bytes: int) -> Iterator[str]:
    """The next `size` bytes of `stream` as texts of at most `piece_bytes` (4 or more), cut after a line where one ends.

    Bytes that are no UTF-8 become U+FFFD. Where it is cut depends on the text alone.
    """
    rest = b""
    while size or rest:
        read = stream.read(min(size, max(1, piece_bytes - len(rest))))
        data, size = rest + read, size - len(read) if read else 0
        cut = _cut(data) if size else len(data)
        rest = data[cut:]
        yield data[:cut].decode("utf-8", "replace")


def _cut(data: bytes) -> int:
    """Where to end a piece: after its last newline, else before its last character, else at the end."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    return character_start(data, len(data) - 1) or len(data)


def character_start(data: bytes, place: int) -> int:
    """The first byte of the UTF-8 character that the byte at `place` belongs to."""
    while place > 0 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place
