"""A corpus for runs of a second or two, and a fixture that restores the state that commands change."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipelago.islands.data.corpus import OpenCorpus, open_corpus
from archipelago.islands.data.preparation import prepare_text


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenCorpus:
    """Prepare `small-text`, a corpus that models learn quickly, also for processes that the test starts."""
    monkeypatch.setenv("ARCHIPELAGO_DATA", str(tmp_path / "data"))
    source = tmp_path / "text.txt"
    source.write_text("".join(f"{n} islands and {n * n % 997} ships\n" for n in range(6000)), encoding="utf-8")
    prepare_text(source, "small-text")
    return open_corpus("small-text")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers, which commands replace."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
