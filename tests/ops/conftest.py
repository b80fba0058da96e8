"""A text for runs of a second or two, and what commands change in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenCorpus:
    """`small-text`, which is easy to learn a little of, also for processes that the test starts."""
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    source = tmp_path / "text.txt"
    source.write_text("".join(f"{n} islands and {n * n % 997} ships\n" for n in range(6000)), encoding="utf-8")
    prepare_text(source, "small-text")
    return open_corpus("small-text")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The command takes signals over: they are given back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
