"""Tokenizers that are learned from texts, as the guide tells users to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from archipelago.islands.data.tokenizer import TextTokenizer


@cache
def learned(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Return a tokenizer with that many tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=0, show_progress=False)
    return TextTokenizer(Tokenizer.from_str(tokenizer.to_str()))
