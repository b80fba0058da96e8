"""Tokenizers: encoding loses nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.errors import ConfigError, DataError
from archipelago.islands.data import tokenizer
from archipelago.islands.data.tokenizer import TextTokenizer, byte_tokenizer, pieces
from tests.failing import failing
from tests.learned import learned

LINES = [f"{n} islands, {n * n % 97} ships; häfen, 港\n" for n in range(400)]
LEARNED = learned(tuple(LINES), 400)
BYTES = byte_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_encoding_loses_nothing(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())
    for each in (BYTES, LEARNED):
        tokens = each.encode(text)
        assert each.bytes_of(tokens) == text.encode()
        assert "".join(each.decode(tokens)) == text


@given(st.binary())
def test_bytes_that_are_not_text_become_replacement_characters(data: bytes) -> None:
    assert "".join(BYTES.decode(data)) == data.decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_yielded_with_the_last() -> None:
    assert list(BYTES.decode("ä!".encode())) == ["", "ä", "!", ""]
    assert list(BYTES.decode("ä".encode()[:1])) == ["", "\ufffd"]


def test_a_file_holds_the_same_tokenizer_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / tokenizer.FILE
    path.write_text(LEARNED.to_json(), encoding="utf-8")
    found = tokenizer.from_file(path)
    assert found.digest == LEARNED.digest
    assert found.encode(LINES[3]) == LEARNED.encode(LINES[3])
    for content in (
        b"",
        b"{",
        b"{}",
        b"null",
        b'{"model": {"type": "BPE"}}',
        "\ud800".encode("utf-8", "surrogatepass"),
    ):
        path.write_bytes(content)
        with failing(DataError, "tokenizer.damaged"):
            tokenizer.from_file(path)
    with failing(DataError, "tokenizer.bad-name"):
        tokenizer.from_file(tmp_path / "absent")


def test_a_tokenizer_that_is_not_there_is_refused_and_the_size_of_tokens_fits_the_vocabulary() -> None:
    for name in ("", "bpe:16384", "absent.json"):
        with failing(ConfigError, "tokenizer.bad-name"):
            pytest.fail(f"{name}: {tokenizer.tokenizer_at(name)}")
    for size, name in ((256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")):
        assert tokenizer.dtype_of(size) == np.dtype(name)


@given(TEXTS, st.integers(4, 12), st.integers(0, 5))
def test_pieces_join_to_the_text(text: str, piece_bytes: int, more: int) -> None:
    data = text.encode()
    stream = io.BytesIO(data + b"x" * more)
    found = list(pieces(stream, len(data), piece_bytes))
    assert "".join(found) == text
    assert stream.tell() == len(data)


def other() -> Any:
    """Return a byte-level tokenizer as other programs write it, with special tokens, one of them before each text."""
    from tokenizers import AddedToken, Tokenizer, processors

    inner = Tokenizer.from_str(LEARNED.to_json())
    inner.add_special_tokens(["<|endoftext|>"])
    inner.add_tokens([AddedToken("  two spaces", normalized=False)])
    first = ("<|endoftext|>", inner.token_to_id("<|endoftext|>"))
    inner.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    return inner


def test_a_tokenizer_of_another_program_is_read_without_its_limits(tmp_path: Path) -> None:
    path = tmp_path / tokenizer.FILE
    other().save(str(path))
    found = tokenizer.from_file(path)
    text = "a much longer text than four tokens<|endoftext|>  two spaces"
    assert found.bytes_of(found.encode(text)).decode() == text
    assert found.encode_batch([text])[0].tolist() == found.encode(text)
    assert found.vocabulary == LEARNED.vocabulary + 2
    for each in (tmp_path, path):
        assert (there := tokenizer.tokenizer_at(str(each))) is not None
        assert there.meaning == found.meaning


def test_the_meaning_does_not_depend_on_how_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(LEARNED.to_json(), encoding="utf-8")
    content = json.loads(LEARNED.to_json()) | {"truncation": None, "decoder": None}
    (tmp_path / "two.json").write_text(json.dumps(content), encoding="utf-8")
    one, two = (tokenizer.from_file(tmp_path / f"{name}.json") for name in ("one", "two"))
    assert one.digest != two.digest
    assert one.meaning == two.meaning == LEARNED.meaning
    assert tokenizer.byte_tokenizer().meaning != LEARNED.meaning
    assert tokenizer.byte_tokenizer().is_bytes
    assert not LEARNED.is_bytes


def test_tokenizers_that_change_text_or_know_words_only_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    lower = Tokenizer.from_str(LEARNED.to_json())
    lower.normalizer = normalizers.Lowercase()
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    some = json.loads(LEARNED.to_json())  # without "z", "Z" and control characters, as where no alphabet was given
    used = sorted({tokenizer._CHARACTERS[byte] for text in [tokenizer._SAMPLE, *LINES] for byte in text.encode()})
    some["model"]["vocab"] = {name: n for n, name in enumerate(used)}
    some["model"]["merges"] = []
    neox = json.loads(LEARNED.to_json())
    neox["model"]["vocab"] = {tokenizer._CHARACTERS[byte]: n for n, byte in enumerate(sorted(tokenizer._OF_TEXT))}
    neox["model"]["merges"] = []
    (tmp_path / tokenizer.FILE).write_text(json.dumps(neox))
    assert tokenizer.from_file(tmp_path / tokenizer.FILE).vocabulary == 243, "UTF-8 has no other bytes"
    for inner in (lower, pieces, Tokenizer.from_str(json.dumps(some))):
        inner.save(str(tmp_path / tokenizer.FILE))
        with failing(DataError, "tokenizer.not-byte-level"):
            tokenizer.from_file(tmp_path / tokenizer.FILE)
    with failing(DataError, "tokenizer.not-byte-level"):
        TextTokenizer(Tokenizer(models.WordLevel({"two words": 0, "[UNK]": 1}, unk_token="[UNK]")))
