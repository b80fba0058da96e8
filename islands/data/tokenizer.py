"""Tokenizers: one token per byte, or any byte-level tokenizer. Any text can be encoded without loss.

They are `tokenizer.json` files as Hugging Face's `tokenizers` reads and writes them, so other programs find the same
tokens. Encoding gives the same result on every machine, so the same text gives the same corpus.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
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
#: Text that a byte-level tokenizer keeps: words, white space, several scripts, and a character of four bytes.
_SAMPLE = "The Quick fox's\n\n\tif x == 10:  # Häfen, 港, \U0001f30a\r\n <end>"
#: The bytes that UTF-8 has. The tokenizer of GPT-NeoX has no tokens for others.
_OF_TEXT = frozenset(range(BYTES)) - {0xC0, 0xC1, *range(0xF5, BYTES)}

#: uint8 if a token is a byte, else uint16, or uint32 for a vocabulary of more than 65,536 tokens.
Tokens = NDArray[np.unsignedinteger]


def _characters() -> list[str]:
    """Return the character for each byte in the vocabulary of a byte-level tokenizer (GPT-2's `bytes_to_unicode`).

    It is the byte's own character in Latin-1 if that is printable, else the next free one from U+0100.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(BYTES)]


_CHARACTERS = _characters()
_BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTERS)}


def tokenizer_at(name: str) -> TextTokenizer | None:
    """Return the tokenizer in a file, or in a folder that has a `tokenizer.json`; None for that of bytes.

    Raises:
        ConfigError: There is no such file (`tokenizer.bad-name`).
        DataError: The file cannot be used as a tokenizer (`from_file`).
    """
    path = Path(name)
    if not name or not path.exists():
        raise ConfigError(
            f"--tokenizer cannot be {name!r:.80}, because there is no such file",
            "Give a tokenizer.json, or a folder that has one.",
            code="tokenizer.bad-name",
        )
    found = from_file(path / FILE if path.is_dir() else path)
    if found.vocabulary <= BYTES and not found.is_bytes:
        raise _not_byte_level(f"has only {found.vocabulary} tokens")
    return None if found.is_bytes else found


def dtype_of(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned dtype that holds a token, little-endian."""
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


class TextTokenizer:
    """Encodes text as tokens, and decodes tokens. `encode` takes any text, and `bytes_of` inverts it."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        added = {token: each.content.encode() for token, each in inner.get_added_tokens_decoder().items()}
        names = {token: name for name, token in inner.get_vocab().items() if token not in added}
        #: One more than the largest token. A tokenizer may leave out numbers.
        self.vocabulary: int = max([*names, *added], default=-1) + 1
        if self.vocabulary > VOCABULARY_MAX:
            raise _not_byte_level(f"has the token {self.vocabulary - 1:,}")
        try:
            plain = {token: bytes(_BYTE_OF[character] for character in name) for token, name in names.items()}
        except KeyError as error:
            raise _not_byte_level(f"has tokens that stand for no bytes, with {error.args[0]!r}") from None
        self._bytes = [added.get(token, plain.get(token, b"")) for token in range(self.vocabulary)]

    @property
    def is_bytes(self) -> bool:
        """Whether each token is a byte and its number is that byte."""
        return self._bytes == [bytes([byte]) for byte in range(BYTES)]

    @cached_property
    def meaning(self) -> str:
        """A digest of the bytes that each token stands for, 32 hexadecimal digits.

        Tokenizers of equal meaning can be exchanged for each other. Unlike `digest`, it does not depend on how their
        files are written.
        """
        whole = hashlib.blake2b(digest_size=16)
        for text in self._bytes:
            whole.update(len(text).to_bytes(4, "big") + text)
        return whole.hexdigest()

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of its file, 32 hexadecimal digits."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        return str(self._inner.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text. All cores of this machine work on it."""
        dtype = dtype_of(self.vocabulary)
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype) for each in found]

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that the tokens stand for. Raises IndexError for a token outside the vocabulary."""
        return b"".join(self._bytes[token] for token in tokens)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text that each token adds, and then the rest.

        A character of several tokens is yielded with the last of them. Bytes that are not UTF-8 become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self._bytes[token])
        yield decoder.decode(b"", final=True)


def byte_tokenizer() -> TextTokenizer:
    """The tokenizer of corpora of bytes: each token is a byte, and its number is that byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_CHARACTERS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return TextTokenizer(inner)


def from_file(path: Path) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Raises DataError if it cannot be read (`tokenizer.bad-name`), holds no tokenizer (`tokenizer.damaged`), or one whose
    tokens are not bytes (`tokenizer.not-byte-level`).
    """
    from tokenizers import Tokenizer  # here, because most corpora need none

    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError("it is too large")
        inner = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"the tokenizer {path} cannot be read ({error.strerror})", "Check the path.", code="tokenizer.bad-name"
        ) from None
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise DataError(
            f"{path} holds no tokenizer ({error!s:.200})",
            "Restore the file from a copy, or prepare the corpus again.",
            code="tokenizer.damaged",
        ) from None
    inner.no_truncation()  # Files of Hugging Face may cut long texts, or fill up short ones.
    inner.no_padding()
    try:
        return _checked(TextTokenizer(inner))
    except DataError as error:
        raise DataError(f"{path} cannot be used: {error.what}", error.remedy, code=error.code) from None


def _checked(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the tokenizer if it keeps text as it is, up to a space before it."""
    try:
        found = tokenizer.bytes_of(tokenizer.encode(_SAMPLE))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise _not_byte_level(f"cannot encode any text ({error!s:.100})") from None
    if found.removeprefix(b" ") != _SAMPLE.encode():
        raise _not_byte_level("changes text")
    if missing := {bytes([byte]) for byte in _OF_TEXT} - {*tokenizer._bytes}:
        raise _not_byte_level(f"has no token for {len(missing)} of the {len(_OF_TEXT)} bytes of UTF-8, and drops them")
    return tokenizer


def _not_byte_level(fault: str) -> DataError:
    return DataError(
        f"this is not a byte-level tokenizer: it {fault}",
        "Use one whose tokens stand for bytes, as those of GPT-2 and Llama 3 do, or that `archipelago export` wrote.",
        code="tokenizer.not-byte-level",
    )


def pieces(stream: BinaryIO, size: int, piece_bytes: int) -> Iterator[str]:
    """Read the next `size` bytes in pieces of at most `piece_bytes` (4 or more), cut after lines if possible.

    Bytes that are not UTF-8 become U+FFFD. The cuts depend on the text alone.
    """
    rest = b""
    while size or rest:
        read = stream.read(min(size, max(1, piece_bytes - len(rest))))
        data, size = rest + read, size - len(read) if read else 0
        cut = _cut(data) if size else len(data)
        rest = data[cut:]
        yield data[:cut].decode("utf-8", "replace")


def _cut(data: bytes) -> int:
    """Return the end of a piece: after its last newline, else before its last character, else its whole length."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    return character_start(data, len(data) - 1) or len(data)


def character_start(data: bytes, place: int) -> int:
    """Return the index of the first byte of the UTF-8 character that the byte at `place` belongs to."""
    while place > 0 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place
